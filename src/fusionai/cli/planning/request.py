"""Builds the planner's problem from a request: task, sizes, constraints and the machines of a pool.

`cli.planning.plan` fills the request from flags, `cli.planning.scenario_file` from a file. `capture` supplies the
graph, `ir.cost` its costs, and `scheduling.planner` solves the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai.capture.kept import kept
from fusionai.capture.models.source import (
    ConfigSource,
    DirectorySource,
    ModelSource,
    parse_source,
    read_config,
    stated_positions,
)
from fusionai.cli import console
from fusionai.cli.options import ServingOptions
from fusionai.cli.planning.pool_file import FIRST, LAST, ConstraintsTable, PoolOnPaper
from fusionai.client.serving.planning import can_stay_packed, serving_problem, text_needs, whole_needs
from fusionai.ir.cost import block_costs
from fusionai.ir.partition import ends
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.serving import purpose_of, serves_from_caches, serving_graph
from fusionai.ir.weights import with_stored
from fusionai.primitives.errors import PlanError, UsageError
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.primitives.process import loading
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.embedding_and_head import embedding_and_head_of, middle, owners_bytes
from fusionai.scheduling.problem.types import PeerProfile, Problem, RolePlacement, SavingMode
from fusionai.scheduling.training import replicated
from fusionai.scheduling.training.cut_bits import shared_weights
from fusionai.wire.codecs import Compression

_Place = Literal["owner", "pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A planning request. `batch`: rows per step; `sequence`: tokens per row."""

    task: Literal["train", "serve"]
    batch: int
    microbatches: int
    sequence: int
    constraints: ConstraintsTable
    takeover: Literal["exact", "tolerant"]
    served: ServingOptions
    compression: Compression = "none"
    recompute: SavingMode = "auto"
    offload: SavingMode = "auto"
    offload_weights: SavingMode = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    """Format in which a training job multiplies matrices. In bf16 more results depend on where the model is cut."""
    replicas: int | Literal["auto"] = 1
    """Replicas of a training job that sum their gradients at every step."""
    privacy: PrivacyLevel = "open"
    lora: int | None = None
    """Rank of the LoRA adapters that are trained instead of the model; None: train the model."""
    base: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """Format in which the weights that are not trained are kept, with `lora`."""

    @property
    def rows(self) -> int:
        return self.batch // self.microbatches


def problem_of(graph: Graph, pool: PoolOnPaper, asked: Asked) -> Problem:
    """Return the planner's problem for `graph`. Raises `UsageError` or `GraphError` if the request can't be met."""
    wishes = asked.constraints
    if asked.base != "fp32":
        graph = with_stored(graph, asked.base)
    kept = _kept(graph, pool, asked)
    # Nothing can be placed on the owner's machine if its profile is unknown.
    default: _Place = "pool" if pool.owner is None else "owner"
    if asked.task == "serve":
        served = serving_graph(graph)
        reads = purpose_of(served) != "generate"
        cached = not reads and serves_from_caches(served)
        needs = asked.served.needs(None, cached and can_stay_packed(graph, pool.peers))
        problem = serving_problem(
            served,
            pool.peers,
            pool.owner,
            needs if cached else text_needs(needs, served) if reads else whole_needs(needs, graph.name),
            ends="pool" if pool.owner is None else asked.served.ends,
            takeover=asked.takeover,
            kept=kept,
        )
        roles = tuple(
            msgspec.structs.replace(role, place=_wished(wishes, role.role) or role.place) for role in problem.roles
        )
    else:
        _check_sequence(asked, graph.symbols["s"][1] if "s" in graph.symbols else None)
        sizes = {"b": asked.rows, "s": asked.sequence}
        symbols = {name: sizes[name] for name in graph.symbols}
        roles = tuple(RolePlacement(role=role, place=_wished(wishes, role) or default) for role in ("feed", "loss"))
        peers, owner = pool.at(asked.precision)
        problem = Problem(
            graph_hash=content_hash(graph),
            blocks=block_costs(graph, symbols, training=True, copies=asked.precision == "bf16"),
            peers=peers,
            owner=owner,
            kept_first=kept[0],
            kept_last=kept[1],
            microbatches=asked.microbatches,
            microbatch_tokens=asked.rows * asked.sequence,
            takeover=asked.takeover,
            precision=asked.precision,
            compression=asked.compression,
            recompute=asked.recompute,
            offload=asked.offload,
            offload_weights=asked.offload_weights,
            replicas=asked.replicas,
            shared_weights=shared_weights(graph, asked.microbatches, half_floats=asked.precision == "bf16"),
        )
    problem = msgspec.structs.replace(problem, roles=roles)
    pools = middle(problem)
    names = {FIRST: pools[0].block, LAST: pools[-1].block}
    return msgspec.structs.replace(
        problem,
        pinned={names[block] if block in names else int(block): peer for block, peer in wishes.pinned.items()},
        stages=wishes.stages,
        links=dict(pool.links),
        required=wishes.required,
        excluded=wishes.excluded,
        spares_wanted=wishes.spares,
    )


def _kept(graph: Graph, pool: PoolOnPaper, asked: Asked) -> tuple[int, int]:
    """Return the numbers of first and last blocks that stay with the job owner, 0 if the level keeps none. Raises
    `UsageError` if the owner's machine is not described, `GraphError` if the graph has no such ends."""
    if not keeps_ends(asked.privacy):
        return 0, 0
    if pool.owner is None:
        raise UsageError(
            f"--privacy {asked.privacy} keeps embedding and head on the job owner's machine, but the pool file "
            "does not describe that machine.",
            hint="Add an [owner] table to the pool file, or plan with --privacy encrypted.",
        )
    training = asked.task == "train"
    return ends(
        graph if training else serving_graph(graph),
        first_layers=asked.served.first_layers,
        last_layers=asked.served.last_layers,
        training=training,
    )


def captured(model: str, asked: Asked, home: Path) -> Graph:
    """Return the graph of `model` (named as for `fusion plan`) for the task. If no captured graph is cached
    (`capture.kept`), this imports PyTorch and captures the model. Raises `UsageError` for a context or
    rows that are longer than the model's positions."""
    source = parse_source(model)
    positions = _positions(source)
    if asked.task == "serve":
        asked.served.needs(positions)
    else:
        _check_sequence(asked, positions)
    batch, sequence = (1, max(asked.rows, 2)), (1, max(asked.sequence, 2))
    options = {"batch": batch, "sequence": sequence, "task": asked.task, "lora": asked.lora}

    def anew() -> Graph:
        # Printed before PyTorch is imported, which takes seconds.
        console.note(f"Capturing the graph of {model} with PyTorch; this takes some seconds.")
        with loading():
            from fusionai.capture.capture import capture
            from fusionai.capture.models.adapter import Lora
            from fusionai.capture.served import capture_served

        if asked.task == "serve":
            return capture_served(source).graph
        return capture(
            source,
            batch=batch,
            sequence=sequence,
            adapter=None if asked.lora is None else Lora(asked.lora, 2.0 * asked.lora),
        ).graph

    return kept(home / "graphs", source, options, anew)


def _check_sequence(asked: Asked, positions: int | None) -> None:
    """Raise `UsageError` if rows are longer than the model's positions, None: not limited. Training refuses them."""
    if positions is not None and asked.sequence > positions:
        raise UsageError(
            f"--sequence: expected at most {positions}, the model's positions, got {asked.sequence}.",
            hint="Plan with shorter rows, or raise max_position_embeddings of a new model.",
        )


def _positions(source: ModelSource) -> int | None:
    """Return the longest text of a model whose configuration is on this machine; None: not limited, or not known
    before the model is built."""
    match source:
        case ConfigSource(config=config):
            pass
        case DirectorySource(path=path):
            config = read_config(path / "config.json")
        case _:
            return None
    return None if config.get("is_encoder_decoder") else stated_positions(config)


def _wished(wishes: ConstraintsTable, role: str) -> _Place | None:
    return wishes.feed if role == "feed" else wishes.loss


MOST_COPIES: Final = 32
"""Most copies of a machine that are tried with the planner (chosen). Beyond, only a lower bound is given."""
MOST_TIMES: Final = 64
"""Largest multiple of the lent memory that is tried (chosen)."""
HALVINGS: Final = 4
"""Bisection steps that refine the multiple of memory (chosen)."""
MOST_TRIED_PEERS: Final = 128
"""Largest pool for which changes are tried (chosen). In larger ones the planner takes too long to be run repeatedly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change to try. `problem` is called when it is tried, because some changes need a new graph; it returns None if
    the changed problem can't be built."""

    words: str
    problem: Callable[[], Problem | None]


def what_would_fit(problem: Problem, others: Sequence[Change] = ()) -> list[str]:
    """Return descriptions of the changes that give a plan. `others`: changes to try besides those made here."""
    if len(problem.peers) > MOST_TRIED_PEERS:
        return []
    found: list[str] = []
    for change in (*lifted(problem), *others):
        if _tried(change):
            found.append(change.words)
    # More machines or memory are tried only if no other change helps.
    found = found or list(_more_machines(problem)) or list(_more_memory(problem))
    return [*found, *(change.words for change in with_owners(problem) if _tried(change))]


def lifted(problem: Problem) -> Iterator[Change]:
    """Yield changes that lift one of the user's constraints."""
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
        yield _change("with embedding and head in the pool", problem, roles=roles)


def with_owners(problem: Problem) -> Iterator[Change]:
    """Yield the change that also lends the job owner's machine, with the memory that its own part leaves free."""
    owner = problem.owner
    if owner is None or not owner.flops_per_s > 0 or any(peer.peer == owner.peer for peer in problem.peers):
        return
    words = "with this machine lent to the pool as well (`fusion join`)"
    own = msgspec.structs.replace(owner, roles=("stage",))
    if problem.task == "train" and embedding_and_head_of(problem).first:
        # The owner's part is a separate stage from those that a member on the same machine would hold.
        free = max(0, owner.memory_bytes - ceil(owners_bytes(problem)))
        own = msgspec.structs.replace(own, peer=f"{owner.peer} (lent)", memory_bytes=free)
    yield _change(words, problem, peers=(*problem.peers, own))


def _more_machines(problem: Problem) -> Iterator[str]:
    """Yield how many more machines like the largest are needed. Starts at the number that memory alone requires,
    doubles until a plan exists, then bisects."""
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
    while not _plans(grown(problem, largest, count)):
        low, count = count, 2 * count
        if count > MOST_COPIES:
            return
    while count - low > 1:
        middle = (low + count) // 2
        if _plans(grown(problem, largest, middle)):
            count = middle
        else:
            low = middle
    yield f"with {count} more {'machine' if count == 1 else 'machines'} {machines}"


def _more_memory(problem: Problem) -> Iterator[str]:
    """Yield how many times as much memory all peers would have to lend. Used if not even one block fits."""
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


def grown(problem: Problem, largest: PeerProfile, count: int) -> Problem:
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
