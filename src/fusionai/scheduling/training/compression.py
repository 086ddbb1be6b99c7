"""Chooses the codec of each boundary of a pipeline whose stages are fixed, if the job's compression is `adaptive`.

A slow link gets a small codec and a fast link a large one, up to `none`, as AdaTopK (arXiv 2410.12707) does with its
ratios. Stages are cut as if every boundary had the smallest codec. Then codecs grow one rung at a time, each time where
the step gets longer by the least, until a step would exceed `SLACK`. A plan with the same stages as the running plan
keeps its codecs, so that a replay packs as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from fusionai.scheduling.problem.chain import codecs_of
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.training.pipeline import Pipeline, Suffix
from fusionai.wire.codecs import FOR_PLANS, Codec, gently

SLACK: Final = 1.05
"""Largest step time relative to the smallest codecs, chosen: the price accepted for codecs that lose less."""


def lightened(pipeline: Pipeline, best: Suffix) -> tuple[Pipeline, Suffix, tuple[Codec, ...]]:
    """Return `pipeline` with the chosen codecs, the stages of `best` priced in it, and the codecs, one per boundary."""
    pool = list(pipeline.pool_stages(best))
    order, cuts = [stage.head for stage in pool], [*(stage.start for stage in pool), pipeline.chain.length]
    ends = [pipeline.chain.blocks[cut - 1].block for cut in cuts[1:]]
    if pipeline.loss is None:
        ends.pop()  # The pool's last stage has the loss and sends nothing on.

    def priced(codecs: Mapping[int, Codec]) -> tuple[Pipeline, Suffix] | None:
        other = pipeline.with_codecs(codecs)
        found = other.fold(order, cuts)
        return None if found is None else (other, found)

    kept = _kept(pipeline, cuts, ends)
    if kept is not None and (found := priced(kept)) is not None:
        return *found, _in_order(kept, ends)
    chosen: dict[int, Codec] = dict.fromkeys(ends, FOR_PLANS[-1])
    if pipeline.loss is not None:
        chosen[ends[-1]] = gently(FOR_PLANS[-1])
    result = (pipeline, best)
    budget_s = pipeline.step_s(best) * SLACK
    while True:
        # One rung up at the boundary where the step stays shortest, while any stays within the budget.
        larger = [
            _with(chosen, end, FOR_PLANS[FOR_PLANS.index(chosen[end]) - 1])
            for end in ends
            if chosen[end] != FOR_PLANS[0]
        ]
        tried = [(found, codecs) for codecs in larger if (found := priced(codecs)) is not None]
        within = [one for one in tried if pipeline.step_s(one[0][1]) <= budget_s]
        if not within:
            return *result, _in_order(chosen, ends)
        result, chosen = min(within, key=lambda one: pipeline.step_s(one[0][1]))


def _in_order(codecs: Mapping[int, Codec], ends: list[int]) -> tuple[Codec, ...]:
    return tuple(codecs[end] for end in ends)


def _with(codecs: Mapping[int, Codec], end: int, codec: Codec) -> dict[int, Codec]:
    return {**codecs, end: codec}


def _kept(pipeline: Pipeline, cuts: list[int], ends: list[int]) -> Mapping[int, Codec] | None:
    """Codecs of the running plan if it has the same stages, otherwise None."""
    running: Plan | None = pipeline.problem.incumbent
    if running is None or not running.codecs:
        return None
    first = pipeline.chain.blocks[0].block
    behind = first + pipeline.chain.length
    ranges = [stage.blocks for stage in running.stages if stage.blocks[0] < behind]
    if ranges != [(first + begin, first + end) for begin, end in pairwise(cuts)]:
        return None
    known = codecs_of(running)
    return {end: known[end] for end in ends} if known.keys() >= set(ends) else None


def shown(codecs: tuple[Codec, ...]) -> str:
    """Human-readable codecs: `int8` if all are equal, otherwise a list by boundary."""
    if len(set(codecs)) == 1:
        return codecs[0]
    return ", ".join(f"{number} to {number + 1} {codec}" for number, codec in enumerate(codecs))
