"""What packed boundary tensors would bring where links hold a training job up. Decides which codecs are worth naming.

Planned among the machines that the plan uses: with all others, of which there may be thousands, it may be more.

Neighbours: `replicated` plans with each, `cli.plan` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.scheduling import replicated
from fusionai.scheduling.types import Plan, Problem
from fusionai.wire.codecs import FOR_PLANS, LADDER, Codec

WORTH: Final = 1.25
"""So many times faster than with the next larger codec, or nobody asks."""


@dataclass(frozen=True, slots=True)
class Lighter:
    """`tokens_per_s`: at least."""

    compression: Codec
    tokens_per_s: float


def lighter(problem: Problem, found: Plan) -> tuple[Lighter, ...]:
    """Smaller codecs than `problem` has, each worth its loss. `found`: the plan without them."""
    if problem.task != "train" or problem.compression not in LADDER:
        return ()
    compute_s = found.microbatches * max(stage.compute_s for stage in found.stages)
    if found.step_time_s < WORTH * compute_s:
        return ()  # a faster one would have to compute faster
    used = {stage.peer for stage in found.stages}
    posed = msgspec.structs.replace(
        problem,
        peers=tuple(peer for peer in problem.peers if peer.peer in used),
        links={pair: link for pair, link in problem.links.items() if used.issuperset(pair.split(">"))},
        excluded=(),
        spares_wanted=None,
    )
    worth: list[Lighter] = []
    best = found.tokens_per_s
    for codec in FOR_PLANS[LADDER.index(problem.compression) + 1 :]:
        speed = replicated.plan(msgspec.structs.replace(posed, compression=codec)).tokens_per_s
        if speed >= WORTH * best:
            worth.append(Lighter(codec, speed))
            best = speed
    return tuple(worth)
