"""Decides what each request does to the pool, which sender may make it, and what is answered.

`handle(desk, request, now_s, wall_s)` is pure. It returns facts and commands. The shell journals the facts first; only
then does it adopt the new desk and perform the commands. If the journal refuses, nothing has happened.

`requests` defines the vocabulary, `admission`, `presence` and `assignment` decide, `broker.service` is the shell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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
    RegisterMember,
    ReportJob,
    Request,
    RequestJob,
    Stalled,
    StopJob,
    Tick,
    Vouch,
)
from fusionai.coordination.broker.state import BrokerState, Decision
from fusionai.coordination.broker.transaction import Transaction
from fusionai.coordination.machine import ForbiddenTransition
from fusionai.wire.messages import Refused

_DECIDES: Final[dict[type[Request], Callable[[Transaction, Any], None]]] = {
    Enrol: admission.enrol,
    Vouch: admission.vouch,
    Invite: admission.invite,
    RegisterMember: presence.register,
    Beat: presence.beat,
    AskLeave: presence.leave,
    Disconnected: presence.disconnect,
    Tick: presence.tick,
    Stalled: presence.restart_leases,
    RequestJob: assignment.request_job,
    ReportJob: assignment.report_job,
    StopJob: assignment.stop_job,
}


def handle(desk: BrokerState, request: Request, *, now_s: float, wall_s: float) -> Decision:
    """Return the decision on one request. `now_s` is monotonic, `wall_s` is seconds since 1970. A request that does not
    fit is answered by `Refused` and changes nothing."""
    turn = Transaction(desk, now_s, wall_s)
    try:
        _DECIDES[type(request)](turn, request)
    except Refusal as refusal:
        return Decision(desk, (), (Answer(refusal.message),))
    except ForbiddenTransition as forbidden:
        return Decision(desk, (), (Answer(Refused(code="bad_message", reason=str(forbidden)[:REASON_LENGTH])),))
    renewed_only = not turn.facts and turn.desk.waits is desk.waits and not isinstance(request, Tick | Stalled)
    return Decision(turn.desk if renewed_only else turn.desk.with_deadline(), tuple(turn.facts), tuple(turn.commands))
