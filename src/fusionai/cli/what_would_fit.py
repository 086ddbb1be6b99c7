"""When there is no plan: what would have to change for there to be one. Decides what is tried.

Each change is put to the planner on its own, and only those that lead to a plan are named: nothing untried is
promised. Neighbours: `cli.plan` asks when the planner refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling import replicated
from fusionai.scheduling.chain import Chain
from fusionai.scheduling.ends import ends_of, owners_bytes
from fusionai.scheduling.types import PeerProfile, Problem

MOST_COPIES: Final = 32
"""Of more machines than that only the least number that could do is said."""
MOST_TIMES: Final = 64
HALVINGS: Final = 4
MOST_TRIED_PEERS: Final = 128
"""In larger pools the planner takes too long to be asked several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`problem`: made when it is tried, because some need a new graph. None: it can't be made."""

    words: str
    problem: Callable[[], Problem | None]


def what_would_fit(problem: Problem, others: Sequence[Change] = ()) -> list[str]:
    """Changes that lead to a plan, in words; `others` besides those every problem has."""
    if len(problem.peers) > MOST_TRIED_PEERS:
        return []
    found: list[str] = []
    for change in (*_lifted(problem), *others):
        if _tried(change):
            found.append(change.words)
    # More machines only where nothing else is in the way.
    found = found or list(_more_machines(problem)) or list(_more_memory(problem))
    return [*found, *(change.words for change in _with_owners(problem) if _tried(change))]


def _lifted(problem: Problem) -> Iterator[Change]:
    """The user's own constraints, one at a time."""
    if problem.required:
        yield _change("without `required`", problem, required=())
    if problem.pinned:
        yield _change("without `pinned`", problem, pinned={})
    if problem.excluded:
        yield _change("without `excluded`", problem, excluded=())
    if problem.stages is not None:
        yield _change("with another number of stages", problem, stages=None)
    if problem.spares_wanted:
        yield _change("with no spares kept free", problem, spares_wanted=None)
    if problem.kept_first or problem.kept_last > 1:
        yield _change("with --privacy encrypted", problem, kept_first=0, kept_last=0)
    elif problem.owner is not None and any(role.place == "owner" for role in problem.roles):
        roles = tuple(msgspec.structs.replace(role, place="pool") for role in problem.roles)
        yield _change("with the model's ends in the pool", problem, roles=roles)


def _with_owners(problem: Problem) -> Iterator[Change]:
    """Where the job owner's machine is not one of the pool: as a member of it, with what its ends leave free."""
    owner = problem.owner
    if owner is None or not owner.flops_per_s > 0 or any(peer.peer == owner.peer for peer in problem.peers):
        return
    words = "with this machine lent to the pool as well (`fusion join`)"
    own = msgspec.structs.replace(owner, roles=("stage",))
    if problem.task == "train" and ends_of(problem).first:
        # The owner's own part is a stage apart from what a member on the same machine would hold.
        free = max(0, owner.memory_bytes - ceil(owners_bytes(problem)))
        own = msgspec.structs.replace(own, peer=f"{owner.peer} (lent)", memory_bytes=free)
    yield _change(words, problem, peers=(*problem.peers, own))


def _more_machines(problem: Problem) -> Iterator[str]:
    """How many more of the largest machine it takes: from what memory alone asks for, doubled until it fits, then
    halved back."""
    usable = [peer for peer in problem.peers if peer.flops_per_s > 0 and "stage" in peer.roles]
    if not usable or problem.stages is not None:
        return
    largest = max(usable, key=lambda peer: (peer.memory_bytes, peer.peer))
    machines = f"like {largest.name or largest.peer} ({format_bytes(largest.memory_bytes)} each)"
    chain = Chain(problem, problem.blocks)
    if max(chain.resident_bytes(b, b + 1) for b in range(chain.length)) > largest.memory_bytes:
        return
    missing_bytes = chain.resident_bytes(0, chain.length) - sum(peer.memory_bytes for peer in usable)
    low = max(0, ceil(missing_bytes / largest.memory_bytes) - 1)
    if low >= MOST_COPIES:
        yield f"with at least {low + 1} more machines {machines}"
        return
    count = low + 1
    while not _plans(_grown(problem, largest, count)):
        low, count = count, 2 * count
        if count > MOST_COPIES:
            return
    while count - low > 1:
        middle = (low + count) // 2
        if _plans(_grown(problem, largest, middle)):
            count = middle
        else:
            low = middle
    yield f"with {count} more {'machine' if count == 1 else 'machines'} {machines}"


def _more_memory(problem: Problem) -> Iterator[str]:
    """Where not even one block fits: how much more everybody would have to lend."""
    high = 2.0
    while not _plans(_roomier(problem, high)):
        high *= 2
        if high > MOST_TIMES:
            return
    low = high / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _plans(_roomier(problem, middle)):
            high = middle
        else:
            low = middle
    largest = max(peer.memory_bytes for peer in problem.peers)
    yield f"if peers lent {high:.3g} times as much memory ({format_bytes(high * largest)} the largest)"


def _roomier(problem: Problem, times: float) -> Problem:
    peers = tuple(msgspec.structs.replace(peer, memory_bytes=ceil(times * peer.memory_bytes)) for peer in problem.peers)
    return msgspec.structs.replace(problem, peers=peers)


def _grown(problem: Problem, largest: PeerProfile, count: int) -> Problem:
    copies = [
        msgspec.structs.replace(largest, peer=f"{largest.peer} (more {n})", name=f"{largest.name} (more {n})")
        for n in range(1, count + 1)
    ]
    return msgspec.structs.replace(problem, peers=(*problem.peers, *copies))


def _change(words: str, problem: Problem, **fields: object) -> Change:
    return Change(words=words, problem=lambda: msgspec.structs.replace(problem, **fields))


def _tried(change: Change) -> bool:
    changed = change.problem()
    return changed is not None and _plans(changed)


def _plans(problem: Problem) -> bool:
    try:
        replicated.plan(problem)
    except PlanError:
        return False
    return True
