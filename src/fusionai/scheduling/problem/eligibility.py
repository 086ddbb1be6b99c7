"""Splits the pool into peers that the planner may use and refused ones, with the reason for each refusal.

Choosing among usable peers is left to the planners, which list the refusals in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.levers import choices_of_problem, inability
from fusionai.scheduling.problem.links import nearest
from fusionai.scheduling.problem.pins import must_use
from fusionai.scheduling.problem.types import BlockCost, Excluded, PeerProfile, Problem


def eligible(
    problem: Problem,
    pool_blocks: Sequence[BlockCost],
    smallest_stage_bytes: float,
    unfit: Callable[[PeerProfile], str | None] | None = None,
) -> tuple[list[PeerProfile], list[Excluded]]:
    """Split `problem.peers` into usable and refused peers, sorted by peer id.

    `smallest_stage_bytes`: memory of the smallest possible stage. `unfit` returns why a peer that lends this much still
    can't hold a stage, or None. Raises `PlanError` if a required or pinned peer can't be used.
    """
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
                    hint=f"Take it out of `{asked}`, or mend what stands in its way.",
                )
    return usable, refused


def check_names(problem: Problem) -> None:
    """Raise `PlanError` if a peer is listed twice or if `required`, `excluded` or `pinned` names a peer that is not in
    the pool."""
    known = [p.peer for p in problem.peers]
    if len(set(known)) != len(known):
        twice = next(name for name in known if known.count(name) > 1)
        raise PlanError(f"peer {twice!r} is listed twice.", hint="List every peer once.")
    pinned = tuple(problem.pinned.values())
    for setting, names in (("required", problem.required), ("excluded", problem.excluded), ("pinned", pinned)):
        for name in names:
            if name not in known:
                raise PlanError(
                    f"`{setting}` names peer {name!r}, which is not in the pool.", hint=nearest(name, sorted(known))
                )


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
    needed = inability(choices_of_problem(problem)[0], peer)
    if needed is not None:
        return f"{needed}, as the job asks of all."
    if not peer.flops_per_s > 0:
        return f"its measured speed is {peer.flops_per_s} FLOP/s."
    if not 0 < peer.share <= 1:
        return f"its share is {peer.share}, expected above 0 and at most 1."
    return None
