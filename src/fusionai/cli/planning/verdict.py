"""The verdict with which `fusion plan` begins: what fits, how fast, and which change of pool or flags would help most.

A change is named only if the planner made a faster plan with it. `cli.planning.request` makes the changed problems,
`cli.planning.view` prints the sentences about speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from fusionai.cli import console
from fusionai.cli.planning.pool_file import PoolOnPaper
from fusionai.cli.planning.request import Asked, Change, grown, lifted, problem_of, with_owners
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import PlanError, UsageError
from fusionai.primitives.units import format_speed
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.embedding_and_head import owners_part
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem
from fusionai.scheduling.training import replicated

WORTH: Final = 1.05
"""Least speed-up that is named (chosen)."""
MOST_NAMED: Final = 4
MOST_PEERS: Final = 24
"""Largest pool for which changes are tried (chosen): each is a plan of its own."""


@dataclass(frozen=True, slots=True)
class Help:
    """A change that gives a faster plan. `times`: its speed over that of the plan as requested."""

    words: str
    tokens_per_s: float
    times: float


def what_would_help(found: Plan, problem: Problem, graph: Graph, pool: PoolOnPaper, asked: Asked) -> tuple[Help, ...]:
    """Return the changes that make the plan faster, the best one first, and of several formats of weights the best."""
    if len(problem.peers) > MOST_PEERS:
        return ()
    formats = _best(found, _weights(graph, pool, asked))
    others = _best(found, [*_changes(found, problem, graph, pool, asked)])
    ranked = sorted([*formats[:1], *others], key=lambda one: -one.times)
    return tuple(ranked[:MOST_NAMED])


def show_help(helps: Iterable[Help], units: str) -> None:
    """Print the changes. `units`: what the speeds count."""
    lines = [f"  {one.words}: {format_speed(one.tokens_per_s)} {units}/s ({one.times:.2g} x)" for one in helps]
    if lines:
        console.line("Would be faster (each was planned):")
    for text in lines:
        console.line(console.printable(text))


def _best(found: Plan, changes: Iterable[Change]) -> list[Help]:
    helps = [one for change in changes if (one := _help(found, change)) is not None]
    return sorted(helps, key=lambda one: -one.times)


def _help(found: Plan, change: Change) -> Help | None:
    try:
        changed = change.problem()
        speed = 0.0 if changed is None else replicated.plan(changed).tokens_per_s
    except (PlanError, UsageError):  # the change does not fit this model or pool
        return None
    times = speed / found.tokens_per_s
    return Help(change.words, speed, times) if times >= WORTH else None


def _weights(graph: Graph, pool: PoolOnPaper, asked: Asked) -> Iterator[Change]:
    if asked.task != "serve" or asked.served.weights == "int4":
        return
    for weights in ("int4", "int8", "bf16"):
        smaller = replace(asked, served=replace(asked.served, weights=weights))
        loss = "" if weights == "bf16" else "; answers differ slightly"
        yield _asking(f"--weights {weights}{loss}", graph, pool, smaller)


def _changes(found: Plan, problem: Problem, graph: Graph, pool: PoolOnPaper, asked: Asked) -> Iterator[Change]:
    if asked.task == "serve" and owners_part(found) is not None and asked.served.asked is None:
        freed = replace(asked, privacy="encrypted", served=replace(asked.served, ends="pool", privacy="encrypted"))
        yield _asking("--ends pool; embedding and head, and so all texts, are on peers", graph, pool, freed)
    if asked.task == "train":
        if asked.batch % (2 * asked.microbatches) == 0:
            more = replace(asked, microbatches=2 * asked.microbatches)
            yield _asking(f"--microbatches {more.microbatches}", graph, pool, more)
        if asked.precision == "fp32":
            yield _asking("--precision bf16; results differ slightly", graph, pool, replace(asked, precision="bf16"))
        if asked.lora is not None and asked.base == "fp32":
            yield _asking("--base int4; results differ slightly", graph, pool, replace(asked, base="int4"))
        if asked.replicas == 1 and asked.constraints.stages is None:
            several = replace(asked, replicas="auto")
            yield _asking("--replicas auto", graph, pool, several)
    yield from (change for change in lifted(problem) if "--privacy" not in change.words)
    yield from with_owners(problem)
    usable = [peer for peer in problem.peers if peer.flops_per_s > 0 and "stage" in peer.roles]
    if usable and problem.stages is None:
        largest = max(usable, key=lambda peer: (peer.memory_bytes, peer.flops_per_s, peer.peer))
        words = f"one more machine like {largest.name or largest.peer}"
        yield Change(words=words, problem=lambda: grown(problem, largest, 1))
    yield Change(words="twice the upload speed everywhere", problem=lambda: _faster_lines(problem))


def _asking(words: str, graph: Graph, pool: PoolOnPaper, asked: Asked) -> Change:
    return Change(words=words, problem=lambda: paced(problem_of(graph, pool, asked)))


def _faster_lines(problem: Problem) -> Problem | None:
    """Return the problem with twice the uplinks, None if links were measured between pairs."""
    if problem.links:
        return None
    owner = None if problem.owner is None else _twice(problem.owner)
    return msgspec.structs.replace(problem, peers=tuple(map(_twice, problem.peers)), owner=owner)


def _twice(peer: PeerProfile) -> PeerProfile:
    bandwidth_bytes_per_s = 2 * peer.uplink.bandwidth_bytes_per_s
    uplink = msgspec.structs.replace(peer.uplink, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return msgspec.structs.replace(peer, uplink=uplink)
