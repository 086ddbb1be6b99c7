"""Kernels for cards that are not here: whole stages in Triton's interpreter, and machine code for each kind of card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from fusionai.backends.torch.serving import TorchServingProgram
from fusionai.capture.capture import capture
from fusionai.ir.partition import StageGraph, cut_blocks
from fusionai.ir.serving import FROM_SEGMENTS, serving_graph
from fusionai.ir.validate import validate
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import Segment, ServeOptions
from harness.cross_compiled import TARGETS, compiled
from harness.interpreted_card import CPU, Launches, interpreted, like_a_card
from harness.zoo import models

pytestmark = pytest.mark.slow

MOST_SHARED_BYTES = {"sm": 99 << 10, "gf": 64 << 10}
"""What a group of threads has on consumers' cards of NVIDIA and on AMD's."""
ONE_AT_A_TIME = [
    [Segment(1, 0, 9, 0, (0, 2, 1)), Segment(2, 0, 5, 0, (3, 5))],
    [Segment(1, 9, 1, 3), Segment(2, 5, 1, 2)],
]
"""Prompts of two sessions, then a token of each."""
MIXED = [*ONE_AT_A_TIME, [Segment(1, 10, 2, 3), Segment(2, 6, 1, 2), Segment(3, 0, 20, 0, (6, 7, 8, 9, 10))]]


@cache
def stages(name: str) -> Sequence[StageGraph]:
    model = next(one for one in models() if one.name == name)
    captured = capture(
        model.source, task=model.task, batch=(1, 8), sequence=(1, model.positions), train=False,
        example_inputs=model.examples,
    )  # fmt: skip
    graph = validate(serving_graph(captured.graph))
    blocks = 1 + max(node.block for node in graph.nodes)
    return cut_blocks(graph, [(0, 2), (2, 3), (3, blocks)]).stages


def host(array: Any) -> HostTensor:
    return host_tensor(str(array.dtype), array.shape, np.ascontiguousarray(array).data)


def served(
    name: str, options: ServeOptions, passes: Sequence[Sequence[Segment]], *, card: bool
) -> tuple[list[Any], list[list[str]]]:
    """Return the last stage's results of each pass, and the kernels that the layer's stage launched."""
    results: list[Any] = []
    launched: list[list[str]] = []
    with like_a_card(), interpreted() if card else nullcontext(Launches()) as launches:
        programs: list[TorchServingProgram] = []
        for stage in stages(name):
            program = TorchServingProgram(stage.graph, options=options, device=CPU, memory_limit_bytes=None)
            drawn = np.random.default_rng(len(programs))
            program.import_weights(
                (spec.key, host(0.2 * drawn.standard_normal(spec.shape, dtype=np.float32)))
                for spec in stage.graph.params.values()
            )
            programs.append(program)
        ids = np.random.default_rng(7)
        for segments in passes:
            rows = sum(segment.length for segment in segments)
            values = {"input_ids": host(ids.integers(0, 60, (1, rows)))}
            for number, (stage, program) in enumerate(zip(stages(name), programs, strict=True)):
                inputs = {one: values[one] for one in stage.graph.inputs if one not in FROM_SEGMENTS}
                launches.kernels.clear()
                last = number + 1 == len(programs)
                values |= program.run(
                    segments, inputs, wanted=list(stage.graph.outputs), rows=[rows - 1, 0] if last else None
                )
                if number == 1:
                    launched.append([kernel for kernel, _ in launches.kernels])
            results.append(np.frombuffer(values["logits"].data, dtype=np.float32).copy())
    return results, launched


def agree(
    name: str, weights: Any, cached: Any, passes: Sequence[Sequence[Segment]], tolerance: float
) -> list[list[str]]:
    options = ServeOptions(pages=64, sessions=4, pass_tokens=64, page_tokens=4, weights=weights, cache=cached)
    expected, none = served(name, options, passes, card=False)
    made, launched = served(name, options, passes, card=True)
    assert none == [[]] * len(passes)
    for one, other in zip(made, expected, strict=True):
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()
    return launched


LAYER = ["lines", "several", "lines", "attend", "several", "lines", "several", "lines", "several", "lines"]


def test_prompts_and_decoding_give_what_operators_give() -> None:
    assert agree("llama", "int4", "fp32", ONE_AT_A_TIME, 2e-5) == [LAYER] * 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt2", "phi3", "qwen2", "mistral"])
@pytest.mark.parametrize(
    ("weights", "cached", "tolerance"),
    # In a cache of eight bits, a level may be the next one; in bfloat16, operators round their results too.
    [("fp32", "fp32", 1e-5), ("int4", "int8", 5e-3), ("int8", "fp16", 1e-3), ("bf16", "bf16", 2e-2)],
)
def test_stages_of_every_kind_give_what_operators_give(name: str, weights: str, cached: str, tolerance: float) -> None:
    launched = agree(name, weights, cached, MIXED, tolerance)
    assert all(len(kernels) <= 12 for kernels in launched)


def test_kernels_become_machine_code_for_nvidias_and_amds_cards() -> None:
    for target in ("sm_90", "gfx1100"):
        made = compiled(target, only=("single INT4_32 32 F", "attend INT8 128 16"))[target]
        assert len(made) == 2
        assert all(one.code_bytes > 1000 for one in made.values())


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_becomes_machine_code_and_fits_the_memory_of_a_group_of_threads(target: str) -> None:
    made = compiled(target)[target]
    assert len(made) > 40
    for name, one in made.items():
        assert one.code_bytes > 1000, name
        assert one.shared_bytes <= MOST_SHARED_BYTES[target[:2]], name
