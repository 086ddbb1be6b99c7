"""Streams of a served model, timed: what every part of `serving.py` asks for and how their figures are written down.

Speeds are counted from the first to the last token of an answer: reading the prompt is not in them. Neighbours: the
parts beside this file.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fusionai.cli.options import ServingOptions
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import Served, ServeEvent, ServePlanned
from fusionai.serving.interface import Constraint, Emitted, Finished, Generation, Sampling

PROMPT_TOKENS: Final = 32
CONTEXT: Final = 256
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: its tokens, when it was asked for and when each token came."""

    tokens: tuple[int, ...]
    asked_s: float
    at_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return (len(self.at_s) - 1) / (self.at_s[-1] - self.at_s[0])

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)]


@dataclass(slots=True)
class Figures:
    """One value of each per round, kept by `keep` as soon as the round is over. `goals`: what the medians should be."""

    keep: Callable[[dict[str, Any]], None]
    say: Say
    goals: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _values: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def end_round(self, number: int) -> None:
        self._values.setdefault("load_1_minute", []).append(os.getloadavg()[0])
        self.say(f"round {number}: " + ", ".join(f"{name} {values[-1]:.3g}" for name, values in self._values.items()))
        spreads = {name: spread(values) for name, values in self._values.items()}
        self.keep({**self.facts, **{n: s | self._goal(n) for n, s in spreads.items()}})

    def _goal(self, name: str) -> dict[str, str]:
        return {"goal": self.goals[name]} if name in self.goals else {}


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "rounds": [float(f"{value:.4g}") for value in values],
    }


def prompt(number: int, vocabulary: int, length: int = PROMPT_TOKENS) -> tuple[int, ...]:
    return tuple(np.random.default_rng(number).integers(1, vocabulary, length).tolist())


def request(model: Path, home: Path, *, weights: str, sessions: int, **more: Any) -> ServeRequest:
    options = ServingOptions(
        weights=weights, cache="fp32", context_tokens=CONTEXT, sessions=sessions, ends="owner"  # type: ignore[arg-type]
    )  # fmt: skip
    return ServeRequest(model=str(model), needs=options.needs, home=home, device="cpu", threads=1, **more)


async def one_stream(
    served: Served, asked: tuple[int, ...], tokens: int, constraint: Constraint | None = None
) -> Stream:
    asked_s = time.perf_counter()
    at_s: list[float] = []
    answer: list[int] = []
    generation = Generation(prompt=asked, max_tokens=tokens, sampling=Sampling(temperature=0.0), constraint=constraint)
    async for event in served.engine.submit(generation):
        match event:
            case Emitted(token=token):
                at_s.append(time.perf_counter())
                answer.append(token)
            case Finished(reason=reason, detail=detail) if reason != "length":
                raise SystemExit(f"an answer ended early: {reason} {detail}")
            case _:
                pass
    return Stream(tuple(answer), asked_s, tuple(at_s))


async def streams(served: Served, count: int, tokens: int, salt: int) -> tuple[float, list[Stream]]:
    """(tokens per second of all together, from the last first token to the first last one)"""
    asked = [prompt(1000 * salt + n, served.model.vocabulary) for n in range(count)]
    found = await asyncio.gather(*(one_stream(served, one, tokens) for one in asked))
    begin = max(stream.at_s[0] for stream in found)
    end = min(stream.at_s[-1] for stream in found)
    if end <= begin:
        raise SystemExit(f"{count} answers of {tokens} tokens were never under way together: ask for more tokens.")
    # The token at `begin` ends a gap that began before; the interval is half open.
    inside = sum(sum(begin < at <= end for at in stream.at_s) for stream in found)
    return inside / (end - begin), found


def shown(say: Say) -> Callable[[ServeEvent], None]:
    def see(event: ServeEvent) -> None:
        if isinstance(event, ServePlanned):
            ranges = [f"{stage.blocks[0]}-{stage.blocks[1] - 1}" for stage in event.plan.stages]
            sizes = event.plan.serving
            passes = "" if sizes is None else f"; {sizes.passes_in_flight} passes fill it"
            say(f"plan: blocks {', '.join(ranges)}{passes}")

    return see
