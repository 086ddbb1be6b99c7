"""Options of a broker: their defaults, and what can't work together.

`cli.pool.broker` makes them of flags, `server` runs a broker by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusionai.coordination.broker.membership import REMEMBERED_LOSSES
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.routes.addresses import parse_address
from fusionai.transport.routes.relay import PAIR_BYTES_PER_S

DEFAULT_PORT: Final = 4711
SHORTEST_LEASE_S: Final = 1.5
"""Below this, an ordinary delay on a slow link looks like a death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """`pool` None keeps the name that is there. `port` 0 takes any free one. `advertise`: addresses to put into
    invitations instead of this machine's own (a forwarded port, a name). `inviters`: members that may invite."""

    home: Path
    pool: str | None = None
    host: str = "0.0.0.0"
    port: int = DEFAULT_PORT
    advertise: tuple[str, ...] = ()
    invites: bool | None = None
    """Make an invitation at the start; None: if the pool is new."""
    invitation_uses: int = 100
    invitation_lifetime_s: float = 86_400.0
    lease_s: float = 12.0
    heartbeat_s: float = 3.0
    unattended_s: float = 120.0
    ticket_lifetime_s: float = 600.0
    inviters: frozenset[PeerId] = frozenset()
    losses_before_rest: int = 5
    """Losses within ten minutes after which a machine gets no new work for five minutes; 0: no limit."""
    relay_bytes_per_s: float | None = PAIR_BYTES_PER_S
    """Relay rate between two machines that can't dial each other, in each direction; None: no relay."""
    trusted_keys: frozenset[bytes] = frozenset()
    """Signing keys: only machines that one of them has endorsed may lend themselves. Empty, without `trust_file`: all
    members may."""
    trust_file: Path | None = None
    """Trust list with the signing keys, as an alternative to `trusted_keys`."""
    policy_file: Path | None = None
    """What the broker's owner decides about the queue (`broker.policy`); None: the defaults."""
    journal: str | None = None
    """Where the pool's journal is (`engines.locations`); None: where this home's journal is, else in files."""
    journal_from: str | None = None
    """Place from which the journal is moved to `journal` first."""
    announces: bool = True
    """Announce the pool in the local network, unless only this machine can reach the broker."""


def check(options: BrokerOptions) -> None:
    """Raises `UsageError` for options that can't work together."""
    if options.journal_from is not None and options.journal is None:
        raise UsageError("expected --journal, the place to which --journal-from moves the journal.")
    for address in options.advertise:
        parse_address(address)
    if options.lease_s < SHORTEST_LEASE_S:
        raise UsageError(f"expected a lease of at least {SHORTEST_LEASE_S:g} s, got {options.lease_s:g} s.")
    if not 0 < options.heartbeat_s <= options.lease_s / 2:
        raise UsageError(
            f"expected a heartbeat of at most half the lease ({options.lease_s / 2:g} s), got "
            f"{options.heartbeat_s:g} s."
        )
    if options.unattended_s < options.lease_s or options.ticket_lifetime_s <= 0 or options.invitation_lifetime_s <= 0:
        raise UsageError("expected durations above zero, and jobs to be waited for at least as long as members.")
    if not 0 <= options.losses_before_rest <= REMEMBERED_LOSSES:
        raise UsageError(f"expected 0 to {REMEMBERED_LOSSES} losses before a rest, got {options.losses_before_rest}.")
    if not 1 <= options.invitation_uses <= 100_000:
        raise UsageError(f"expected an invitation for 1 to 100000 machines, got {options.invitation_uses}.")
