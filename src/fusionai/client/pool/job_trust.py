"""Decides which members a job may use: all of the pool or, at level `trusted`, only those on the owner's trust list.

There is one object per job and process. It is asked when the pool is listed, when a plan is adopted, when a connection
opens, and repeatedly while the job runs. It fails closed: unknown members are excluded, and while the trust file can't
be read, all are.

`transport.security.trust` reads the owner's trust file. `client.pool.session` asks for every listing and plan, its
transport for every connection, `client.pool.watch` while the job runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.scheduling.problem.types import Excluded, Plan
from fusionai.transport.enrolment import Membership
from fusionai.transport.security.signed import Seal
from fusionai.transport.security.trust import TRUST_FILE, TrustListFile

if TYPE_CHECKING:
    from fusionai.client.pool.session import PoolMember


@dataclass(slots=True, kw_only=True)
class JobTrust:
    """Trust of one job. `me`: the owner's key, always trusted. `own`: keys of processes that this command has started,
    also trusted. `barred`: members at the last listing that may not be used, with the reasons."""

    level: PrivacyLevel
    me: PeerId
    seal: Seal
    trust_list: TrustListFile
    own: frozenset[PeerId] = frozenset()
    barred: tuple[Excluded, ...] = ()
    _carried: dict[PeerId, tuple[bytes, ...]] = field(default_factory=dict[PeerId, tuple[bytes, ...]])
    """Endorsements that members show, by peer, as passed on by the broker."""

    @property
    def required(self) -> bool:
        return self.level == "trusted"

    def among(self, members: tuple[PoolMember, ...]) -> tuple[PoolMember, ...]:
        """Return those of `members` that the job may use, and set `barred` to the others."""
        for member in members:
            self._carried[PeerId(member.view.peer)] = member.profile.endorsements
        if not self.required:
            return members
        allowed: list[PoolMember] = []
        barred: list[Excluded] = []
        for member in members:
            reason = self.reason_against(PeerId(member.view.peer))
            if member.profile.peer != member.view.peer:
                reason = "the broker listed it with the profile of another key."
            if reason is None:
                allowed.append(member)
            else:
                barred.append(Excluded(peer=member.view.peer, reason=f"not trusted: {reason}"))
        self.barred = tuple(barred)
        return tuple(allowed)

    def check(self, peer: PeerId) -> None:
        """Raise `TrustError` for a peer that the job may not use."""
        if self.required and (reason := self.reason_against(peer)) is not None:
            raise TrustError(f"peer {short(peer)} may not work for this job, which needs trusted peers: {reason}")

    def check_plan(self, plan: Plan) -> None:
        """Raise `TrustError` for a plan with a peer that the job may not use."""
        for peer in parts(plan):
            self.check(peer)

    def reason_against(self, peer: PeerId) -> str | None:
        """Return why `peer` is not trusted, in one sentence; None if it is trusted."""
        if peer == self.me or peer in self.own:
            return None
        try:
            self.trust_list.check(peer, self._carried.get(peer, ()))
        except TrustError as error:
            return error.message
        return None

    def sentence(self, plan: Plan) -> str | None:
        """Return how many of the plan's other machines are trusted; None if the owner has no trust list."""
        if not self.required and not self.trust_list.path.exists():
            return None
        others = parts(plan) - {self.me}
        trusted = sum(self.reason_against(peer) is None for peer in others)
        kept_out = f"; {len(self.barred)} in the pool excluded" if self.barred else ""
        return f"trusted peers: {trusted} of {len(others)}{kept_out}"


def job_trust(home: Path, membership: Membership, level: PrivacyLevel, *, confidential: bool) -> JobTrust:
    """Return the trust of a job. Raises `UsageError` for a confidential job at another level than `trusted`."""
    if confidential and level != "trusted":
        raise UsageError(
            f"a confidential job runs on trusted peers alone, but this one has privacy level {level!r}: peers could "
            "reconstruct its text.",
            hint="Use level trusted (`--privacy trusted`), or leave confidential out.",
        )
    return JobTrust(
        level=level,
        me=membership.peer,
        seal=Seal(membership.credentials.identity.key, level),
        trust_list=TrustListFile(home / TRUST_FILE, SystemClock().wall_s),
    )


def parts(plan: Plan) -> frozenset[PeerId]:
    """Return all peers with a part in `plan`: holders, standbys and the feed."""
    return frozenset(PeerId(one.peer) for one in (*plan.stages, *plan.standbys)) | {PeerId(plan.feed)}
