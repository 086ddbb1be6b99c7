"""Simulates training steps of a plan event by event: what every stage computes and sends, and when.

The shipped stage machine (`coordination.training.stage`) decides the order of work: 1F1B with credit, delayed weight
gradients, what waits for a commit. Here its commands take time: work on the peer's compute lane, transfers on the
network. The driver's part is that of `coordination.training.driver` in an undisturbed run: feed at most one step ahead
of the vote and within the window, and commit when all losses and votes have arrived.

Durations are the planner's. This module adds what the closed form leaves out: queueing for a link or a peer, credit
that runs out between bursts, the vote's round trip, the update. `Rules(bare=True)` simulates only forward and backward
of one step, which is what `scheduling.training.prediction` predicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final, Literal

from fusionai.coordination.training import stage_interface as staging
from fusionai.coordination.training.stage import StageMachine
from fusionai.coordination.training.step import StageShape
from fusionai.primitives.errors import FusionError
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, Problem, StagePlacement
from fusionai.simulator.agenda import Agenda, Lane
from fusionai.simulator.network import CALM, SimulatedNetwork, Transfer, Weather
from fusionai.training.deployment import stage_options
from fusionai.wire.messages import CommitRecord, Fence, StageOptions

FEED: Final = -1
"""Stage number of the data feed."""
_FENCE: Final = Fence(plan_version=1, incarnation=1, attempt=1)
UPDATE_PASSES: Final = 7 / 3
"""AdamW reads parameter, gradient and two slots and writes three of them: 7 accesses per 3 values of state."""

Kind = Literal["forward", "backward", "weights", "update"]
_KINDS: Final[dict[str, Kind]] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weights",
    "apply": "update",
}


class SimulationError(FusionError):
    """The simulated machines are stuck. This is a defect of the program, never a user's mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How steps are simulated. `weight_lag`: whether stages delay weight gradients, as peers with spare memory do;
    otherwise the backward pass computes them. `weight_part`: their fraction of a backward's time. `journal_s`: seconds
    to write a commit to disk."""

    steps: int = 3
    bare: bool = False
    weight_lag: bool = True
    weight_part: float = 0.5
    journal_s: float = 0.0
    weather: Weather = CALM
    seed: int = 0


BARE: Final = Rules(steps=1, bare=True, weight_lag=False)
"""Rules for one step without the driver's part, as `scheduling.training.prediction` predicts it."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One piece of work on a peer's compute lane."""

    stage: int
    peer: str
    kind: Kind
    step: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of one stage's pieces of work, per microbatch, and of the update per step. With delayed weight
    gradients, `backward_s` does not include them."""

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    update_s: float = 0.0

    def seconds(self, work: staging.StageWork) -> float:
        known = {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "weights": self.weights_s,
            "apply": self.update_s,
        }
        return known.get(work.kind, 0.0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Measured durations of one stage's pieces of work, by (kind, microbatch) for each recorded step. Simulated steps
    reuse the recorded steps in turn.

    Medians would not do: if durations vary, all stages wait for the one that is slow at the moment, so the pipeline is
    slower than medians predict. The same recorded step of all stages belongs together.
    """

    steps: tuple[Mapping[tuple[str, int], float], ...]

    def seconds(self, work: staging.StageWork) -> float:
        return self.steps[work.step % len(self.steps)].get((work.kind, work.microbatch), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """`committed_s`: when each step was committed; in a bare run, when its last work was done."""

    spans: tuple[LaneSpan, ...]
    committed_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    """Largest number of microbatches forwarded but not yet returned, by stage."""
    sent_bytes: Mapping[str, float]
    """Peer -> bytes sent in all steps."""
    transfers: tuple[Transfer, ...]

    @property
    def step_s(self) -> float:
        """Median seconds between two commits; of a single step, its whole duration."""
        gaps = [after - before for before, after in pairwise(self.committed_s)]
        return median(gaps) if gaps else self.committed_s[0]

    @property
    def utilisation(self) -> Mapping[str, float]:
        """Peer -> fraction of time computing between the first and last commit; of a single step, during it."""
        begin_s, end_s = min(self.committed_s), max(self.committed_s)
        begin_s = begin_s if begin_s < end_s else 0.0
        busy: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            busy[span.peer] += max(0.0, min(span.end_s, end_s) - max(span.start_s, begin_s))
        return {peer: seconds / (end_s - begin_s) for peer, seconds in busy.items()} if end_s > begin_s else {}


def simulate_steps(
    plan: Plan,
    problem: Problem,
    rules: Rules = Rules(),
    measured: Mapping[int, Durations] | Mapping[int, Recorded] | None = None,
) -> StepRun:
    """Simulate `rules.steps` steps of `plan` on the machines and links of `problem`, from an empty pipeline. The result
    is deterministic. `measured`: durations by stage that replace the predicted ones."""
    job = _Job(plan, problem, rules, measured or {})
    job.begin()
    job.agenda.run()
    if len(job.committed_s) != rules.steps:
        stories = "; ".join(f"stage {stage.placement.stage}: {stage.machine.story[-3:]}" for stage in job.stages)
        raise SimulationError(f"{len(job.committed_s)} of {rules.steps} simulated steps were committed: {stories}.")
    return StepRun(
        spans=tuple(job.spans),
        committed_s=tuple(job.committed_s),
        in_flight=tuple(stage.most_in_flight for stage in job.stages),
        sent_bytes=dict(job.network.sent_bytes),
        transfers=tuple(job.network.transfers),
    )


@dataclass(slots=True)
class _Stage:
    """One stage's machine and the durations of its work."""

    machine: StageMachine
    placement: StagePlacement
    lane: Lane
    takes: Durations | Recorded
    forward_bytes: float
    gradient_bytes: float
    most_in_flight: int = 0


class _Job:
    """The driver's side, and the connections between stages."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        rules: Rules,
        measured: Mapping[int, Durations] | Mapping[int, Recorded],
    ) -> None:
        self.agenda = Agenda()
        self.rules = rules
        self.measured = measured
        self.plan = plan
        self.spans: list[LaneSpan] = []
        self.committed_s: list[float] = []
        costs = StageCosts(problem)
        self.network = SimulatedNetwork(self.agenda, costs, rules.weather, rules.seed)
        lanes: defaultdict[str, Lane] = defaultdict(lambda: Lane(self.agenda))
        self.stages = [self._stage(placement, costs, lanes[placement.peer]) for placement in plan.stages]
        self._window = max(placement.in_flight for placement in plan.stages) + 1
        self._fed = (0, 0)
        self._losses: defaultdict[int, int] = defaultdict(int)
        self._votes: defaultdict[int, int] = defaultdict(int)
        self._last = len(plan.stages) - 1

    def begin(self) -> None:
        for index in range(len(self.stages)):
            self._deliver(index, staging.Attached(_FENCE))
            self._deliver(index, staging.Resumed(committed=0, source="keep", base=0))
        if self.rules.bare:
            for microbatch in range(self.plan.microbatches):
                self._deliver(0, staging.ForwardArrived("train", 0, microbatch, FEED))
        else:
            self._feed()

    def _stage(self, placement: StagePlacement, costs: StageCosts, lane: Lane) -> _Stage:
        plan, rules = self.plan, self.rules
        index, last = placement.stage, len(plan.stages) - 1
        lag = (
            stage_options(StageOptions(microbatches=plan.microbatches), plan, placement.stage).weight_lag
            if rules.weight_lag
            else 0
        )
        producers = {index - 1} | ({FEED} if index == last and not rules.bare else set())
        shape = StageShape(
            stage=index,
            microbatches=plan.microbatches,
            in_flight=placement.in_flight,
            producers={"train": frozenset(producers)},
            consumers=frozenset() if index == last else frozenset({index + 1}),
            weight_lag=lag,
        )
        takes = self.measured.get(index) or _predicted(placement, costs, rules, lag)
        return _Stage(
            machine=StageMachine(shape, applied=0),
            placement=placement,
            lane=lane,
            takes=takes,
            forward_bytes=costs.forward_bytes(placement),
            gradient_bytes=costs.gradient_bytes(placement),
        )

    # ------------------------------------------------------------------------------------------------------ stages

    def _deliver(self, index: int, event: staging.StageEvent) -> None:
        stage = self.stages[index]
        for command in stage.machine.handle(event):
            match command:
                case staging.Compute(work):
                    free = self.rules.bare and work.kind == "apply"
                    seconds = 0.0 if free else stage.takes.seconds(work)
                    stage.lane.work(seconds, partial(self._computed, index, work))
                case staging.ReportPrepared(step):
                    vote = partial(self._voted, step)
                    self.network.send(stage.placement.peer, self.plan.feed, 0.0, vote)
                case staging.Refuse(reason):
                    raise SimulationError(f"a simulated stage refused an event: {reason}.")
                case _:
                    pass  # retaining, holding and recovery reports take no time here

    def _computed(self, index: int, work: staging.StageWork, began_s: float) -> None:
        stage = self.stages[index]
        kind = _KINDS.get(work.kind)
        if kind is not None:
            span = LaneSpan(index, stage.placement.peer, kind, work.step, work.microbatch, began_s, self.agenda.now_s)
            self.spans.append(span)
        self._deliver(index, staging.WorkDone(work))
        stage.most_in_flight = max(stage.most_in_flight, stage.machine.microbatches.in_flight)
        if work.kind == "forward":
            self._send_forward(index, work)
        elif work.kind == "backward" and index > 0:
            event = staging.BackwardArrived(work.step, work.microbatch, index)
            self._pass_on(index, index - 1, stage.gradient_bytes, event)

    def _send_forward(self, index: int, work: staging.StageWork) -> None:
        if index < self._last:
            event = staging.ForwardArrived("train", work.step, work.microbatch, index)
            self._pass_on(index, index + 1, self.stages[index].forward_bytes, event)
        else:
            known = partial(self._loss_known, work.step)
            self.network.send(self.stages[index].placement.peer, self.plan.feed, 0.0, known)

    def _pass_on(self, index: int, other: int, size_bytes: float, event: staging.StageEvent) -> None:
        sender, receiver = self.stages[index].placement.peer, self.stages[other].placement.peer
        self.network.send(sender, receiver, size_bytes, partial(self._deliver, other, event))

    # ------------------------------------------------------------------------------------------------------ driver

    def _feed(self) -> None:
        """Feed microbatches in order, as `coordination.training.driver` does."""
        microbatches = self.plan.microbatches
        step = len(self.committed_s)
        known = step * microbatches + sum(count for at, count in self._losses.items() if at >= step)
        last = min(step + 1, self.rules.steps - 1)
        while self._fed[0] <= last and self._fed[0] * microbatches + self._fed[1] < known + self._window:
            at, microbatch = self._fed
            for index in sorted({0, self._last}):
                event = staging.ForwardArrived("train", at, microbatch, FEED)
                deliver = partial(self._deliver, index, event)
                self.network.send(self.plan.feed, self.stages[index].placement.peer, 0.0, deliver)
            self._fed = (at, microbatch + 1) if microbatch + 1 < microbatches else (at + 1, 0)

    def _loss_known(self, step: int) -> None:
        self._losses[step] += 1
        if not self.rules.bare:
            self._feed()
            self._decide(step)

    def _voted(self, step: int) -> None:
        self._votes[step] += 1
        self._decide(step)

    def _decide(self, step: int) -> None:
        if self._votes[step] < len(self.stages) or self._losses[step] < self.plan.microbatches:
            return
        if self.rules.bare:
            self.committed_s.append(max(span.end_s for span in self.spans))
        else:
            self.agenda.after(self.rules.journal_s, partial(self._commit, step))

    def _commit(self, step: int) -> None:
        self.committed_s.append(self.agenda.now_s)
        record = CommitRecord(
            step=step,
            scale=1.0,
            learning_rate=0.0,
            total_norm=0.0,
            norms_hash="",
            fence=_FENCE,
            loss=0.0,
        )
        for index, stage in enumerate(self.stages):
            deliver = partial(self._deliver, index, staging.Committed(record, watermark=step + 1))
            self.network.send(self.plan.feed, stage.placement.peer, 0.0, deliver)
        if len(self.committed_s) < self.rules.steps:
            self._feed()


def _predicted(placement: StagePlacement, costs: StageCosts, rules: Rules, lag: int) -> Durations:
    again_s = costs.recompute_s(placement, placement.peer)
    reading_s = costs.weights_s(placement, placement.peer)
    whole_s = costs.compute_s(placement, placement.peer) - again_s - reading_s
    blocks = costs.problem.blocks_of(placement)
    forward_flops = sum(block.forward_flops for block in blocks)
    flops = forward_flops + sum(block.backward_flops for block in blocks)
    forward_s = whole_s * (forward_flops / flops if flops > 0 else 1.0)
    weights_s = (whole_s - forward_s) * rules.weight_part if lag else 0.0
    return Durations(
        forward_s=forward_s + reading_s / 2,
        backward_s=again_s + whole_s - forward_s - weights_s + reading_s / 2,
        weights_s=weights_s,
        update_s=_update_s(placement, costs),
    )


def _update_s(placement: StagePlacement, costs: StageCosts) -> float:
    """Return the update's duration, which only memory bandwidth limits; 0 for a peer without a measured bandwidth."""
    profile = costs.profiles.get(placement.peer)
    bandwidth = 0.0 if profile is None else profile.memory_bandwidth_bytes_per_s * profile.share
    return UPDATE_PASSES * costs.state_bytes(placement) / bandwidth if bandwidth > 0 else 0.0
