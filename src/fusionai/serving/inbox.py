"""Turns messages from members of a serving job into events of its state machine, if the sender is entitled to them.

A member may only report on stages that it runs, guards or was asked to load. Neighbours: `serving.driver` passes
messages in; `coordination.serving.events` are the events.
"""

from __future__ import annotations

from collections.abc import Collection

from fusionai.coordination.serving import events
from fusionai.coordination.serving.events import ServingEvent
from fusionai.coordination.serving.roles import ServingRoles
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


def event_of(
    message: wire.Message, peer: PeerId, roles: ServingRoles, asked: Collection[tuple[Fence, int, str]]
) -> ServingEvent | None:
    """Return the event for a message, None if the state machine needs none. `asked`: (fence, stage, peer) of load
    requests; a peer that was asked may answer, even if a later plan without a new round gave the stage to another.
    Raises `ExecutionError` if the message is about another peer's stage."""
    stage = getattr(message, "stage", None)
    known = () if stage is None else (roles.places.get(stage), roles.guards.get(stage))
    if stage is not None and peer not in known and (getattr(message, "fence", None), stage, peer) not in asked:
        raise ExecutionError(f"it sent a {type(message).__name__} of stage {stage}, which is not its own.")
    match message:
        case wire.Enlisted(fence=fence):
            return events.MemberEnlisted(fence, peer)
        case wire.Loading(fence=fence):
            return events.LoadProgressed(fence, peer, message.stage, message.done_bytes)
        case wire.Loaded(fence=fence, standby=True):
            return events.StandbyLoaded(fence, peer, message.stage)
        case wire.Loaded(fence=fence):
            return events.StageLoaded(fence, peer, message.stage, message.cached)
        case wire.StageFailed(fence=fence, code="stale_fence"):
            return None  # the peer is in a later round already
        case wire.StageFailed(fence=fence):
            reason = f"peer {short(peer)}: {message.reason}"
            return events.StageFailed(fence, peer, message.stage, reason, fatal=message.code == "bad_graph")
        case wire.Working(fence=fence):
            return events.StageWorking(fence, peer, message.stage, message.number, message.busy_s)
        case wire.Rebuilt(fence=fence, stage=at) if roles.places.get(at) == peer:
            return events.CacheRebuilt(fence, message.number, message.session, message.length)
        case wire.PassFailed(fence=fence):
            return events.PassFailed(fence, message.number, message.stage, message.reason)
        case _:
            return None
