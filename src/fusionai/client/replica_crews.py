"""Which machine is whose among a job's replicas. Decides; asks nobody, and looks at nothing but what it is shown.

A machine that works is whose it works for. One that stands by stays with the replica it was given to, and a new one
goes to the weakest, unless a replica waits that might begin with it; but a replica that has lost somebody and has
nobody to spare may have anybody who stands by.
Neighbours: `client.replicas` keeps it, `scheduling.replica_groups` divides machines at the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusionai.client.pool_session import Member
from fusionai.client.replanning import is_present
from fusionai.primitives.ids import JobId


class Crews:
    """By number of the replica; only those that were given machines or a job have a crew."""

    def __init__(self) -> None:
        self._crew: dict[str, int] = {}
        """Peer -> replica."""
        self._jobs: dict[JobId, int] = {}
        self._numbers: set[int] = set()
        self.someone_waits = False
        """New machines are nobody's until `share_out`."""

    def give(self, number: int, peers: Iterable[str]) -> None:
        """From now on they are this replica's, whoever had them."""
        self._numbers.add(number)
        self._crew |= dict.fromkeys(peers, number)

    def know(self, number: int, job: JobId) -> None:
        """What the replica's job is called."""
        self._numbers.add(number)
        self._jobs[job] = number

    def forget(self, number: int) -> None:
        """It has ended or waits to begin: its machines are the others'."""
        self._numbers.discard(number)
        self._jobs = {job: one for job, one in self._jobs.items() if one != number}
        self._crew = {peer: one for peer, one in self._crew.items() if one != number}

    def see(self, members: Iterable[Member]) -> None:
        """Who works for whom now, and who is new."""
        self._see(members, place_new=not self.someone_waits)

    def share_out(self, members: Iterable[Member]) -> None:
        """Whoever waits can't begin with those who are new."""
        self._see(members, place_new=True)

    def _see(self, members: Iterable[Member], *, place_new: bool) -> None:
        new: list[Member] = []
        strength = dict.fromkeys(self._numbers, 0.0)
        for member in members:
            peer = member.view.peer
            if (number := self._jobs.get(JobId(member.view.job))) is not None:
                self._crew[peer] = number
            if peer in self._crew:
                if is_present(member):
                    strength[self._crew[peer]] += member.profile.effective_flops_per_s
            else:
                new.append(member)
        for member in sorted(new, key=lambda one: (-one.profile.effective_flops_per_s, one.view.peer)):
            if strength and place_new:
                weakest = min(sorted(strength), key=lambda number: strength[number])
                self._crew[member.view.peer] = weakest
                strength[weakest] += member.profile.effective_flops_per_s

    def kept_out(self, number: int, members: tuple[Member, ...], *, in_need: bool) -> frozenset[str]:
        """Who is not for this replica. `in_need`: a part of it has nobody to run it."""
        self.see(members)
        own = [one for one in members if self._crew.get(one.view.peer) == number]
        others = [one for one in members if self._crew.get(one.view.peer) != number]
        if in_need and not any(stands_by(one) for one in own):
            others = [one for one in others if not stands_by(one)]
        return frozenset(one.view.peer for one in others)


def stands_by(member: Member) -> bool:
    """Whether it may be given work at once."""
    return member.view.state == "idle" and member.view.rests_s == 0 and not member.view.clears
