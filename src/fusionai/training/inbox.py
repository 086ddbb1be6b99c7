"""Turns messages of members into events for the driver's machine, if the member may send them.

A member may speak only for its own stages, and in exact jobs it must have the fingerprint that the plan expects.
`training.driver` has checked the fence before; `coordination.training.events` defines the events.
"""

from __future__ import annotations

from typing import Literal

from fusionai.coordination.training import events
from fusionai.coordination.training.events import DriverEvent
from fusionai.coordination.training.roles import Roles
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.scheduling.problem.types import Plan
from fusionai.wire import messages as wire


def event_of(message: wire.Message, peer: PeerId, roles: Roles) -> DriverEvent | None:
    """Return the event, None for irrelevant messages. Raises `ExecutionError` if the member speaks for a foreign
    stage."""
    stage = getattr(message, "stage", None)
    if isinstance(message, wire.StageFailed) and roles.guards.get(message.stage) == peer:
        # A guard has no stage that could fail: it has no memory for this stage's snapshots.
        return events.LinkBroken(roles.places[message.stage], peer, message.reason)
    speaks_for = roles.guards if isinstance(message, wire.SnapshotKept) else roles.places
    if stage is not None and speaks_for.get(stage) != peer:
        raise ExecutionError(f"it sent a {type(message).__name__} of stage {stage}, which is not its own.")
    match message:
        case wire.Enlisted(snapshots=snapshots):
            return events.MemberEnlisted(peer, frozenset((one.stage, one.step) for one in snapshots))
        case wire.Status():
            return events.StageReported(message.stage, message.applied, message.prepared, message.retained_from)
        case wire.Ready():
            return events.StageReady(message.stage, message.applied)
        case wire.Prepared():
            return events.StagePrepared(message.stage, message.step, message.norms)
        case wire.SnapshotKept():
            return events.SnapshotStored(message.stage, message.step, peer)
        case wire.StageFailed():
            return events.StageFailed(
                message.stage, f"peer {short(peer)}: {message.reason}", fatal=message.code == "bad_graph"
            )
        case _:
            return None


def check_numerics(message: wire.Message, plan: Plan, takeover: Literal["exact", "any", "tolerant"]) -> None:
    """Raise `ExecutionError` if a stage's peer computes other bits than the plan expects, unless the job tolerates that
    of all peers. The peer must have restarted with other settings. Differences tolerated after a fault are recorded in
    the plan."""
    if not isinstance(message, wire.Status) or takeover == "tolerant":
        return
    promised = plan.stages[message.stage].fingerprint
    if promised and message.fingerprint and promised != message.fingerprint:
        raise ExecutionError(
            "its numeric fingerprint is not the one the plan was made with: it was restarted with other settings."
        )
