"""The steady steps of a plan, fast-forwarded: each takes as long as one of a few that `step` simulated event by event.

`driver` says when a step may begin and what stops it, and learns when it is computed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Final

from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.simulator.agenda import Agenda
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


class Paces:
    """Timings of plans, cached by placement."""

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


@dataclass(slots=True, eq=False)
class _StepUnderWay:
    """The step being computed."""

    step: int
    began_s: float
    due_s: float
    stopped_s: float | None = None
    """When one of its peers stopped."""
    computed: bool = False
    """Whether only the commit is missing, which a checkpoint may delay."""


class SteadySteps:
    """The job's steps in virtual time; `computed(step)` is called at the end of each. `adopt` comes first."""

    timing: StepTiming

    def __init__(self, agenda: Agenda, paces: Paces, computed: Callable[[int], None]) -> None:
        self._agenda = agenda
        self._paces = paces
        self._computed = computed
        self._busy_s: Counter[str] = Counter()
        self._uncounted = 0
        """Steps with the current timing whose compute seconds are not in `_busy_s` yet."""
        self._under_way: _StepUnderWay | None = None
        self._row = 0
        """Number of steps since the pipeline was filled."""
        self._fed = -1
        self._filled = False
        """Whether a step that ends now leaves a full pipeline."""

    def step_s(self, plan: Plan) -> float:
        """Return the mean duration of a step of `plan` in a full pipeline."""
        return self._paces.of(plan).step_s

    def adopt(self, plan: Plan) -> None:
        self._count()
        self.timing = self._paces.of(plan)

    def busy_s(self, peer: str) -> float:
        """Seconds in which the peer computed in complete steps."""
        self._count()
        return self._busy_s[peer]

    def feed(self, step: int) -> None:
        self._fed, self._row = step, self._row + 1 if self._filled else 0

    def begin(self, step: int) -> None:
        """Begin the step if it was fed and no other one is under way."""
        if self._under_way is not None or self._fed != step:
            return
        gaps_s, now_s = self.timing.gaps_s, self._agenda.now_s
        seconds = self.timing.first_s if self._row == 0 else gaps_s[(self._row - 1) % len(gaps_s)]
        self._under_way = _StepUnderWay(step, now_s, now_s + seconds)
        self._foresee_end(self._under_way)

    def stop(self) -> None:
        """Stop the step under way, because one of its peers stopped."""
        step = self._under_way
        if step is not None and step.stopped_s is None and not step.computed:
            step.stopped_s = self._agenda.now_s

    def resume(self, step: int) -> None:
        """Go on with the step that was stopped, or begin `step`."""
        under_way = self._under_way
        if under_way is None:
            self.begin(step)
        elif under_way.stopped_s is not None:
            under_way.due_s += self._agenda.now_s - under_way.stopped_s
            under_way.stopped_s = None
            self._foresee_end(under_way)

    def drop(self) -> float:
        """Give up the step under way; return the seconds that were spent on it."""
        step, self._under_way = self._under_way, None
        self._fed = -1
        if step is None:
            return 0.0
        stopped_s = self._agenda.now_s if step.stopped_s is None else step.stopped_s
        return max(0.0, stopped_s - step.began_s)

    def commit(self) -> float:
        """End the step under way; return the seconds since its beginning."""
        step, self._under_way = self._under_way, None
        assert step is not None, "a commit ends a step"
        self._uncounted += 1
        return self._agenda.now_s - step.began_s

    def _foresee_end(self, step: _StepUnderWay) -> None:
        self._agenda.at(step.due_s, partial(self._finish, step, step.due_s))

    def _finish(self, done: _StepUnderWay, due_s: float) -> None:
        if self._under_way is not done or done.stopped_s is not None or done.due_s != due_s:
            return
        done.computed = self._filled = True
        self._computed(done.step)
        self._filled = False

    def _count(self) -> None:
        if self._uncounted:
            self._busy_s.update({peer: self._uncounted * one_s for peer, one_s in self.timing.busy_s.items()})
            self._uncounted = 0
