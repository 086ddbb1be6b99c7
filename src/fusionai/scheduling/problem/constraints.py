"""Constraints on plans: the peers that may be used, those that must be used, pinned blocks and the number of stages.

A pin acts like a memory limit: a range of blocks that violates a pin can't be held. Every search that asks whether a
range fits therefore respects pins, and its bounds stay valid. Peers that can't be used are returned with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fusionai.primitives.errors import PlanError, nearest
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.memory_savings import inability, savings_choices
from fusionai.scheduling.problem.types import BlockCost, Excluded, Link, PeerProfile, Problem


class Pins:
    """The pins of a problem, by position and peer index. `blocks`: the blocks to place, in order. `peers`: the peers in
    index order. `only`: index of a peer that holds its pinned blocks and no others."""

    def __init__(
        self,
        pinned: Mapping[int, str],
        blocks: Sequence[BlockCost],
        peers: Sequence[PeerProfile],
        only: int | None = None,
    ) -> None:
        positions = {block.block: position for position, block in enumerate(blocks)}
        index = {peer.peer: number for number, peer in enumerate(peers)}
        self._pins = [(positions[block], index[peer]) for block, peer in pinned.items()]
        self.peers = frozenset(peer for _, peer in self._pins)
        self._only = only
        self._only_count = sum(peer == only for _, peer in self._pins)

    def table(self, blocks: int) -> tuple[list[int], int, int]:
        """Return the pins as arrays: the required peer per position, the exclusive peer, and its number of blocks. The
        list has -1 for a position without a pin, and is empty if there are no pins. The exclusive peer, which holds its
        pinned blocks and no others, is -1 if there is none."""
        if not self._pins:
            return [], -1, 0
        peers = [-1] * blocks
        for position, peer in self._pins:
            peers[position] = peer
        return peers, -1 if self._only is None else self._only, self._only_count

    def allow(self, peer: int, start: int, end: int) -> bool:
        """Return whether `peer` may hold [start, end): all blocks pinned to it, and none pinned to another peer."""
        if peer == self._only and end - start != self._only_count:
            return False
        return not self._pins or all((start <= position < end) == (peer == owner) for position, owner in self._pins)


def must_use(problem: Problem) -> frozenset[str]:
    """Return the peers that must be used: the required ones and those with a pinned block."""
    return frozenset((*problem.required, *problem.pinned.values()))


def check_pins(problem: Problem, placeable: Sequence[BlockCost]) -> None:
    """Raise `PlanError` if a pinned block is not among the blocks that the pool places."""
    known = [block.block for block in placeable]
    for block, peer in problem.pinned.items():
        if block not in known:
            raise PlanError(
                f"block {block} is pinned to peer {peer!r}, but the pool is given blocks {known[0]} to {known[-1]}.",
                hint="Pin a block of those, or place the model's ends with the pool.",
            )


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Pipelines with pool stages from `fewest` to `most` that use every peer in the mask `required`."""

    fewest: int
    most: int
    required: int = 0


def limits_among(problem: Problem, peers: Sequence[PeerProfile], limits: PipelineLimits) -> PipelineLimits:
    """`limits` for these peers, with the mask of the peers that must be used."""
    index = {peer.peer: i for i, peer in enumerate(peers)}
    required = sum(1 << index[name] for name in must_use(problem))
    return PipelineLimits(fewest=limits.fewest, most=min(limits.most, len(peers)), required=required)


def eligible(
    problem: Problem,
    pool_blocks: Sequence[BlockCost],
    smallest_stage_bytes: float,
    unfit: Callable[[PeerProfile], str | None] | None = None,
) -> tuple[list[PeerProfile], list[Excluded]]:
    """Split `problem.peers` into usable and refused peers, sorted by peer id. `smallest_stage_bytes`: memory of the
    smallest possible stage. `unfit` returns why a peer that lends this much still can't hold a stage, or None. Raises
    `PlanError` if a required or pinned peer can't be used, or none can."""
    ops = sorted({op for block in pool_blocks for op in block.ops})
    usable: list[PeerProfile] = []
    refused: list[Excluded] = []
    for peer in sorted(problem.peers, key=lambda p: p.peer):
        reason = refusal(problem, peer, ops)
        if reason is None and peer.memory_bytes < smallest_stage_bytes:
            reason = (
                f"it lends {format_bytes(peer.memory_bytes)}, "
                f"the smallest stage takes {format_bytes(smallest_stage_bytes)}: "
                f"{format_bytes(smallest_stage_bytes - peer.memory_bytes)} are missing."
            )
        if reason is None and unfit is not None:
            reason = unfit(peer)
        if reason is None:
            usable.append(peer)
        else:
            refused.append(Excluded(peer=peer.peer, reason=reason))
            if peer.peer in must_use(problem):
                asked = "required" if peer.peer in problem.required else "pinned"
                raise PlanError(
                    f"peer {peer.peer!r} is {asked} but can't be used: {reason}",
                    hint=f"Take it out of `{asked}`, or change what the reason names.",
                )
    if not usable:
        reasons = "; ".join(f"{problem.name_of(one.peer)}: {one.reason.rstrip('.')}" for one in refused)
        raise PlanError(
            f"no peer of the pool can be used ({reasons or 'the pool is empty'}).",
            hint="Let more peers join, or change what these reasons name.",
        )
    return usable, refused


def stage_limits(problem: Problem, usable: int, blocks: int) -> PipelineLimits:
    """Return the limits on the number of stages over `blocks` blocks and `usable` peers, without the mask of required
    peers. Raises `PlanError` if they contradict each other."""
    reserved, required = problem.spares_wanted or 0, len(must_use(problem))
    most = min(usable - reserved, blocks)
    wanted = problem.stages or max(1, required)
    if wanted > blocks:
        raise PlanError(
            f"{wanted} stages need {wanted} blocks, the model has {blocks} to place.",
            hint=f"Ask for at most {blocks} stages.",
        )
    if most < wanted:
        spare = f" with {reserved} kept as spares" if reserved else ""
        raise PlanError(
            f"{wanted} stages need {wanted} peers{spare}, but {usable} of {len(problem.peers)} peers can be used.",
            hint="Ask for fewer stages or spares, or let more peers join.",
        )
    if problem.stages is not None and required > problem.stages:
        raise PlanError(
            f"{required} peers are required, but only {problem.stages} stages were asked for.",
            hint="Require fewer peers or ask for more stages.",
        )
    return PipelineLimits(fewest=wanted, most=problem.stages or most)


def check_settings(problem: Problem) -> None:
    """Raise `PlanError` if a peer is listed twice, if `required`, `excluded` or `pinned` names a peer that is not in
    the pool, or if the numbers of stages and spares or a link are invalid."""
    known = [p.peer for p in problem.peers]
    if len(set(known)) != len(known):
        twice = next(name for name in known if known.count(name) > 1)
        raise PlanError(f"peer {twice!r} is listed twice.", hint="List every peer once.")
    pinned = tuple(problem.pinned.values())
    for setting, names in (("required", problem.required), ("excluded", problem.excluded), ("pinned", pinned)):
        for name in names:
            if name not in known:
                raise PlanError(f"`{setting}` names peer {name!r}, which is not in the pool; {nearest(name, known)}")
    if problem.stages is not None and problem.stages < 1:
        raise PlanError(f"expected at least 1 stage, got {problem.stages}.")
    if problem.spares_wanted is not None and problem.spares_wanted < 0:
        raise PlanError(f"expected at least 0 spares, got {problem.spares_wanted}.")
    check_links(problem.links, problem.everyone)


def refusal(problem: Problem, peer: PeerProfile, ops: Sequence[str]) -> str | None:
    """The reason why `peer` can't run any stage with these operators, regardless of memory; None if it can."""
    if peer.peer in problem.excluded:
        return "excluded by the job owner."
    if "stage" not in peer.roles:
        return "its provider does not lend it for stages."
    if problem.task not in peer.tasks:
        return f"its backend {peer.backend!r} does not {problem.task}."
    if problem.serving is not None and peer.weight_formats and problem.serving.weights not in peer.weight_formats:
        kept = ", ".join(peer.weight_formats)
        return f"its backend {peer.backend!r} keeps weights as {kept}, not as {problem.serving.weights}."
    missing = [op for op in ops if op in peer.unsupported_ops]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return f"its backend {peer.backend!r} can't run {', '.join(missing[:3])}{more}."
    needed = inability(savings_choices(problem)[0], peer)
    if needed is not None:
        return f"{needed}, as the job asks of all."
    if not peer.flops_per_s > 0:
        return f"its measured speed is {peer.flops_per_s} FLOP/s."
    if not 0 < peer.share <= 1:
        return f"its share is {peer.share}, expected above 0 and at most 1."
    return None


def check_links(exceptions: Mapping[str, Link], machines: Sequence[PeerProfile]) -> None:
    """Raise `PlanError` if a key is not `from>to` of two of the machines, or if any link has invalid values."""
    names = {machine.peer for machine in machines}
    for key, link in exceptions.items():
        ends = key.split(">")
        if len(ends) != 2:
            raise PlanError(f"expected a link's key as 'from>to', got {key!r}.")
        for end in ends:
            if end not in names:
                raise PlanError(f"link {key!r} names peer {end!r}, which is not in the pool; {nearest(end, names)}")
        _check(link, f"link {key!r}")
    for machine in machines:
        _check(machine.uplink, f"the uplink of peer {machine.peer!r}")
        _check(machine.downlink, f"the downlink of peer {machine.peer!r}")


def _check(link: Link, what: str) -> None:
    if not link.bandwidth_bytes_per_s > 0 or not 0 <= link.latency_s < inf:
        raise PlanError(
            f"expected {what} to have a positive bandwidth and a latency of at least 0 s, "
            f"got {link.bandwidth_bytes_per_s} bytes/s and {link.latency_s} s."
        )
