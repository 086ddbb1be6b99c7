"""Builds the planner's problem from a request: task, sizes, constraints and the machines of a pool.

`cli.plan` fills the request from flags, `cli.scenario_file` from a file. `capture` supplies the graph, `ir.cost` its
costs, and `scheduling.planner` solves the problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from fusionai.capture.kept import kept
from fusionai.capture.models.source import parse_source
from fusionai.cli import console
from fusionai.cli.pool_file import FIRST, LAST, PoolOnPaper
from fusionai.cli.pool_tables import ConstraintsTable
from fusionai.cli.serving_options import ServingOptions
from fusionai.client.serving.problem import serving_problem
from fusionai.ir.cost import block_costs
from fusionai.ir.partition import ends
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.serving import serving_graph
from fusionai.primitives.errors import UsageError
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.primitives.process import loading
from fusionai.scheduling.problem.embedding_and_head import middle
from fusionai.scheduling.problem.types import BlockCost, Lever, Problem, RolePlacement
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
    recompute: Lever = "auto"
    offload: Lever = "auto"
    offload_weights: Lever = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    """Format in which a training job multiplies matrices. In bf16 more results depend on where the model is cut."""
    replicas: int | Literal["auto"] = 1
    """Replicas of a training job that sum their gradients at every step."""
    privacy: PrivacyLevel = "open"
    lora: int | None = None
    """Rank of the LoRA adapters that are trained instead of the model; None: train the model."""

    @property
    def rows(self) -> int:
        return self.batch // self.microbatches


def problem_of(graph: Graph, pool: PoolOnPaper, asked: Asked) -> Problem:
    """Return the planner's problem for `graph`. Raises `UsageError` or `GraphError` if the request can't be met."""
    wishes = asked.constraints
    kept = _kept(graph, pool, asked)
    # Nothing can be placed on the owner's machine if its profile is unknown.
    default: _Place = "pool" if pool.owner is None else "owner"
    if asked.task == "serve":
        problem = serving_problem(
            serving_graph(graph),
            pool.peers,
            pool.owner,
            asked.served.needs(None),
            ends="pool" if pool.owner is None else asked.served.ends,
            takeover=asked.takeover,
            kept=kept,
        )
        roles = tuple(
            msgspec.structs.replace(role, place=_wished(wishes, role.role) or role.place) for role in problem.roles
        )
    else:
        sizes = {"b": asked.rows, "s": asked.sequence}
        symbols = {name: sizes[name] for name in graph.symbols}
        costs = block_costs(graph, symbols, training=True)
        roles = tuple(RolePlacement(role=role, place=_wished(wishes, role) or default) for role in ("feed", "loss"))
        problem = Problem(
            graph_hash=content_hash(graph),
            blocks=tuple(BlockCost(**msgspec.structs.asdict(cost)) for cost in costs),
            peers=pool.peers,
            owner=pool.owner,
            kept_first=kept[0],
            kept_last=kept[1],
            microbatches=asked.microbatches,
            microbatch_tokens=asked.rows * asked.sequence,
            takeover=asked.takeover,
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
    """Return the numbers of first and last blocks that stay with the job owner, 0 if the level keeps none.

    Raises `UsageError` if the owner's machine is not described, `GraphError` if the graph has no such ends."""
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
    (`capture.kept`), this imports PyTorch and captures the model."""
    source = parse_source(model)
    batch, sequence = (1, max(asked.rows, 2)), (1, max(asked.sequence, 2))
    options = {"batch": batch, "sequence": sequence, "task": asked.task, "lora": asked.lora}

    def anew() -> Graph:
        # Printed before PyTorch is imported, which takes seconds.
        console.note(f"Capturing the graph of {model} with PyTorch; this takes some seconds.")
        with loading():
            from fusionai.capture.capture import capture
            from fusionai.capture.models.adapter import Lora

        return capture(
            source,
            batch=batch,
            sequence=sequence,
            train=asked.task == "train",
            adapter=None if asked.lora is None else Lora(asked.lora, 2.0 * asked.lora),
        ).graph

    return kept(home / "graphs", source, options, anew)


def _wished(wishes: ConstraintsTable, role: str) -> _Place | None:
    return wishes.feed if role == "feed" else wishes.loss
