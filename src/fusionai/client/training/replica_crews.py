"""Assigns the machines of the pool to the replicas of a job.

A working machine belongs to the replica that it works for. A free machine stays with the replica it was assigned to. A
new one goes to the replica with the least compute, unless another replica waits for machines to start with. A replica
that has lost a machine and has no free one may use any free machine.

`client.training.replicas` uses this; `scheduling.training.replicated` divides the machines at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fusionai.client.pool.session import PoolMember
from fusionai.client.training.preparation import PreparedJob
from fusionai.primitives.ids import JobId
from fusionai.scheduling.problem.types import Plan
from fusionai.training.driver import Driver
from fusionai.training.joint_exchange import JointSeat

KeptOut = Callable[[tuple[PoolMember, ...], bool], frozenset[str]]
"""Returns the members that this replica may not use. The flag says whether it needs a machine at once."""


@dataclass(slots=True, kw_only=True)
class ReplicaPart:
    """One replica. `prepared` has the replica's share of the data. `first_step`: steps of the job that were over when
    it started. `total_steps`: steps of the job, for the learning rate schedule."""

    number: int
    prepared: PreparedJob
    exchange: JointSeat
    kept_out: KeptOut
    first_step: int
    total_steps: int
    driver: Driver | None = field(default=None)
    """The replica's driver, None until there is one."""
    dropped: str | None = None
    """Reason for which its training was cut off; it continues from there at the next start."""

    def weigh(self, plan: Plan, members: Iterable[PoolMember]) -> None:
        """Let this replica's stages sum a share that corresponds to the slowest uplink of its machines."""
        placed = {stage.peer for stage in plan.stages}
        uplinks = [one.profile.uplink.bandwidth_bytes_per_s for one in members if one.view.peer in placed]
        if uplinks:
            self.exchange.weight = max(1.0, min(uplinks))

    def excluded(self, members: tuple[PoolMember, ...]) -> frozenset[str]:
        return self.kept_out(members, self.driver is not None and self.driver.is_waiting)


class Crews:
    """Machines by replica number. Only replicas that were given machines or a job count."""

    def __init__(self) -> None:
        self._crew: dict[str, int] = {}
        """Maps a peer to its replica."""
        self._jobs: dict[JobId, int] = {}
        self._numbers: set[int] = set()
        self.someone_waits = False
        """Whether a replica waits for machines. New machines are then assigned only with `share_out`."""

    def give(self, number: int, peers: Iterable[str]) -> None:
        """Assign `peers` to a replica, also if another had them."""
        self._numbers.add(number)
        self._crew |= dict.fromkeys(peers, number)

    def know(self, number: int, job: JobId) -> None:
        """Record the id of the replica's job."""
        self._numbers.add(number)
        self._jobs[job] = number

    def forget(self, number: int) -> None:
        """Release the machines of a replica that has ended or waits to start."""
        self._numbers.discard(number)
        self._jobs = {job: one for job, one in self._jobs.items() if one != number}
        self._crew = {peer: one for peer, one in self._crew.items() if one != number}

    def see(self, members: Iterable[PoolMember], *, share_out: bool = False) -> None:
        """Update the assignment from the pool's members. New machines are assigned unless a replica waits; with
        `share_out` also then, because it can't start with them."""
        new: list[PoolMember] = []
        strength = dict.fromkeys(self._numbers, 0.0)
        for member in members:
            peer = member.view.peer
            if (number := self._jobs.get(JobId(member.view.job))) is not None:
                self._crew[peer] = number
            if peer in self._crew:
                if member.is_present:
                    strength[self._crew[peer]] += member.profile.effective_flops_per_s
            else:
                new.append(member)
        for member in sorted(new, key=lambda one: (-one.profile.effective_flops_per_s, one.view.peer)):
            if strength and (share_out or not self.someone_waits):
                weakest = min(sorted(strength), key=lambda number: strength[number])
                self._crew[member.view.peer] = weakest
                strength[weakest] += member.profile.effective_flops_per_s

    def kept_out(self, number: int, members: tuple[PoolMember, ...], *, in_need: bool) -> frozenset[str]:
        """Return the members that a replica may not use. `in_need`: one of its stages has no machine."""
        self.see(members)
        own = [one for one in members if self._crew.get(one.view.peer) == number]
        others = [one for one in members if self._crew.get(one.view.peer) != number]
        if in_need and not any(stands_by(one) for one in own):
            others = [one for one in others if not stands_by(one)]
        return frozenset(one.view.peer for one in others)


def stands_by(member: PoolMember) -> bool:
    """Return whether a member is free and can get work at once."""
    return member.view.state == "idle" and member.view.rests_s == 0 and not member.view.clears
