"""Complex values as pairs of real ones: every rule against PyTorch, what travels, and what is refused by its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import FactorySource
from fusionai.capture.tasks import ExampleInput
from fusionai.capture.tracing.complex_parts import REFUSED, is_complex, real_parts
from fusionai.capture.tracing.complex_rules import RULES
from fusionai.capture.tracing.export import decompositions
from fusionai.ir.schema import content_hash
from fusionai.primitives.errors import ModelError
from harness.complex_models import POSITIONS, ComplexRotary

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

Body = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Of two complex tensors [3, 4, 16] and a real one."""


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


class Computing(nn.Module):
    """A function of complex tensors; inputs and result are real, so that it can be an exported program."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        result = self.body(torch.view_as_complex(x), torch.view_as_complex(y), r)
        return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result


def lowered(body: Body, inputs: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    program = torch.export.export(Computing(body), inputs, strict=False).run_decompositions(decompositions())
    real_parts(program, RULES)
    return program.graph_module


def gradients(run: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    given = [x.clone().requires_grad_() for x in inputs]
    result = run(*given)
    weights = torch.arange(result.numel(), dtype=torch.float32).reshape(result.shape).cos()
    found = torch.autograd.grad((result * weights).sum(), given, allow_unused=True)
    return [result.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True))]


EXACT: Mapping[str, Body] = {
    "product": lambda x, y, r: x * y,
    "product by a part of the other": lambda x, y, r: x * y[:1],
    "product by a real tensor": lambda x, y, r: x * r,
    "a real tensor first": lambda x, y, r: r * x,
    "product by a number": lambda x, y, r: x * 2.5,
    "product by a complex number": lambda x, y, r: x * (2.0 + 0.5j),
    "real tensor by i": lambda x, y, r: x + 1j * r,
    "sum": lambda x, y, r: x + y,
    "sum of which one is small": lambda x, y, r: x + y[0, 0],
    "sum with a real tensor": lambda x, y, r: x + r,
    "sum of a small one with a real tensor": lambda x, y, r: x[0, 0] + r,
    "sum with a number": lambda x, y, r: x + 1,
    "sum with a multiple": lambda x, y, r: torch.add(x, y, alpha=2),
    "difference": lambda x, y, r: x - y,
    "difference from a real tensor": lambda x, y, r: r - x,
    "difference from a number": lambda x, y, r: 1.5 - x,
    "negative": lambda x, y, r: -x,
    "conjugate": lambda x, y, r: x * y.conj(),
    "conjugate for good": lambda x, y, r: torch.conj_physical(x).resolve_conj(),
    "real part": lambda x, y, r: (x * y).real,
    "imaginary part": lambda x, y, r: (x * y).imag,
    "imaginary part of the conjugate": lambda x, y, r: (x * y).conj().imag,
    "of parts": lambda x, y, r: torch.complex(r, x.imag),
    "of parts of unlike shapes": lambda x, y, r: torch.complex(r, r[0, 0]) * x,
    "as real": lambda x, y, r: torch.view_as_real(x * y)[..., 1] - torch.view_as_real(x * y)[..., 0],
    "shapes": lambda x, y, r: x.reshape(3, 2, 32).transpose(0, 1).permute(2, 0, 1).unsqueeze(1).squeeze(1).flatten(1),
    "choices": lambda x, y, r: x[1:, ::2, None, 3][:, :, 0] + y[0, 1, 0],
    "by index": lambda x, y, r: x[(r[:, 0, 0] > 0).long()].index_select(1, (r[0, :2, 0] > 0).long()),
    "expanded and repeated": lambda x, y, r: x[:, :1].expand(3, 4, 16) * y.repeat(1, 1, 1),
    "cut and joined": lambda x, y, r: torch.cat([*x.split(5, dim=-1), y], dim=-1).flip(-1).roll(3, -1),
    "joined with a real one": lambda x, y, r: torch.cat([x, torch.complex(r, torch.zeros_like(r))], dim=1),
    "stacked": lambda x, y, r: torch.stack([x, y], dim=1).unbind(1)[1],
    "chosen by a mask": lambda x, y, r: torch.where(r > 0, x, y),
    "filled by a mask": lambda x, y, r: x.masked_fill(r > 0, 0.0),
    "cast": lambda x, y, r: r.to(torch.complex64) * x,
    "cast to a real type": lambda x, y, r: (x * y).real.to(torch.float32),
    "padded": lambda x, y, r: torch.nn.functional.pad(x, (1, 2)),
    "sums": lambda x, y, r: x.sum(dim=1) + y.mean(dim=1) + x.cumsum(1)[:, -1],
    "made": lambda x, y, r: x * torch.ones_like(x) + torch.full((16,), 1 + 2j) + torch.zeros(16, dtype=torch.complex64),
    "triangle": lambda x, y, r: x.tril() + y.triu(1),
    "square": lambda x, y, r: x.square() + y**2,
}
CLOSE: Mapping[str, Body] = {
    "from length and angle": lambda x, y, r: torch.polar(r.abs(), x.real) * y,
    "exponential": lambda x, y, r: torch.exp(x * 0.5),
    "exponential of i": lambda x, y, r: torch.exp(1j * r) * x,
    "length": lambda x, y, r: (x * y).abs(),
    "quotient": lambda x, y, r: x / (y + 3),
    "quotient by a real tensor": lambda x, y, r: x / (r + 5),
    "quotient by a number": lambda x, y, r: x / 3.0,
    "number by": lambda x, y, r: 2.0 / (x + 3),
    "reciprocal": lambda x, y, r: torch.reciprocal(x + 3),
    "matrices": lambda x, y, r: x @ y.transpose(1, 2),
    "matrix with a real one": lambda x, y, r: x @ torch.complex(r, torch.zeros_like(r)).transpose(1, 2),
    "einsum": lambda x, y, r: torch.einsum("bij,bkj->bik", x, y),
}


def inputs() -> tuple[torch.Tensor, ...]:
    return numbers(3, 4, 16, 2), numbers(3, 4, 16, 2, seed=1), numbers(3, 4, 16, seed=2)


RULED: Mapping[str, Body] = {**EXACT, **CLOSE}


class All(nn.Module):
    """Every body at once: exporting takes a moment, whatever it is that is exported."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(Computing(body)(x, y, r) for body in RULED.values())


@pytest.fixture(scope="module")
def ruled() -> fx.GraphModule:
    program = torch.export.export(All(), inputs(), strict=False).run_decompositions(decompositions())
    real_parts(program, RULES)
    return program.graph_module


def test_no_complex_tensor_remains(ruled: fx.GraphModule) -> None:
    assert not any(is_complex(node.meta.get("val")) for node in ruled.graph.nodes)


@pytest.mark.parametrize("name", RULED)
def test_a_rule_is_pytorchs(name: str, ruled: fx.GraphModule) -> None:
    """Forward bit for bit where whole vectors are multiplied and nothing but products and sums is asked for."""
    place = list(RULED).index(name)
    (wanted, *wanted_gradients), (found, *found_gradients) = (
        gradients(Computing(RULED[name]), inputs()), gradients(lambda *given: ruled(*given)[place], inputs()),
    )  # fmt: skip
    if name in EXACT:
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(found_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_length_of_zero_has_no_gradient() -> None:
    zeros = (torch.zeros(3, 4, 16, 2), *inputs()[1:])
    graph = lowered(lambda x, y, r: x.abs(), zeros)
    assert not gradients(lambda *given: graph(*given)[0], zeros)[1].any()


class Turned(nn.Module):
    """Pairs of features turned by a complex table, which a subclass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def turns(self) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.first(x).unflatten(-1, (-1, 2)))
        return self.last(torch.view_as_real(pairs * self.turns()).flatten(-2))


def _table() -> torch.Tensor:
    return torch.polar(torch.ones(16), torch.arange(16.0))


class Constant(Turned):
    def __init__(self) -> None:
        super().__init__()
        self.table = _table().conj()

    def turns(self) -> torch.Tensor:
        return self.table


class Buffer(Turned):
    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", _table(), persistent=persistent)

    def turns(self) -> torch.Tensor:
        return self.get_buffer("table")


class Learnt(Turned):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(_table())

    def turns(self) -> torch.Tensor:
        return self.table


def captured(factory: Callable[[], nn.Module], **examples: torch.Tensor) -> Captured:
    given = examples or {"x": numbers(3, 5, 32)}
    return capture(FactorySource(factory), task="regression", batch=(1, 8), example_inputs=given)


@pytest.mark.parametrize("factory", [Constant, Buffer, lambda: Buffer(persistent=True)])
def test_a_complex_table_travels_as_its_parts(factory: Callable[[], nn.Module]) -> None:
    made = captured(factory)
    (spec,) = [spec for spec in made.graph.params.values() if spec.key == "table"]
    assert spec.shape == (16, 2)
    assert spec.dtype == "float32"
    assert all("complex" not in value.dtype for value in made.graph.values.values())
    ((_, sent),) = made.state(["table"])
    table: Any = factory().table
    assert bytes(sent.data) == torch.view_as_real(table.resolve_conj()).numpy().tobytes()
    result = self_check(made)
    assert result.forward_diff == 0.0
    assert result.gradient_diff is not None
    assert result.gradient_diff <= 1e-6


def test_files_of_a_complex_buffer_are_told() -> None:
    assert any(
        "table" in note and "last dimension of 2" in note for note in captured(lambda: Buffer(persistent=True)).notes
    )
    assert not captured(Buffer).notes


class Written(Turned):
    """Results are written into a complex tensor, as Fourier operators (arXiv 2010.08895) do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.first(x).unflatten(-1, (-1, 2)))
        made = torch.zeros(x.shape[0], 7, 16, dtype=torch.complex64, device=x.device)
        made[:, 1:6] = pairs * 1j
        made[:, 0] += pairs[:, 1]
        made *= 2.0
        return self.last(torch.view_as_real(made).flatten(-2))


def test_complex_tensors_may_be_written_into() -> None:
    result = self_check(captured(Written))
    assert result.forward_diff <= 1e-6
    assert result.gradient_diff is not None
    assert result.gradient_diff <= 1e-6


def refusal(factory: Callable[[], nn.Module], **examples: torch.Tensor) -> str:
    with pytest.raises(ModelError) as refused:
        captured(factory, **examples)
    return refused.value.message


def test_a_complex_parameter_is_refused_by_name() -> None:
    said = refusal(Learnt)
    assert "table" in said
    assert "view_as_complex" in said


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def pairs(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.fc(x).unflatten(-1, (-1, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.angle(self.pairs(x))


class Cubed(Angles):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.pairs(x) ** 3)


class Given(Angles):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pairs(x)


def test_an_operator_without_a_rule_is_refused_by_its_line() -> None:
    said = refusal(Angles, x=numbers(3, 8))
    assert "aten.angle.default" in said
    assert "test_complex_parts.py" in said
    assert "torch.angle(" in said
    assert "other operation" not in said


def test_a_power_has_no_wrong_form() -> None:
    assert "a power other than the square" in refusal(Cubed, x=numbers(3, 8))


def test_a_complex_result_is_refused() -> None:
    with pytest.raises(ModelError, match="results are real"):
        capture(FactorySource(Given), task="none", batch=(1, 8), example_inputs={"x": numbers(3, 8)})


def test_a_complex_input_is_refused() -> None:
    said = refusal(Angles, x=torch.view_as_complex(numbers(3, 8, 2)))
    assert "'x' is complex" in said


def test_a_graph_without_complex_values_is_left_alone() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.zeros(2, 4),)).run_decompositions({})
    before = str(program.graph)
    real_parts(program, RULES)
    assert str(program.graph) == before
    assert not any(REFUSED in node.meta for node in program.graph.nodes)


def test_repeated_layers_that_take_complex_values_are_copied() -> None:
    ids = ExampleInput(torch.arange(36).reshape(4, 9) * 7 % 31, ("b", "s"))
    hashes: list[str] = []
    for whole in (False, True):
        made = capture(
            FactorySource(lambda: ComplexRotary(layers=5)), task="masked_lm", batch=(1, 8), sequence=(1, POSITIONS),
            example_inputs={"input_ids": ids}, whole=whole,
        )  # fmt: skip
        hashes.append(content_hash(made.graph))
    assert hashes[0] == hashes[1]


def test_rotary_positions_of_whole_vectors_are_pytorchs_bit_for_bit() -> None:
    """Heads of 64: each position turns 32 pairs, which every instruction set takes in whole vectors."""
    ids = ExampleInput(torch.arange(36).reshape(4, 9) * 7 % 31, ("b", "s"))
    made = capture(
        FactorySource(lambda: ComplexRotary(width=128, heads=2, layers=2)), task="masked_lm", batch=(1, 8),
        sequence=(1, POSITIONS), example_inputs={"input_ids": ids},
    )  # fmt: skip
    result = self_check(made)
    assert result.forward_diff == 0.0
    assert result.gradient_diff is not None
    assert result.gradient_diff <= 1e-5
