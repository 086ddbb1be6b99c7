"""Whom a job may run on: everybody in the pool, or (level `trusted`) members of the owner's circle alone.

One object per job and process, asked wherever a member could come in: when the pool is looked at, when a plan is made
real, when a connection is opened, and again while the job runs. Decides nothing about who is best. Fails closed: a
member of whom nothing is known, and everybody while the trust file can't be read, is kept out.

Neighbours: `transport.circle` reads the owner's file, `client.pool_session` asks at every look and plan, its transport
at every connection, `client.circle_watch` while the job runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.scheduling.types import Excluded, Plan
from fusionai.transport.circle import TRUST_FILE, CircleFile
from fusionai.transport.enrolment import Membership
from fusionai.transport.placements import Seal

if TYPE_CHECKING:
    from fusionai.client.pool_session import Member


@dataclass(slots=True, kw_only=True)
class JobTrust:
    """`me`: the owner's key, which needs nobody's word. `own`: keys of processes that this very command has started.
    `barred`: who was in the pool at the last look and may not be used, by name, with the reason."""

    level: PrivacyLevel
    me: PeerId
    seal: Seal
    circle: CircleFile
    own: frozenset[PeerId] = frozenset()
    barred: tuple[Excluded, ...] = ()
    _carried: dict[PeerId, tuple[bytes, ...]] = field(default_factory=dict[PeerId, tuple[bytes, ...]])
    """What members show of themselves, as the broker passed it on."""

    @property
    def required(self) -> bool:
        return self.level == "trusted"

    def among(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Those of `members` that the job may use; the others are `barred`."""
        for member in members:
            self._carried[PeerId(member.view.peer)] = member.profile.endorsements
        if not self.required:
            return members
        allowed: list[Member] = []
        barred: list[Excluded] = []
        for member in members:
            reason = self.reason_against(PeerId(member.view.peer))
            if member.profile.peer != member.view.peer:
                reason = "the broker shows it with the profile of another key."
            if reason is None:
                allowed.append(member)
            else:
                barred.append(Excluded(peer=member.view.peer, reason=f"not trusted: {reason}"))
        self.barred = tuple(barred)
        return tuple(allowed)

    def check(self, peer: PeerId) -> None:
        """Raises `TrustError` for a peer that the job may not reach."""
        if self.required and (reason := self.reason_against(peer)) is not None:
            raise TrustError(f"peer {short(peer)} may not work for this job, which is for trusted peers: {reason}")

    def check_plan(self, plan: Plan) -> None:
        """Raises `TrustError` for a plan with a peer that the job may not use."""
        for peer in parts(plan):
            self.check(peer)

    def reason_against(self, peer: PeerId) -> str | None:
        """Why `peer` is not in the circle, in one sentence; None for one that is."""
        if peer == self.me or peer in self.own:
            return None
        try:
            self.circle.check(peer, self._carried.get(peer, ()))
        except TrustError as error:
            return error.message
        return None

    def sentence(self, plan: Plan) -> str | None:
        """How many of the plan's other machines are in the circle; None where the owner keeps no circle."""
        if not self.required and not self.circle.path.exists():
            return None
        others = parts(plan) - {self.me}
        trusted = sum(self.reason_against(peer) is None for peer in others)
        kept_out = f"; {len(self.barred)} in the pool kept out" if self.barred else ""
        return f"trusted peers: {trusted} of {len(others)}{kept_out}"


def job_trust(home: Path, membership: Membership, level: PrivacyLevel, *, confidential: bool) -> JobTrust:
    """Raises `UsageError` for a confidential job at another level than `trusted`."""
    if confidential and level != "trusted":
        raise UsageError(
            f"a confidential job runs on trusted peers alone, and this one is at level {level!r}: peers could "
            "reconstruct its text.",
            hint="Take level trusted (`--privacy trusted`), or leave confidential out.",
        )
    return JobTrust(
        level=level,
        me=membership.peer,
        seal=Seal(membership.credentials.identity.key, level),
        circle=CircleFile(home / TRUST_FILE, SystemClock().wall_s),
    )


def parts(plan: Plan) -> frozenset[PeerId]:
    """Everybody with a part in `plan`."""
    return frozenset(PeerId(one.peer) for one in (*plan.stages, *plan.guards)) | {PeerId(plan.feed)}
