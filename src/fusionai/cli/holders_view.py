"""Prints a layout in which several machines hold each block, and says that jobs can't run it yet.

`cli.plan` shows it below the plan of one pipeline; `scheduling.many_holders` computes it; `dashboard.holders_chart`
draws it as SVG.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from fusionai.cli import console
from fusionai.primitives.units import format_bytes, format_seconds, format_speed
from fusionai.scheduling.coverage import Holding
from fusionai.scheduling.many_holders import ManyHolders
from fusionai.scheduling.problem.types import Plan

_WIDTH: Final = 48
"""Largest width of the picture of the blocks, in characters."""
_LINES: Final = 24
"""Most rows of the picture. A row is a group of peers with the same blocks."""
_NAMED: Final = 3


def show_holders(found: ManyHolders, chain: Plan, names: Mapping[str, str]) -> None:
    """Print the layout's throughput against the one pipeline's, who holds which blocks, and warnings."""
    layout = found.layout
    used = len({stage.peer for stage in chain.stages if "stage" in stage.roles})
    console.line()
    console.line("Estimate: several holders of each block (jobs can't run this yet)")
    console.line(
        f"Jobs run the one pipeline above: {format_speed(chain.tokens_per_s)} tokens/s on {_peers(used)}, "
        f"{format_speed(found.chain_steady_tokens_per_s)} in steady state."
    )
    console.line(
        f"With replicas, {_peers(len(layout.holdings))} would reach {format_speed(layout.tokens_per_s)} tokens/s in "
        f"steady state, {found.over_one_chain:.3g} x the pipeline's. No layout can be more than "
        f"{layout.certificate.optimality_gap:.2%} faster ({layout.certificate.method})."
    )
    console.line(
        f"A step of {chain.microbatches} microbatches would take {format_seconds(found.step_time_s)}, including "
        f"{format_seconds(found.exchange_s)} to exchange gradients (float32, uncompressed, after the last microbatch): "
        f"{format_speed(found.tokens_per_s)} tokens/s."
    )
    for line in holders_picture(found, names):
        console.line(console.printable(line))
    if layout.idle:
        console.line(f"Holding nothing: {_peers(len(layout.idle))}.")
    for warning in holders_warnings(found, chain):
        console.warning(warning)


def holders_warnings(found: ManyHolders, chain: Plan) -> Iterator[str]:
    """Yield warnings where fewer machines would be as fast or faster, or a block has a single holder."""
    alone = chain.single_peer_tokens_per_s
    if found.tokens_per_s <= chain.tokens_per_s:
        used = len({stage.peer for stage in chain.stages if "stage" in stage.roles})
        pays = found.pays_from_microbatches
        later = "" if pays is None else f" Replicas are faster from {pays:,} microbatches per step."
        yield (
            f"With {chain.microbatches} microbatches per step, one pipeline of {_peers(used)} is faster than "
            f"{_peers(len(found.layout.holdings))} with replicas: {format_speed(chain.tokens_per_s)} tokens/s instead "
            f"of {format_speed(found.tokens_per_s)}.{later}"
        )
    if alone is not None and alone >= found.tokens_per_s:
        yield (
            f"One machine alone would be faster than the replicas: {format_speed(alone)} tokens/s instead of "
            f"{format_speed(found.tokens_per_s)}."
        )
    if found.layout.least_holders == 1:
        yield f"Block {found.layout.scarcest_block} has a single holder: if that is lost, the job would have to wait."


def holders_picture(found: ManyHolders, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the picture: the blocks from left to right, with the number of holders in the first row, then one row for
    each group of peers that hold the same blocks."""
    first, length = found.first_block, len(found.holders)
    width = min(length, _WIDTH)
    cuts = [length * place // width for place in range(width + 1)]
    least = [min(found.holders[a:b]) for a, b in pairwise(cuts)]
    most = max(found.holders)
    levels = "".join(str(min(9, 10 * count // (most + 1))) for count in least)
    yield f"  [{levels}]  holders of blocks {first}-{first + length - 1}: 0 none, 9 near {most}; least {min(least)}"
    groups: dict[tuple[int, int], list[Holding]] = {}
    for held in found.layout.holdings:
        groups.setdefault(held.blocks, []).append(held)
    ranked = sorted(groups, key=lambda blocks: -sum(held.rate_per_s for held in groups[blocks]))[:_LINES]
    for blocks in sorted(ranked):
        start, end = blocks[0] - first, blocks[1] - first
        bar = "".join("#" if a < end and b > start else "." for a, b in pairwise(cuts))
        holders = groups[blocks]
        rate = sum(held.rate_per_s for held in holders)
        fullest = max(holders, key=lambda held: held.memory_bytes / held.memory_limit_bytes)
        yield (
            f"  [{bar}]  {_blocks(blocks)}: {_named(holders, names)}, {format_speed(rate)} microbatches/s, memory up "
            f"to {format_bytes(fullest.memory_bytes)} of {format_bytes(fullest.memory_limit_bytes)}"
        )
    if len(groups) > _LINES:
        rest = len(found.layout.holdings) - sum(len(groups[blocks]) for blocks in ranked)
        yield f"  and {_peers(rest)} with {len(groups) - _LINES} other intervals; --json lists all."


def _named(holders: list[Holding], names: Mapping[str, str]) -> str:
    shown = ", ".join(names.get(held.peer, held.peer) for held in holders[:_NAMED])
    more = len(holders) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _blocks(blocks: tuple[int, int]) -> str:
    return f"block {blocks[0]}" if blocks[1] - blocks[0] == 1 else f"blocks {blocks[0]}-{blocks[1] - 1}"


def _peers(count: int) -> str:
    return "1 machine" if count == 1 else f"{count:,} machines"
