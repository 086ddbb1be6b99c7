"""Progress events of a serving engine. Neighbours: `serving.engine` emits them, `client.serving.serve` shows them."""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.coordination.round.verification import Outcome
from fusionai.scheduling.problem.types import Plan
from fusionai.serving.interface import FaultNote


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
    """Outcome of a spot check. A task is one pass of a text through a stage; `tasks` counts those of all guarded stages
    so far."""

    stage: int
    peer: str
    referee: str
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
