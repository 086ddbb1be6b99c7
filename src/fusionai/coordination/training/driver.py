"""State machine of a training job's driver: attaching, restoring, feeding, votes, commits, checkpoints.

It decides which microbatch is fed when, when a step is official, how stages return to that step after a fault, when a
checkpoint or an evaluation is due, when another plan is needed and when the job ends. It never touches a tensor, a
file, a clock or a connection: `training` performs its commands; in tests a virtual world does.

Any fault that touches a stage ends the *round*. The next round has a higher fence: all members report, lost state is
restored, the step in progress is repeated. The machine implements the recovery protocol (docs/recovery.md); each part
names its rules. Each subject is a part of its own: `rounds` up to running steps, `steps` with feeding, commits and
checkpoints, `plan_changes` after faults. They share the state in `state`; this module has the end of the job and the
table.

Neighbours: `interface` defines its inputs and outputs, `coordination.training.stage` is the machine of a stage,
`training.driver` performs the commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.machine import Table, Transition, in_each
from fusionai.coordination.round.interface import (
    CommandFailed,
    DriverEvent,
    EndJob,
    LinkBroken,
    MemberEnlisted,
    PeerLost,
    StageFailure,
    StopAsked,
)
from fusionai.coordination.training import interface
from fusionai.coordination.training.interface import DriverCommand
from fusionai.coordination.training.plan_changes import PlanChanges, SpotChecks
from fusionai.coordination.training.rounds import AllReady, AllRestored, TrainingRounds
from fusionai.coordination.training.state import AllAnswered, DriverPhase, DriverState
from fusionai.coordination.training.steps import (
    BetweenSteps,
    Checkpointing,
    Commits,
    ExpulsionDue,
    Feeding,
    NotFinite,
    Settled,
)


@dataclass(slots=True)
class DriverMachine(DriverState):
    """`start` returns the first commands; `handle` takes an event and returns commands."""

    learning_rate: Callable[[int], float] = field(kw_only=True)
    """Pure function from step to learning rate."""
    feeding: Feeding = field(init=False)
    commits: Commits = field(init=False)
    checkpointing: Checkpointing = field(init=False)
    rounds: TrainingRounds = field(init=False)
    plan_changes: PlanChanges = field(init=False)
    spot_checks: SpotChecks = field(init=False)

    def __post_init__(self) -> None:
        self.feeding = Feeding(self)
        self.commits = Commits(self, self.feeding, self.learning_rate)
        self.checkpointing = Checkpointing(self, self.feeding, self.commits)
        self.rounds = TrainingRounds(self, self.feeding, self.checkpointing)
        self.plan_changes = PlanChanges(self, self.feeding, self.rounds)
        self.spot_checks = SpotChecks(self, self.feeding, self.plan_changes)

    def start(self) -> list[DriverCommand]:
        self.step = self.official
        self.retention.watermark = self.checkpoint
        self.retention.standbys = dict(self.roles.standbys)
        self.evaluate_if_due()
        return self.rounds.begin()

    def handle(self, event: DriverEvent) -> list[DriverCommand]:
        """Apply one event. An event of another round, or without a row for the present phase, changes nothing."""
        return (self.react(TABLE, event) or []) if self.counts(event, self.fence) else []

    def brief(self, event: object) -> str:
        return (
            f"StagePrepared({event.stage}, {event.step})" if isinstance(event, interface.StagePrepared) else repr(event)
        )

    def on_stop(self, event: StopAsked) -> list[DriverCommand]:
        """Stop the job. Before any work, or with a stage missing, nothing is saved. A step in progress is finished
        first."""
        self.stop = self.stop if self.stop is not None else event.reason
        return self.end() if self.phase is DriverPhase.WAITING or not self.rounds.probed else []

    def end(self) -> list[DriverCommand]:
        self.phase = DriverPhase.ENDED
        early = None if self.step >= self.shape.steps or self.stop is not None else self.enough
        return [EndJob(self.step, stopped=self.stop, early=early)]


_A, _L, _R, _P, _G, _S, _W, _E = DriverPhase  # attaching, loading, ..., ended: in the order of their definition
_ROUND: Final = (_A, _L, _R, _P, _G, _S)
_ALIVE: Final = (*_ROUND, _W)

TABLE: Final[Table[DriverMachine, list[DriverCommand]]] = Table(
    "driver",
    (
        # Rounds: members report, lost state is restored, official steps are replayed, a probe crosses all stages.
        Transition((_A,), MemberEnlisted, (_A,), lambda m, event: m.rounds.on_enlisted(event)),
        Transition((_A,), interface.StageReported, (_A,), lambda m, event: m.rounds.on_reported(event)),
        Transition((_A,), AllAnswered, (_L,), lambda m, event: m.rounds.on_all_answered(event)),
        Transition((_L,), interface.StageReady, (_L, _E), lambda m, event: m.rounds.on_loaded(event)),
        Transition((_L,), AllRestored, (_R,), lambda m, event: m.rounds.on_all_loaded(event)),
        Transition((_R,), interface.StageReady, (_R, _E), lambda m, event: m.rounds.on_ready(event)),
        Transition((_R,), interface.StagePrepared, (_R, _E), lambda m, event: m.commits.on_replayed(event)),
        Transition((_R,), AllReady, (_P, _G, _S), lambda m, event: m.rounds.on_all_ready(event)),
        Transition((_P,), interface.ProbeAnswered, (_G, _S, _E), lambda m, event: m.rounds.on_probed(event)),
        # Steps: losses and votes, the scale, the journal; then checkpoints, evaluations, another plan, the end.
        Transition((_G,), interface.LossArrived, (_G, _E), lambda m, event: m.commits.on_loss(event)),
        Transition((_G,), interface.StagePrepared, (_G, _E), lambda m, event: m.commits.on_prepared(event)),
        Transition((_G,), interface.ScaleDecided, (_G, _S, _E), lambda m, event: m.commits.on_scale(event)),
        Transition((_G,), interface.CommitJournalled, (_G, _S), lambda m, event: m.commits.on_journalled(event)),
        *in_each((_A, _W), interface.CommitJournalled, (), lambda m, event: m.commits.on_journalled_in_a_round(event)),
        Transition((_G,), interface.CheckpointWritten, (_G, _E), lambda m, event: m.checkpointing.on_checkpoint(event)),
        *in_each(
            (_A, _L, _R, _P, _S, _W),
            interface.CheckpointWritten,
            (),
            lambda m, event: m.checkpointing.on_checkpoint(event),
        ),
        Transition((_G,), interface.EvaluationDone, (_G, _S, _E), lambda m, event: m.checkpointing.on_evaluated(event)),
        Transition((_S,), interface.EvaluationDone, (_S,), lambda m, event: m.checkpointing.on_evaluated(event)),
        *in_each((_L, _R, _P, _G, _S), interface.SnapshotStored, (), lambda m, event: m.spot_checks.on_snapshot(event)),
        Transition((_G,), BetweenSteps, (_G, _A), lambda m, event: m.plan_changes.on_between_steps(event)),
        Transition((_S,), Settled, (_E,), lambda m, _: m.end()),
        # Faults: faulty, lost and failing peers, and the plans that follow.
        *in_each((_G, _S), interface.VerifierReady, (), lambda m, event: m.spot_checks.on_verifier_ready(event)),
        *in_each((_G, _S), interface.EvidenceLost, (_W,), lambda m, event: m.spot_checks.on_evidence_lost(event)),
        *in_each((_G, _S), interface.StageChecked, (_W,), lambda m, event: m.spot_checks.on_checked(event)),
        *in_each((_A, _G, _S, _W), ExpulsionDue, (_W,), lambda m, _: m.spot_checks.expel_if_free()),
        *in_each(_ALIVE, PeerLost, (_A, _W, _E), lambda m, event: m.plan_changes.on_peer_lost(event)),
        *in_each(_ROUND, LinkBroken, (_A, _W, _E), lambda m, event: m.plan_changes.on_link_broken(event)),
        *in_each((_R, _G), NotFinite, (_A, _W, _E), lambda m, event: m.plan_changes.on_not_finite(event)),
        Transition(_ROUND, StageFailure, (_A, _W, _E), lambda m, event: m.plan_changes.on_stage_failed(event)),
        *in_each(_ROUND, interface.PlanGranted, (), lambda m, event: m.plan_changes.on_plan(event)),
        Transition((_W,), interface.PlanGranted, (_A, _W), lambda m, event: m.plan_changes.on_plan(event)),
        *in_each(_ALIVE, StopAsked, (_E,), DriverMachine.on_stop),
        Transition(_ALIVE, CommandFailed, (_E,), lambda m, event: m.fail(event.reason)),
    ),
    initial=(_A,),
    final=(_E,),
)
"""(phase, event) -> transition. An event without a row is late and is ignored."""
