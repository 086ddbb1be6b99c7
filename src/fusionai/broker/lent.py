"""The answer to a question for the ledger: sums with names and persons, signed with the pool's authority key.

`coordination.broker.ledger` keeps the sums, `service` answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from fusionai.coordination.broker.requests import Refusal
from fusionai.coordination.broker.state import BrokerState
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.security.certificates import Authority
from fusionai.transport.security.ledger import LedgerContent, LedgerEntry, LedgerMachine, sign_ledger
from fusionai.wire import messages as wire

T = TypeVar("T")


@dataclass
class RelayMeter:
    """What this broker's relay copies. `copied_bytes` returns the count since the start."""

    copied_bytes: Callable[[], int] = lambda: 0
    _noted_bytes: int = 0

    @property
    def unnoted_bytes(self) -> int:
        """The part that is not journalled."""
        return self.copied_bytes() - self._noted_bytes

    def noted(self, count: int, found: T) -> T:
        """Remember that `count` bytes more are journalled, and return `found`, what else was decided."""
        self._noted_bytes += count
        return found


def ledger_view(desk: BrokerState, authority: Authority, wall_s: float, relay: RelayMeter) -> wire.LedgerView:
    """Return the signed ledger, with what the relay has copied since it was journalled last. Raises `Refusal` if there
    are more entries than an answer can carry."""
    ledger, people = desk.pool.ledger, desk.rules.queue.people
    entries = tuple(
        LedgerEntry(
            machine,
            owner,
            lent.lent_s,
            lent.steps,
            lent.tokens,
            lent.flops,
            lent.struck_steps,
            lent.struck_tokens,
            lent.struck_flops,
        )
        for machine, owner, lent in ledger.entries(wall_s)
    )
    relayed = dict(ledger.relayed_bytes)
    if relay.unnoted_bytes:
        relayed[desk.rules.broker] = relayed.get(desk.rules.broker, 0) + relay.unnoted_bytes
    named = dict.fromkeys((*(one.machine for one in entries), *(one.owner for one in entries), *relayed))
    machines = tuple(
        LedgerMachine(machine, _name(desk, PeerId(machine)), people.get(PeerId(machine), ""), relayed.get(machine, 0))
        for machine in map(PeerId, named)
    )
    signed = sign_ledger(LedgerContent(1, authority.pool, wall_s, machines, entries), authority.key)
    if len(signed) > wire.MAX_LEDGER_BYTES:
        raise Refusal("failed", f"The ledger's {len(entries)} entries do not fit into one answer.")
    return wire.LedgerView(signed=signed)


def _name(desk: BrokerState, machine: PeerId) -> str:
    member = desk.pool.members.get(machine)
    if member is None or not member.profile:
        return ""
    return msgspec.msgpack.decode(member.profile, type=PeerProfile).name
