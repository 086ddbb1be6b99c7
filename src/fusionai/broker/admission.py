"""Which machines may lend themselves to the pool: every member, or only those whose keys are endorsed.

`fusion broker --trust` names the keys that endorse. Refused machines are remembered for the broker's owner. `service`
asks at each registration, heartbeat and plan, because endorsements expire; `transport.security.trust` checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fusionai.broker.options import BrokerOptions
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.requests import Refusal
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.security.trust import Signer, TrustList, TrustListFile, key_text, load_trust_list

MAX_UNENDORSED: Final = 64
"""Refused machines that are remembered (chosen)."""


@dataclass
class LenderAdmission:
    """`admits` raises `TrustError` for a machine, with the endorsements it shows, that may not lend itself here; None:
    every member may."""

    admits: Callable[[PeerId, Sequence[bytes]], object] | None = None
    unendorsed: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Names of machines that asked to lend themselves and were refused, because their keys were not endorsed."""

    @classmethod
    def by(cls, options: BrokerOptions, clock: Clock) -> LenderAdmission:
        """Return what the options ask for. Raises `UsageError`, `TrustError`, `StorageError`."""
        if options.trust_file is not None:
            if options.trusted_keys:
                raise UsageError("expected trusted keys or a trust file, got both.", hint="Leave one of them out.")
            load_trust_list(options.trust_file)  # raises errors of the file before the port is open
            return cls(TrustListFile(options.trust_file, clock.wall_s).check)
        if options.trusted_keys:
            trust_list = TrustList(signers=tuple(Signer(key_text(key)) for key in sorted(options.trusted_keys)))
            return cls(lambda peer, carried: trust_list.endorsement_of(peer, carried, clock.wall_s()))
        return cls()

    def check_registering(self, peer: PeerId, profile: PeerProfile, notice: Callable[[str], None]) -> None:
        """Raise `Refusal` if the machine may not lend. `notice` gets a sentence about the first refusal."""
        try:
            self._check(peer, profile)
        except Refusal:
            if peer not in self.unendorsed:
                notice(f"{profile.name or short(peer)} asked to lend itself and was refused: its key is not endorsed.")
            self.unendorsed[peer] = profile.name
            while len(self.unendorsed) > MAX_UNENDORSED:
                del self.unendorsed[next(iter(self.unendorsed))]
            raise

    def check_member(self, peer: PeerId, member: Member | None) -> None:
        """The same for a machine that has registered: that may be longer ago than this rule, or its endorsements may
        have expired."""
        if self.admits is not None and member is not None and member.profile:
            self._check(peer, msgspec.msgpack.decode(member.profile, type=PeerProfile))

    def _check(self, peer: PeerId, profile: PeerProfile) -> None:
        if self.admits is None:
            return
        try:
            self.admits(peer, profile.endorsements)
        except TrustError as error:
            raise Refusal(
                "untrusted",
                f"This broker takes only machines whose keys are endorsed: {error.message} Have {peer} signed "
                "(`fusion trust sign`) by a key it trusts, carry that (`fusion trust carry`), and join again.",
            ) from error
        self.unendorsed.pop(peer, None)
