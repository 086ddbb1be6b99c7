"""Simulates token generation with a serving plan, pass by pass: compute, transfers, and passes that wait for each
other.

All sessions generate and share the plan's passes in flight. Each pass goes through all stages, returns its tokens to
the job owner and starts again. `scheduling.serving.prediction` predicts the same without waiting: exactly for one pass,
for several from the busiest machine alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.simulator.agenda import Agenda, Lane
from fusionai.simulator.network import CALM, SimulatedNetwork, Weather


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Results. `token_s`: median seconds between a session's tokens. `tokens_per_s`: of all sessions together."""

    sessions: int
    passes: int
    token_s: float
    tokens_per_s: float
    utilisation: Mapping[str, float]
    """Peer -> fraction of the time in which it computes."""


def simulate_tokens(
    plan: Plan, problem: Problem, sessions: int, *, rounds: int = 20, weather: Weather = CALM, seed: int = 0
) -> TokenRun:
    """Simulate `rounds` tokens for each of `sessions` sessions, after a quarter as many that are not counted. Raises
    `PlanError` for a plan that does not serve."""
    needs = problem.serving
    if plan.serving is None or needs is None:
        raise PlanError("generation needs a serving plan, got a training plan.", hint='Ask for it with task = "serve".')
    passes = min(plan.serving.passes_in_flight, sessions)
    circling = _Circling(plan, problem, needs.result_bytes, weather, seed)
    filling = rounds // 4
    for number in range(passes):
        rows = sessions // passes + (number < sessions % passes)
        circling.begin(rows, filling + rounds)
    circling.agenda.run()
    gaps = [after - before for times in circling.returned_s for before, after in pairwise(times[filling:])]
    begin_s = max(times[filling] for times in circling.returned_s)
    end_s = min(times[-1] for times in circling.returned_s)
    counted = sum(
        rows * (_rounds_by(end_s, times) - _rounds_by(begin_s, times))
        for rows, times in zip(circling.rows, circling.returned_s, strict=True)
    )
    busy = {
        peer: sum(max(0.0, min(end, end_s) - max(start, begin_s)) for start, end in spans)
        for peer, spans in circling.busy.items()
    }
    lasted_s = end_s - begin_s
    return TokenRun(
        sessions=sessions,
        passes=passes,
        token_s=median(gaps),
        tokens_per_s=counted / lasted_s,
        utilisation={peer: seconds / lasted_s for peer, seconds in busy.items()},
    )


class _Circling:
    """Passes that circulate through the stages."""

    def __init__(self, plan: Plan, problem: Problem, result_bytes: int, weather: Weather, seed: int) -> None:
        self.agenda = Agenda()
        self.rows: list[int] = []
        self.returned_s: list[list[float]] = []
        self.busy: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._plan = plan
        self._costs = StageCosts(problem)
        self._result_bytes = result_bytes
        self._network = SimulatedNetwork(self.agenda, self._costs, weather, seed)
        self._lanes: defaultdict[str, Lane] = defaultdict(lambda: Lane(self.agenda))

    def begin(self, rows: int, rounds: int) -> None:
        self.rows.append(rows)
        self.returned_s.append([])
        self._go_round(len(self.rows) - 1, rounds)

    def _go_round(self, number: int, left: int) -> None:
        first = self._plan.stages[0].peer
        self._network.send(self._plan.feed, first, 0.0, partial(self._arrived, number, 0, left))

    def _arrived(self, number: int, index: int, left: int) -> None:
        stage = self._plan.stages[index]
        seconds = self._costs.decode_s(stage, stage.peer, self.rows[number])
        self._lanes[stage.peer].work(seconds, partial(self._computed, number, index, left))

    def _computed(self, number: int, index: int, left: int, began_s: float) -> None:
        stage, rows = self._plan.stages[index], self.rows[number]
        self.busy[stage.peer].append((began_s, self.agenda.now_s))
        if index + 1 < len(self._plan.stages):
            size_bytes = rows * self._costs.forward_bytes(stage)
            onward = partial(self._arrived, number, index + 1, left)
            self._network.send(stage.peer, self._plan.stages[index + 1].peer, size_bytes, onward)
        else:
            back = partial(self._returned, number, left)
            self._network.send(stage.peer, self._plan.feed, rows * self._result_bytes, back)

    def _returned(self, number: int, left: int) -> None:
        self.returned_s[number].append(self.agenda.now_s)
        if left > 1:
            self._go_round(number, left - 1)


def _rounds_by(at_s: float, times: list[float]) -> float:
    """Return the rounds completed by `at_s`, with the fraction of the current one, so that few rounds suffice."""
    done = bisect_right(times, at_s)
    if done == len(times):
        return float(done)
    return done + (at_s - times[done - 1]) / (times[done] - times[done - 1])
