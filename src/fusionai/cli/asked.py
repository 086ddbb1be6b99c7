"""What a command asks to be planned: a task, its sizes, its wishes, over a pool on paper. Decides what the problem is.

Neighbours: `cli.plan` takes it from flags, `cli.scenario_file` from a file; `capture` gives the graph, `ir.cost` prices
it, `scheduling.planner` plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from fusionai.capture.kept import kept
from fusionai.capture.source import parse_source
from fusionai.cli import console
from fusionai.cli.pool_file import FIRST, LAST, PoolOnPaper
from fusionai.cli.pool_tables import ConstraintsTable
from fusionai.cli.serving_options import ServingOptions
from fusionai.client.serving_problem import serving_problem
from fusionai.ir.cost import block_costs
from fusionai.ir.ends import ends
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.serving import serving_graph
from fusionai.primitives.errors import UsageError
from fusionai.primitives.garbage import loading
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.scheduling.cut_bits import shared_weights
from fusionai.scheduling.ends import middle
from fusionai.scheduling.types import BlockCost, Lever, Problem, RolePlacement
from fusionai.wire.codecs import Compression

_Place = Literal["owner", "pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`batch`: rows per step; `sequence`: tokens per row."""

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
    """What a training job computes products in. In bf16 more of a model's bits depend on the cut."""
    replicas: int | Literal["auto"] = 1
    """Of a training job, whose gradients are summed at every step."""
    privacy: PrivacyLevel = "open"
    lora: int | None = None
    """Rank of an adapter that is trained in the place of the model."""

    @property
    def rows(self) -> int:
        return self.batch // self.microbatches


def problem_of(graph: Graph, pool: PoolOnPaper, asked: Asked) -> Problem:
    """What is to be planned."""
    wishes = asked.constraints
    kept = _kept(graph, pool, asked)
    # Without a word about the owner's machine, nothing can be placed there.
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
    """Blocks at both ends that stay with the job owner; 0 where the level keeps none. Raises `GraphError`."""
    if not keeps_ends(asked.privacy):
        return 0, 0
    if pool.owner is None:
        raise UsageError(
            f"--privacy {asked.privacy} keeps the model's ends on the job owner's machine, of which the pool file says "
            "nothing.",
            hint="Add a table [owner] to it, or plan with --privacy encrypted.",
        )
    training = asked.task == "train"
    return ends(
        graph if training else serving_graph(graph),
        first_layers=asked.served.first_layers,
        last_layers=asked.served.last_layers,
        training=training,
    )


def captured(model: str, asked: Asked, home: Path) -> Graph:
    """The graph of `model` (as `fusion plan` takes it) for the task. Where it was not captured before (`capture.kept`),
    the capturing framework is loaded."""
    source = parse_source(model)
    batch, sequence = (1, max(asked.rows, 2)), (1, max(asked.sequence, 2))
    options = {"batch": batch, "sequence": sequence, "task": asked.task, "lora": asked.lora}

    def anew() -> Graph:
        # Before the framework is loaded, which takes seconds.
        console.note(f"Capturing the graph of {model} with PyTorch, which takes some seconds.")
        with loading():
            from fusionai.capture.adapter import Lora
            from fusionai.capture.capture import capture

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
