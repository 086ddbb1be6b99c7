"""The definition of a serving job, sufficient to start its engine; its cut for a plan; the engine's progress events.

A cut follows from the plan's block ranges and is kept as long as they don't change: graphs, boundaries and weights of
each stage. Neighbours: `client.serving.serve` builds the job from a model, `execution.connections` is a plan with
tickets and addresses, `serving.engine` runs the job."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import msgspec
from msgspec import Struct

from fusionai.coordination.round.verification import Outcome
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import Output
from fusionai.execution.serving.boundary import ServingBoundary, serving_boundaries
from fusionai.execution.serving.stage import keeps_positions, needs_segments
from fusionai.ir import schema
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph
from fusionai.ir.serving import ATTENTION, TOKEN_TYPES, Purpose, serving_graph
from fusionai.ir.states import carries
from fusionai.primitives.errors import PlanError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import Plan
from fusionai.serving.interface import FaultNote
from fusionai.serving.pooling import MEAN, Pooling
from fusionai.serving.speculating import Speculate
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire.messages import ServeOptions, WeightSpec
from fusionai.wire.serving import StateOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """`graph`: the captured graph with its loss, which the engine removes. Block numbers in plans refer to this
    graph."""

    job: JobId
    owner: PeerId
    model: str
    """The model's name, for people."""
    graph: Graph
    options: ServeOptions
    weights: ModelWeights
    """Has every `ParamSpec.key` that the graph without its loss reads (`weight_keys`)."""
    purpose: Purpose = "generate"
    vocabulary: int
    context_tokens: int
    """Upper limit of prompt plus answer, or of a text."""
    stop_tokens: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()
    """Names of the adapters; an adapter's number is its place here plus 1."""
    prefix_cache: bool = True
    """Whether texts begin with what the stages have of earlier texts with the same beginning."""
    in_flight: int = 0
    """Number of passes in flight; 0: as many as there are machines with stages."""
    queue: int = 256
    """Number of generations that may wait for a place."""
    pooling: Pooling = MEAN
    """How vectors of texts are made."""
    speculate: Speculate = "off"
    """Number of guesses in a pass."""
    states: StateOutput = "hidden"
    """Output that a head reads to guess tokens, if one does."""
    state_size: int = 0
    """Numbers per position of that output; 0: not known."""
    secret: bytes = b""
    """32 bytes that no peer learns; spot checks are drawn and sketches keyed from them. Empty: no spot checks."""
    chunk_tokens: int = 256
    """Largest number of positions of a prompt in one pass."""
    tile_tokens: int | None = None
    """If set, the length of a prompt's chunks is a multiple of this, chosen by the measured times of stages. For stages
    whose bits do not depend on a chunk's length. None: every chunk is as long as possible."""
    balance_tokens: float = inf
    """Number of attended positions at which one position takes twice the operations."""

    @property
    def carries_states(self) -> bool:
        """Whether stages keep states, which can't go back to any position: a text then has one pass under way at a
        time, and no guesses."""
        return self._has_caches and carries(self.graph)

    @property
    def has_windows(self) -> bool:
        """Whether stages keep the last positions of a session in rings, for attention with a window that texts can
        outgrow."""
        longest = self.options.pages * self.options.page_tokens
        windows = [node.kwargs.get("window") for node in self.graph.nodes if node.op == ATTENTION]
        return self._has_caches and any(isinstance(one, int) and one < longest for one in windows)

    @property
    def takes_types(self) -> bool:
        """Whether the first stage takes the types of tokens, which say what belongs to the second of two texts."""
        return TOKEN_TYPES in self.graph.inputs

    @property
    def output(self) -> Output:
        """What the last stage gives to probes."""
        return "hidden" if self.purpose == "embed" else "logits"

    @property
    def _has_caches(self) -> bool:
        return not (self.options.whole or self.options.at_once)


def weight_keys(graph: Graph) -> tuple[str, ...]:
    """Keys of all parameters that `graph` without its loss reads, sorted."""
    return tuple(sorted({spec.key for spec in serving_graph(graph).params.values()}))


class StageLoading(Struct, frozen=True):
    """How much of its weights a machine has loaded."""

    stage: int
    peer: str
    done_bytes: int
    total_bytes: int


class WeightsLoaded(Struct, frozen=True):
    """`fetched_bytes`: bytes fetched, by the source's peer id; weights that the machine already had are not
    included."""

    stage: int
    peer: str
    standby: bool
    resident_bytes: int
    fetched_bytes: tuple[tuple[str, int], ...]


class SourceRefused(Struct, frozen=True):
    """`source` sent `receiver` wrong bytes for a tensor."""

    source: str
    receiver: str
    key: str


class EngineReady(Struct, frozen=True):
    """A probe has crossed all stages twice with the same bits. Sent again after each recovery."""


class ServingPlanChanged(Struct, frozen=True):
    plan: Plan
    reason: str


class ServingPaused(Struct, frozen=True):
    """No machine of the pool can continue the job."""

    reason: str


class TextRechecked(Struct, frozen=True, kw_only=True):
    """Outcome of a spot check. A task is one pass of a text through a stage; `tasks` counts those of all stages with
    standbys so far. `partners`: peers that contradict the checked one. `text_tokens`: positions of the text that were
    computed."""

    stage: int
    peer: str
    verifier: str
    outcome: Outcome
    reason: str
    tasks: int
    checked_tasks: int
    partners: tuple[str, ...] = ()
    text_tokens: int = 0


class Fault(Struct, frozen=True):
    """An entry of the fault log. Sent when the fault happens, and again with the gap when tokens flow again."""

    note: FaultNote


Progress = (
    StageLoading
    | WeightsLoaded
    | SourceRefused
    | EngineReady
    | ServingPlanChanged
    | ServingPaused
    | TextRechecked
    | Fault
)


CHOICES: Final = frozenset({"aten.topk.default", "aten.sort.default"})
"""Operators after which a rounding difference can change more than the last bits."""


@dataclass(frozen=True, slots=True)
class ServedCutStage:
    """One stage of a cut. `encoded`: its graph as sent over the wire, with hash `graph_hash`. `select`: no later stage
    has attention or needs to know which session a row belongs to, so only wanted rows are sent on."""

    encoded: HostTensor
    graph_hash: str
    boundary: ServingBoundary
    caches: bool
    select: bool
    weights: tuple[WeightSpec, ...]
    chooses: bool
    """True if values decide what is computed, as a router's values decide which expert computes a row."""


@dataclass(frozen=True, slots=True)
class ServedCut:
    """A model divided into stages. `name` is a hash of the stages' graphs."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    stages: tuple[ServedCutStage, ...]

    @property
    def checkable(self) -> frozenset[int]:
        """Stages that can be spot-checked: their inputs are retained by the stage before (or come from the driver), and
        their outputs go to another stage. After a selection of rows nothing is retained, and only the driver gets the
        last stage's outputs. A first stage that takes types of tokens can't be checked from the tokens alone."""
        return frozenset(
            number
            for number in range(len(self.stages) - 1)
            if (not self.stages[number - 1].select if number else len(self.stages[0].boundary.receives) == 1)
        )

    def roles(self, plan: Plan, owner: PeerId) -> ServingRoles:
        """The state machine's view of `plan`, whose block ranges are this cut's."""
        return ServingRoles(
            version=plan.version,
            owner=owner,
            places={placement.stage: placement.peer for placement in plan.stages},
            standbys={standby.stage: standby.peer for standby in plan.standbys},
            beside=plan.standbys_beside,
            caching=frozenset(number for number, stage in enumerate(self.stages) if stage.caches),
            checkable=self.checkable,
            partition=self.name,
            predicted_s={placement.stage: placement.compute_s for placement in plan.stages},
        )


def with_weights(whole: ServedCut, weights: ModelWeights) -> ServedCut:
    """Return the cut with the present values of `weights`."""
    specs = {spec.key: spec for spec in weights.specs}
    stages = tuple(replace(stage, weights=tuple(specs[one.key] for one in stage.weights)) for stage in whole.stages)
    return replace(whole, stages=stages)


def ranges_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    return tuple(placement.blocks for placement in plan.stages)


def cut(job: ServingJob, plan: Plan) -> ServedCut:
    """Cut the job's graph by the plan's ranges. Raises `GraphError` or `PlanError` if they are no valid cut of it."""
    ranges = ranges_of(plan)
    whole = serving_graph(job.graph)
    partition = cut_blocks(whole, ranges)
    boundaries = serving_boundaries(partition)
    if not {*whole.outputs} <= {*boundaries[-1].outputs} or any(boundary.outputs for boundary in boundaries[:-1]):
        raise PlanError(f"{' and '.join(whole.outputs)} must be outputs of the last stage, and of no other.")
    specs = {spec.key: spec for spec in job.weights.specs}
    placed = [needs_segments(stage.graph, job.options) for stage in partition.stages]
    stages: list[ServedCutStage] = []
    for stage, boundary in zip(partition.stages, boundaries, strict=True):
        encoded = schema.encode(stage.graph)
        keys = sorted({spec.key for spec in stage.graph.params.values()})
        if lacking := [key for key in keys if key not in specs]:
            raise PlanError(
                f"the list of weights lacks {len(lacking)} entries of stage {stage.stage}, such as {lacking[0]}."
            )
        stages.append(
            ServedCutStage(
                encoded=host_tensor("uint8", (len(encoded),), encoded),
                graph_hash=schema.content_hash(stage.graph),
                boundary=boundary,
                caches=keeps_positions(stage.graph, job.options),
                select=not any(placed[stage.stage + 1 :]),
                weights=tuple(specs[key] for key in keys),
                chooses=any(node.op in CHOICES for node in stage.graph.nodes),
            )
        )
    digest = hashlib.sha256(msgspec.msgpack.encode([stage.graph_hash for stage in stages]))
    return ServedCut(digest.hexdigest(), ranges, tuple(stages))
