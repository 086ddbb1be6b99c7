"""The pool's ledger as a signed statement: what each machine has lent to the jobs of which owner.

The broker signs it with the pool's authority key (`broker.lent`), so that an export can be checked later on any
machine that has the authority's certificate, without the broker."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.transport.security.signed import StatementKind
from fusionai.wire.base import Count, Name, Peer, Seconds
from fusionai.wire.broker import MAX_LEDGER_BYTES

Flops = Annotated[float, Meta(ge=0, le=1e300)]


class LedgerMachine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A machine that the entries name. `name`: as it registered, empty if it has not. `person`: its owner by the
    broker's policy file; empty: the policy does not name one. `relayed_bytes`: what its relay has copied."""

    machine: Peer
    name: Name = ""
    person: Name = ""
    relayed_bytes: Count = 0


class LedgerEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What `machine` lent to the jobs of `owner`, another machine or itself. `lent_s`: time for which jobs had it. The
    struck figures had counted before and count no more."""

    machine: Peer
    owner: Peer
    lent_s: Seconds
    steps: Count
    tokens: Count
    flops: Flops
    struck_steps: Count
    struck_tokens: Count
    struck_flops: Flops


class LedgerContent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The whole ledger at one time, in seconds since 1970."""

    version: Literal[1]
    pool: Name
    at_s: Seconds
    machines: tuple[LedgerMachine, ...]
    entries: tuple[LedgerEntry, ...]


_LEDGER: Final = StatementKind("ledger", LedgerContent, b"fusionai ledger 1\x00", MAX_LEDGER_BYTES)
sign_ledger: Final = _LEDGER.sign
verify_ledger: Final = _LEDGER.verify
