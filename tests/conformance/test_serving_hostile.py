"""Passes that no driver sends, on stages with compiled rows, rings, experts and states: each is refused by name or
computed, and what an honest session gets afterwards has the same bits."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from conformance.test_serving_backend_families import _EVERYWHERE, _MORE, _STATES, family_of
from fusionai.backends.serving.base import ServingProgram
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import Segment
from harness.staged_serving import OPTIONS, Pipeline

VOCABULARY = 67
ODD = (
    0,
    1,
    3,
    7,
    32,
    40,
    63,
    64,
    65,
    99,
    100,
    255,
    4096,
    65_535,
    2**20 - 1,
    2**20,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
)
NO_NUMBERS = (np.nan, np.inf, -np.inf, 3e38)
PASSES, MANY = 300, 5000
CHANGES = {**_EVERYWHERE, **_MORE, **_STATES}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma2", {"cache": "int8"}),
    ("mamba2", {}),
    ("mixtral", {"weights": "int8"}),
    ("llama", {"weights": "int4", "cache": "bf16"}),
    ("deepseek_v3", {}),
    ("gpt_oss", {}),
    ("qwen3_next", {}),
    ("lfm2", {}),
    ("jamba", {}),
]


class Attacker:
    """Draws passes for a stage: most nearly right, so that they come far."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def number(self, below: int) -> int:
        return self.draw.choice(ODD) if self.draw.random() < 0.2 else self.draw.randrange(below)

    def segment(self, program: ServingProgram) -> Segment:
        draw = self.draw
        session = self.number(8)
        length = draw.randint(1, 3) if draw.random() < 0.7 else draw.choice((4, 12, 33, 64, 65, 65_536))
        cached = program.cached.get(session, 0)
        start = cached if draw.random() < 0.7 else self.number(64)
        needed = -(-(start + length) // OPTIONS.page_tokens)
        if draw.random() < 0.8 and needed < 64:
            first = draw.choice((0, cached // OPTIONS.page_tokens, -(-cached // OPTIONS.page_tokens)))
            pages = tuple(draw.randrange(OPTIONS.pages) for _ in range(max(0, needed - first)))
        else:
            first = self.number(20)
            pages = tuple(min(self.number(105), 2**20 - 1) for _ in range(draw.randrange(6)))
        ranges = draw.randint(1, 3) if draw.random() < 0.1 else 0
        return Segment(
            session,
            start,
            length,
            first,
            pages,
            draw.choice((*[0] * 12, 1, 1024)),
            source=self.number(9) if draw.random() < 0.1 else 0,
            kept_as=self.number(12) if draw.random() < 0.1 else 0,
            together=tuple((self.number(length + 3), self.number(length + 6)) for _ in range(ranges)),
        )

    def inputs(self, graph: Graph, rows: int) -> dict[str, HostTensor]:
        made: dict[str, HostTensor] = {}
        for name in graph.inputs:
            if name in FROM_SEGMENTS:
                continue
            spec = graph.values[name]
            shape = tuple({"s": rows, "b": 1}.get(dim, 1) if isinstance(dim, str) else dim for dim in spec.shape)
            if self.draw.random() < 0.01:
                shape = (*shape[:-1], shape[-1] + 1)
            made[name] = host_tensor(spec.dtype, shape, self.values(spec.dtype, shape).tobytes())
        return made

    def values(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        draw = self.draw
        if dtype.startswith("int"):
            drawn = [draw.randrange(VOCABULARY) for _ in range(int(np.prod(shape)))]
            if draw.random() < 0.05:
                drawn[draw.randrange(len(drawn))] = draw.choice((-1, VOCABULARY, 2**40, -(2**62)))
            return np.array(drawn, np.int64)
        numbers = np.random.default_rng(draw.randrange(2**31)).standard_normal(shape).astype(np.float32)
        if draw.random() < 0.02:
            numbers.flat[draw.randrange(numbers.size)] = draw.choice(NO_NUMBERS)
        return numbers

    def attack(self, pipeline: Pipeline) -> str:
        draw, which = self.draw, self.draw.randrange(3)
        program, graph = pipeline.programs[which], pipeline.stages[which]
        segments = [self.segment(program) for _ in range(draw.choice((1, 1, 1, 2, 3, 5, 8)))]
        rows = min(sum(segment.length for segment in segments), 200) + (draw.random() < 0.02)
        wanted = None
        if draw.random() < 0.5:
            wanted = [draw.choice((*range(rows), *([-1, rows, 2**40] if draw.random() < 0.1 else ()))) for _ in "abc"]
        if draw.random() < 0.1:
            program.forget([self.number(8) for _ in range(draw.randrange(4))])
        try:
            program.run(segments, self.inputs(graph, rows), wanted=list(graph.outputs), rows=wanted)
        except ExecutionError:
            return "refused"
        return "computed"


def an_honest_session(pipeline: Pipeline) -> np.ndarray:
    ids = [(7 * place + 3) % VOCABULARY for place in range(14)]
    pipeline.forget_all()
    found = [pipeline.run([Segment(3, 0, 10, 0, (5, 9, 2))], ids[:10], [9])]
    for place in range(10, 14):
        new = (3, (11,)) if place == 12 else (3 + (place > 12), ())
        found.append(pipeline.run([Segment(3, place, 1, *new)], [ids[place]], [0]))
    pipeline.forget_all()
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("name", "changes", "passes"),
    [
        *[pytest.param(*case, PASSES, marks=pytest.mark.slow) for case in CASES[:4]],
        *[pytest.param(*case, MANY, marks=pytest.mark.long) for case in CASES],
    ],
)
def test_hostile_passes_are_refused_or_computed_and_change_nothing(name: str, changes: dict[str, Any], passes: int):
    pipeline = family_of(name, CHANGES[name], structs.replace(OPTIONS, **changes)).pipeline
    expected, attacker, seen = an_honest_session(pipeline), Attacker(1), Counter[str]()
    for number in range(passes):
        seen[attacker.attack(pipeline)] += 1
        if number % 100 == 99:
            assert np.array_equal(an_honest_session(pipeline), expected), f"after pass {number}"
    assert min(seen["computed"], seen["refused"]) > passes // 20, seen
