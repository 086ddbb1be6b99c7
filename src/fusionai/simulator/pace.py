"""How long a plan's steps take one after another, from simulating a few of them.

`step` simulates; `driver` lets steps pass at this pace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.simulator.network import Weather
from fusionai.simulator.step import Rules, simulate_steps

STEPS: Final = 4
"""Number of simulated steps: the first fills the pipeline, the others show the steady state (chosen)."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """`first_s`: duration of a step from an empty pipeline. `busy_s`: peer -> seconds it computes per step. `probe_s`:
    time of the first microbatch's way through all stages."""

    first_s: float
    gaps_s: tuple[float, ...]
    busy_s: Mapping[str, float]
    probe_s: float

    @property
    def step_s(self) -> float:
        return fmean(self.gaps_s)

    def gap_s(self, index: int) -> float:
        """Return the duration of the step with this index after the first one."""
        return self.gaps_s[index % len(self.gaps_s)]


class Paces:
    """Paces of plans, cached by placement."""

    def __init__(self, problem: Problem, weather: Weather, journal_s: float, seed: int) -> None:
        self._problem = problem
        self._rules = Rules(steps=STEPS, journal_s=journal_s, weather=weather, seed=seed)
        self._known: dict[tuple[tuple[str, tuple[int, int], int], ...], StepTiming] = {}

    def of(self, plan: Plan) -> StepTiming:
        key = tuple((stage.peer, stage.blocks, stage.in_flight) for stage in plan.stages)
        if key not in self._known:
            self._known[key] = self._simulated(plan)
        return self._known[key]

    def _simulated(self, plan: Plan) -> StepTiming:
        run = simulate_steps(plan, self._problem, self._rules)
        busy: defaultdict[str, float] = defaultdict(float)
        for span in run.spans:
            busy[span.peer] += (span.end_s - span.start_s) / STEPS
        gaps = tuple(after - before for before, after in pairwise(run.committed_s))
        first = (span.end_s for span in run.spans if (span.kind, span.step, span.microbatch) == ("forward", 0, 0))
        return StepTiming(run.committed_s[0], gaps, dict(busy), max(first))
