"""Programs learnt by watching, against what the modules really do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fusionai.capture.models.build import build, rebuild
from fusionai.capture.models.initialisation import Program
from fusionai.capture.models.source import ConfigSource, FactorySource
from fusionai.ir.schema import InitOp
from fusionai.ir.weights import initialise
from fusionai.primitives.errors import ModelError


def programs(factory: Callable[[], nn.Module]) -> dict[str, Program | None]:
    built = build(FactorySource(factory), seed=3)
    assert not built.real
    assert all(parameter.is_meta for parameter in built.module.parameters())
    return dict(built.programs)


class Raw(nn.Module):
    """One parameter, made by the test."""

    def __init__(self, make: Callable[[], torch.Tensor], after: Callable[[torch.Tensor], object] = id) -> None:
        super().__init__()
        self.weight = nn.Parameter(make())
        after(self.weight)


def no_grad(change: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    return torch.no_grad()(change)


@pytest.mark.parametrize(
    ("make", "after", "expected"),
    [
        (lambda: torch.zeros(4, 3), id, [InitOp("fill", (0.0,))]),
        (lambda: torch.ones(4, 3), id, [InitOp("fill", (1.0,))]),
        (lambda: torch.full((4, 3), 2.5), id, [InitOp("fill", (2.5,))]),
        (lambda: torch.randn(4, 3), id, [InitOp("normal", (0.0, 1.0))]),
        (lambda: torch.randn(4, 3) * 0.02, id, [InitOp("normal", (0.0, 1.0)), InitOp("mul", (0.02,))]),
        (lambda: torch.rand(4, 3) - 0.5, id, [InitOp("uniform", (0.0, 1.0)), InitOp("add", (-0.5,))]),
        (lambda: torch.empty(4, 3), lambda w: w.data.normal_(1.0, 2.0), [InitOp("normal", (1.0, 2.0))]),
        (lambda: torch.empty(4, 3), no_grad(lambda w: w.uniform_(-2, 2)), [InitOp("uniform", (-2.0, 2.0))]),
        (lambda: torch.randn(4, 3), lambda w: nn.init.zeros_(w), [InitOp("fill", (0.0,))]),
        (lambda: torch.empty(4, 3), lambda w: nn.init.xavier_uniform_(w), [InitOp("uniform", (-1.0, 1.0))]),
        (
            lambda: torch.randn(4, 3),
            no_grad(lambda w: w[2].zero_()),
            [InitOp("normal", (0.0, 1.0)), InitOp("fill_row", (2, 0.0))],
        ),
        (lambda: torch.randn(4, 3), no_grad(lambda w: w[:, 2].zero_()), None),
        (lambda: torch.empty(4, 4), lambda w: nn.init.orthogonal_(w), None),
        (lambda: torch.eye(3), id, None),
        (lambda: torch.randn(4, 3).cumsum(0), id, None),
        (lambda: torch.empty(4, 3), id, None),
    ],
    ids=[
        *("zeros", "ones", "full", "randn", "randn-scaled", "rand-shifted", "data-normal", "uniform", "overwritten"),
        *("xavier", "row", "column", "orthogonal", "eye", "computed", "never"),
    ],
)
def test_a_parameter_of_ones_own(
    make: Callable[[], torch.Tensor], after: Callable[[torch.Tensor], object], expected: list[InitOp] | None
) -> None:
    found = programs(lambda: Raw(make, after))["weight"]
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert [op.op for op in found] == [op.op for op in expected]
    for op, wanted in zip(found, expected, strict=True):
        limit = math.sqrt(6 / 7) if wanted == InitOp("uniform", (-1.0, 1.0)) else None
        assert op.args == pytest.approx((-limit, limit) if limit else wanted.args)


def test_layers_of_torch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6, padding_idx=3)
            self.conv = nn.Conv1d(6, 4, 3)
            self.norm = nn.LayerNorm(4)

    found = programs(Net)
    assert found["embed.weight"] == (InitOp("normal", (0.0, 1.0)), InitOp("fill_row", (3.0, 0.0)))
    bound = 1 / math.sqrt(18)
    for key in ("conv.weight", "conv.bias"):
        (op,) = found[key] or ()
        assert op.op == "uniform"
        assert op.args == pytest.approx((-bound, bound))
    assert found["norm.weight"] == (InitOp("fill", (1.0,)),)


def test_a_truncated_normal_has_its_distribution() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(200, 200))
            nn.init.trunc_normal_(self.weight, mean=0.1, std=0.5, a=-0.4, b=1.1)

    found = programs(Net)["weight"]
    assert found is not None
    assert [op.op for op in found] == ["uniform", "erfinv", "mul", "add", "clamp"]
    drawn = initialise("weight", (200, 200), "float32", found, 5)
    expected = Net().weight.detach().numpy()
    assert drawn.min() >= -0.4
    assert drawn.max() <= 1.1
    assert drawn.mean() == pytest.approx(expected.mean(), abs=0.01)
    assert drawn.std() == pytest.approx(expected.std(), abs=0.01)
    assert np.quantile(drawn, 0.1) == pytest.approx(np.quantile(expected, 0.1), abs=0.01)


@pytest.mark.parametrize("name", ["orthogonal_", "dirac_", "sparse_"])
def test_functions_that_skip_meta_tensors_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As `from torch.nn.init import orthogonal_` in the owner's module would bind it.
    monkeypatch.setitem(globals(), "imported", getattr(nn.init, name))
    shape, arguments = ((4, 4, 3), ()) if name == "dirac_" else ((4, 4), (0.5,))
    found = programs(lambda: Raw(lambda: torch.randn(shape), lambda w: globals()["imported"](w, *arguments[:1])))
    assert found["weight"] is None
    assert globals()["imported"] is getattr(nn.init, name)


@pytest.mark.slow
def test_transformers_models_are_declared_throughout() -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 11}
    config |= {"bos_token_id": 1, "eos_token_id": 1}
    built = build(ConfigSource(config), seed=0)
    assert None not in built.programs.values()
    assert built.programs["transformer.wte.weight"] == (InitOp("normal", (0.0, 0.02)),)
    # Scaled by the depth, as GPT-2 does it: transformers decides, not we.
    (op,) = built.programs["transformer.h.0.mlp.c_proj.weight"] or ()
    assert op.args == pytest.approx((0.0, 0.02 / math.sqrt(2 * 2)))
    assert "lm_head.weight" not in built.programs

    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    built = build(ConfigSource(bert | {"intermediate_size": 16, "vocab_size": 11}, "masked_lm"), seed=0)
    assert built.programs["bert.embeddings.word_embeddings.weight"] == (
        InitOp("normal", (0.0, 0.02)),
        InitOp("fill_row", (0.0, 0.0)),
    )


class Orthogonal(nn.Module):
    """Initialised by its parent in a way no program can say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)


def test_what_has_no_program_is_made_again() -> None:
    built = build(FactorySource(Orthogonal), seed=3)
    unknown = frozenset(key for key, program in built.programs.items() if program is None)
    assert unknown == {f"layers.{i}.weight" for i in range(3)}
    first, again = dict(rebuild(built, unknown)), dict(rebuild(built, unknown))
    for key, weight in first.items():
        assert torch.allclose(weight @ weight.T, torch.eye(6), atol=1e-5)
        assert torch.equal(weight, again[key])
    assert not torch.equal(first["layers.0.weight"], first["layers.1.weight"])
    other = dict(rebuild(build(FactorySource(Orthogonal), seed=4), unknown))
    assert not torch.equal(first["layers.0.weight"], other["layers.0.weight"])


def test_what_is_computed_from_other_parameters_is_made_again_with_them() -> None:
    """The kernel of weight normalisation raises if direction and length are on different devices."""
    built = build(FactorySource(lambda: torch.nn.utils.weight_norm(nn.Linear(6, 5))), seed=3)
    unknown = frozenset(key for key, program in built.programs.items() if program is None)
    made = dict(rebuild(built, unknown))
    assert made.keys() == unknown >= {"weight_g"}
    assert not any(parameter.is_meta for parameter in made.values())


def test_building_leaves_the_random_state_and_torch_alone() -> None:
    register, truncate = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    build(FactorySource(Orthogonal), seed=3)
    with pytest.raises(ModelError):
        build(FactorySource(lambda: nn.Linear(-1, 2)), seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert nn.Module.register_parameter is register
    assert nn.init._no_grad_trunc_normal_ is truncate
    assert not nn.Linear(2, 2).weight.is_meta


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match="lazy parameter"):
        build(FactorySource(lambda: nn.LazyLinear(4)), seed=0)


def test_a_module_that_needs_its_numbers_is_built_for_real() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))
            self.scale = self.weight.abs().max().item()

    built = build(FactorySource(Scaled), seed=0)
    assert built.real
    assert any("real memory" in note for note in built.notes)
    (value,) = dict(rebuild(built, frozenset({"weight"}))).values()
    assert value.abs().max().item() == built.module.scale


class Copied(nn.Module):
    """A layer and what is made of it: a deep copy, one that is changed, one of its own draws, a loaded state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.same, self.halved, self.other = (copy.deepcopy(self.first) for _ in range(3))
        self.loaded = nn.Linear(6, 6)
        self.loaded.load_state_dict(self.first.state_dict())
        with torch.no_grad():
            self.halved.weight.mul_(0.5)
        nn.init.normal_(self.other.weight)
        self.turned = nn.Parameter(self.first.weight.detach().t().clone())
        self.alone = nn.Linear(6, 6)


def test_copies_begin_with_the_same_values() -> None:
    built = build(FactorySource(Copied), seed=3)
    assert not built.real
    assert built.notes == ()
    assert all(parameter.is_meta for parameter in built.module.parameters())
    values = {
        key: initialise(key, tuple(parameter.shape), "float32", program, seed=3)
        for key, parameter in built.parameters().items()
        if (program := built.programs[key]) is not None
    }
    assert values.keys() == dict(built.module.named_parameters()).keys()
    for name in ("weight", "bias"):
        for copied in ("same", "loaded"):
            assert np.array_equal(values[f"{copied}.{name}"], values[f"first.{name}"])
    assert np.array_equal(values["halved.weight"], np.multiply(values["first.weight"], np.float32(0.5)))
    assert np.array_equal(values["other.bias"], values["first.bias"])
    for other in ("other.weight", "turned", "alone.weight"):
        assert not np.isclose(values[other], values["first.weight"]).any()
    alone = built.programs["alone.weight"]
    assert alone is not None
    assert [step.op for step in alone] == ["uniform"]


def test_copies_of_what_has_no_program_are_made_again_alike() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Linear(6, 6)
            nn.init.orthogonal_(first.weight)
            self.layers = nn.ModuleList(copy.deepcopy(first) for _ in range(3))

    built = build(FactorySource(Layers), seed=3)
    assert not built.real
    unknown = frozenset(key for key, program in built.programs.items() if program is None)
    assert unknown == {f"layers.{i}.weight" for i in range(3)}
    first, *others = dict(rebuild(built, unknown)).values()
    assert torch.allclose(first @ first.T, torch.eye(6), atol=1e-5)
    assert all(torch.equal(first, other) for other in others)


def test_layers_of_a_transformer_are_built_without_memory() -> None:
    def model() -> nn.Module:
        return nn.Transformer(8, 2, 2, 2, 16, batch_first=True)

    built = build(FactorySource(model), seed=0)
    assert not built.real
    assert all(program is not None for program in built.programs.values())
    assert built.parameters().keys() == dict(model().named_parameters()).keys()
