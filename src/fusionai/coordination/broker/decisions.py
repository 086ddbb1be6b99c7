"""The broker's decisions: what each request does to the pool, who may ask it, and what is answered.

`handle(desk, request, now_s, wall_s)` is pure. It gives facts and commands: the shell journals the facts first and only
then adopts the new desk and performs the commands; if the journal refuses, nothing has happened.

Never sees a tensor, a socket or a clock. Neighbours: `requests` has the vocabulary; `admission`, `presence` and
`assignment` decide; `broker.service` is the shell.
"""

from __future__ import annotations

from fusionai.coordination.broker import admission, assignment, presence
from fusionai.coordination.broker.requests import (
    REASON_LENGTH,
    Answer,
    AskLeave,
    Beat,
    Disconnected,
    Enrol,
    Invite,
    Refusal,
    Register,
    ReportJob,
    Request,
    RequestJob,
    Stalled,
    StopJob,
    Tick,
    Vouch,
)
from fusionai.coordination.broker.state import Decision, Desk
from fusionai.coordination.broker.transaction import Turn
from fusionai.coordination.machine import ForbiddenTransition
from fusionai.wire.messages import Refused


def handle(desk: Desk, request: Request, *, now_s: float, wall_s: float) -> Decision:
    """One decision. `now_s` is monotonic, `wall_s` since 1970. Whatever does not fit is answered by `Refused`."""
    turn = Turn(desk, now_s, wall_s)
    try:
        match request:
            case Enrol():
                admission.enrol(turn, request)
            case Vouch():
                admission.vouch(turn, request)
            case Register():
                presence.register(turn, request)
            case Beat():
                presence.beat(turn, request)
            case AskLeave():
                presence.leave(turn, request)
            case RequestJob():
                assignment.request_job(turn, request)
            case ReportJob():
                assignment.report_job(turn, request)
            case StopJob():
                assignment.stop_job(turn, request)
            case Invite():
                admission.invite(turn, request)
            case Disconnected():
                presence.disconnect(turn, request)
            case Tick():
                presence.tick(turn)
            case Stalled():
                presence.restart_leases(turn)
    except Refusal as refusal:
        return Decision(desk, (), (Answer(refusal.message),))
    except ForbiddenTransition as forbidden:
        return Decision(desk, (), (Answer(Refused(code="bad_message", reason=str(forbidden)[:REASON_LENGTH])),))
    renewed_only = not turn.facts and turn.desk.waits is desk.waits and not isinstance(request, Tick | Stalled)
    return Decision(turn.desk if renewed_only else turn.desk.with_deadline(), tuple(turn.facts), tuple(turn.commands))
