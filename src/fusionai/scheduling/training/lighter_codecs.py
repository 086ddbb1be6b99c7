"""Finds smaller codecs of boundary tensors that would speed up a training job whose links are the bottleneck.

Each codec is planned among the machines of the found plan only. Other machines, of which there may be thousands, could
make the gain larger.

`replicated` plans with each codec, `cli.plan` shows the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.scheduling.training import replicated
from fusionai.wire.codecs import FOR_PLANS, LADDER, Codec

WORTH: Final = 1.25
"""Least speedup over the next larger codec of the result for a codec to be listed, chosen."""


@dataclass(frozen=True, slots=True)
class Lighter:
    """A smaller codec and a lower limit of the speed with it."""

    compression: Codec
    tokens_per_s: float


def lighter(problem: Problem, found: Plan) -> tuple[Lighter, ...]:
    """Codecs smaller than that of `problem` which each speed the job up by `WORTH`. `found`: the plan without them."""
    if problem.task != "train" or problem.compression not in LADDER:
        return ()
    compute_s = found.microbatches * max(stage.compute_s for stage in found.stages)
    if found.step_time_s < WORTH * compute_s:
        return ()  # Computing limits the step, so a smaller codec can't reach WORTH.
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
