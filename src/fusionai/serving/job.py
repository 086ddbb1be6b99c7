"""The definition of a serving job, sufficient to start its engine, and the progress events that the engine emits.

Neighbours: `client.serving.serve` builds it from a model, `serving.deployment` cuts it for a plan, `serving.engine`
runs it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fusionai.coordination.round.verification import Outcome
from fusionai.ir.schema import Graph
from fusionai.ir.serving import serving_graph
from fusionai.primitives.ids import JobId, PeerId
from fusionai.scheduling.problem.types import Plan
from fusionai.serving.interface import FaultNote
from fusionai.serving.speculating import Speculate
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire.messages import ServeOptions


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
    vocabulary: int
    context_tokens: int
    """Upper limit of prompt plus answer."""
    stop_tokens: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()
    """Names of the adapters; an adapter's number is its place here plus 1."""
    prefix_cache: bool = True
    """Must be off for layers with a window: their ring buffers belong to one session."""
    in_flight: int = 0
    """Number of passes in flight; 0: as many as there are machines with stages."""
    queue: int = 256
    """Number of generations that may wait for a place."""
    speculate: Speculate = "off"
    """Number of guesses in a pass."""
    secret: bytes = b""
    """32 bytes that no peer learns; spot checks are drawn and sketches keyed from them. Empty: no spot checks."""
    chunk_tokens: int = 256
    """Largest number of positions of a prompt in one pass."""
    tile_tokens: int | None = None
    """If set, the length of a prompt's chunks is a multiple of this, chosen by the measured times of stages. For stages
    whose bits do not depend on a chunk's length. None: every chunk is as long as possible."""
    balance_tokens: float = inf
    """Number of attended positions at which one position takes twice the operations."""


def weight_keys(graph: Graph) -> tuple[str, ...]:
    """Keys of all parameters that `graph` without its loss reads, sorted."""
    return tuple(sorted({spec.key for spec in serving_graph(graph).params.values()}))


@dataclass(frozen=True, slots=True)
class StageLoading:
    """How much of its weights a machine has loaded."""

    stage: int
    peer: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class StageLoaded:
    """`fetched_bytes`: bytes fetched, by the source's peer id; weights that the machine already had are not
    included."""

    stage: int
    peer: str
    standby: bool
    resident_bytes: int
    fetched_bytes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """`source` sent `receiver` wrong bytes for a tensor."""

    source: str
    receiver: str
    key: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """A probe has crossed all stages twice with the same bits. Sent again after each recovery."""


@dataclass(frozen=True, slots=True)
class ServingPlanChanged:
    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class ServingPaused:
    """No machine of the pool can continue the job."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRechecked:
    """Outcome of a spot check. A task is one pass of a text through a stage; `tasks` counts those of all stages with
    standbys so far."""

    stage: int
    peer: str
    verifier: str
    outcome: Outcome
    reason: str
    tasks: int
    checked_tasks: int


@dataclass(frozen=True, slots=True)
class Fault:
    """An entry of the fault log. Sent when the fault happens, and again with the gap when tokens flow again."""

    note: FaultNote


Progress = (
    StageLoading
    | StageLoaded
    | SourceRefused
    | EngineReady
    | ServingPlanChanged
    | ServingPaused
    | TextRechecked
    | Fault
)
