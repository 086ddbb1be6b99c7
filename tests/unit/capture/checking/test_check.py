"""The report of `fusion check`, the spelling of sizes, masks, and the eager form of the semantic attention."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys

import msgspec
import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.semantic import attention as backend_attention
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.check import check
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.graph.values import spell
from fusionai.capture.models.source import ConfigSource, FactorySource
from fusionai.capture.tasks import ExampleInput
from fusionai.capture.tracing.attention import MaskRule, attention, mask_rule
from fusionai.ir.shapes import evaluate
from fusionai.primitives.errors import ModelError
from harness.patience import CEILING_S

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "vocab_size": 23, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def tiny() -> Captured:
    return capture(ConfigSource({"model_type": "llama", **TINY}), sequence=(1, 16))


@pytest.mark.slow
def test_a_model_that_fits() -> None:
    report = check(ConfigSource({"model_type": "llama", **TINY}), sequence=(1, 16))
    assert report.ok
    assert report.cached_serving
    assert report.problems == ()
    assert (report.attention_layers, report.attention_nodes) == (3, 3)
    assert sum(block.parameters for block in report.blocks) == report.parameters
    assert len({block.kind for block in report.blocks[1:4]}) == 1
    assert report.operators["aten.linear.default"] == 3 * 7 + 1
    assert report.owed_bytes == 4 * 4


@pytest.mark.slow
def test_everything_unsupported_is_listed_at_once() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            return torch.linalg.inv(h) + torch.linalg.matrix_exp(h)

    source = FactorySource(lambda: (Odd(), {"x": torch.randn(2, 4, 4)}))
    report = check(source, task="none")
    assert not report.ok
    assert not report.cached_serving
    assert {problem.op for problem in report.problems} >= {"aten.linalg_matrix_exp.default"}
    assert len(report.problems) == 2
    assert "aten.linear.default" in report.operators
    line = inspect.getsourcelines(Odd.forward)[1] + 2
    assert {problem.line for problem in report.problems} == {
        f" at test_check.py:{line} in forward (`return torch.linalg.inv(h) + torch.linalg.matrix_exp(h)`)"
    }
    with pytest.raises(ModelError, match=rf"at test_check.py:{line} .* and 1 other operation"):
        capture(source, task="none")


@pytest.mark.slow
def test_attention_outside_the_interface_is_counted() -> None:
    config = {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 23}
    report = check(ConfigSource(config | {"bos_token_id": 1, "eos_token_id": 2}), sequence=(1, 16))
    assert (report.attention_layers, report.attention_nodes) == (2, 0)
    assert report.ok
    assert not report.cached_serving
    assert any("no cache can serve it" in note for note in report.notes)


@pytest.mark.slow
def test_a_fixed_sequence_is_refused_with_a_sentence() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = torch.zeros_like(x[:, 0])
            for position in range(x.shape[1]):
                state = torch.tanh(self.inner(x[:, position]) + state)
            return state

    example = {"x": ExampleInput(torch.zeros(2, 5, 4), ("b", "s", None))}
    with pytest.raises(ModelError, match="one size of the sequence"):
        check(FactorySource(Loop), task="none", sequence=(1, 16), example_inputs=example)


@pytest.mark.slow
def test_a_learned_position_table_limits_the_sequence() -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 23, "n_positions": 12}
    source = ConfigSource(config | {"bos_token_id": 1, "eos_token_id": 1})
    captured = capture(source, sequence=(1, 64))
    assert captured.graph.symbols["s"] == (1, 12)
    assert any("12 positions" in note for note in captured.notes)
    with pytest.raises(ModelError, match="up to 12 tokens"):
        capture(source, sequence=(16, 64))


@pytest.mark.slow
def test_a_large_model_is_checked_with_fewer_layers(tiny: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionai.capture.checking.self_check.LARGEST_PARAMETERS", tiny.n_parameters - 1)
    result = self_check(tiny)
    assert result.reduced
    assert result.parameters < tiny.n_parameters
    assert (result.forward_diff, result.ok) == (0.0, True)


@pytest.mark.slow
def test_a_graph_that_differs_is_caught(tiny: Captured) -> None:
    nodes = tuple(
        msgspec.structs.replace(node, kwargs={**node.kwargs, "scale": 1.0}) if node.op == "fusion.attention" else node
        for node in tiny.graph.nodes
    )
    wrong = dataclasses.replace(tiny, graph=msgspec.structs.replace(tiny.graph, nodes=nodes))
    with pytest.raises(ModelError, match="differs from the module"):
        self_check(wrong)


@pytest.mark.parametrize("ranges", [{"batch": (0, 4)}, {"batch": (4, 2)}, {"sequence": (0, 0)}])
def test_impossible_ranges(ranges: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ModelError, match="range of"):
        capture(ConfigSource({"model_type": "llama", **TINY}), **ranges)


def test_sizes_are_spelt_in_the_grammar_of_the_ir() -> None:
    b, s = sympy.Symbol("s77", integer=True, positive=True), sympy.Symbol("s27", integer=True, positive=True)
    names = {"s77": "b", "s27": "s"}
    for expression in [b, b * s, s + 1, s - 1, 2 * b + 3 * s, s**2, FloorDiv(s, 2) + 1, Mod(s, 4), Max(s, 4), 7 - s]:
        for values in ({"b": 2, "s": 9}, {"b": 5, "s": 4}):
            expected = int(expression.subs({b: values["b"], s: values["s"]}))
            assert evaluate(spell(expression, names), values) == expected
    assert spell(sympy.Integer(5), names) == 5
    with pytest.raises(ValueError, match="u0"):
        spell(sympy.Symbol("u0") + 1, names)
    with pytest.raises(ValueError, match="sin"):
        spell(sympy.sin(b), names)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("extras", [False, True])
def test_the_eager_attention_agrees_with_the_backend(
    causal: bool, window: int | None, softcap: float | None, extras: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, 7, 8, generator=generator)
    k, v = torch.randn(2, 2, 7, 8, generator=generator), torch.randn(2, 2, 7, 6, generator=generator)
    sinks = torch.randn(4, generator=generator) if extras else None
    # The first key stays visible, so that no query is left without any.
    key_mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool() if extras else None
    got = attention(q, k, v, sinks, key_mask, 0.3, causal, window, softcap, 0.0)
    expected = backend_attention(
        q, k, v, scale=0.3, causal=causal, window=window, softcap=softcap, sinks=sinks, key_mask=key_mask,
        dropout=0.0, key=DropoutKey(0, 0, 0), node=0,
    )  # fmt: skip
    seen = expected if key_mask is None else expected[:, :, :5]
    torch.testing.assert_close(got[:, :, : seen.shape[2]], seen, atol=1e-5, rtol=1e-5)


def test_masks_are_read_as_rules() -> None:
    from transformers import masking_utils as masks

    positions = torch.arange(4)[None]
    packed = masks.packed_sequence_compatibility_function(masks.causal_mask_function, positions, positions)
    rules = {
        masks.causal_mask_function: MaskRule(causal=True),
        masks.bidirectional_mask_function: MaskRule(causal=False),
        masks.sliding_window_causal_mask_function(5): MaskRule(causal=True, window=5),
        masks.sliding_window_bidirectional_mask_function(5): MaskRule(causal=False, window=5),
        packed: MaskRule(causal=True),
        masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)): MaskRule(causal=True),
    }
    for function, expected in rules.items():
        assert mask_rule(mask_function=function, batch_size=1, q_length=4) == expected
    either = masks.or_masks(masks.causal_mask_function, masks.bidirectional_mask_function)
    for function in (either, masks.and_masks(masks.causal_mask_function, either), lambda b, h, q, k: k < q):
        with pytest.raises(ModelError, match="neither causal"):
            mask_rule(mask_function=function)
    chunked = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ModelError, match="no position beyond its own chunk of 4") as refused:
        mask_rule(mask_function=chunked, batch_size=1, q_length=5)
    assert refused.value.hint == "Ask for sequences of at most 4 tokens."


@pytest.mark.long
def test_a_billion_parameters_without_their_memory() -> None:
    """Under 1 GB, in a process of its own because memory is counted per process."""
    code = (
        "import json, resource, torch, transformers\n"
        "from fusionai.capture.capture import capture\n"
        "from fusionai.capture.models.source import ConfigSource\n"
        "captured = capture(ConfigSource({'model_type': 'llama', 'hidden_size': 2048, 'intermediate_size': 5632,\n"
        "    'num_hidden_layers': 22, 'num_attention_heads': 32, 'num_key_value_heads': 4}))\n"
        "peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "print(json.dumps([captured.n_parameters, peak_bytes]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=CEILING_S)
    parameters, peak_bytes = json.loads(done.stdout.splitlines()[-1])
    assert parameters > 1e9
    assert peak_bytes < 1e9
