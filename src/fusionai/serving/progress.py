"""What a serving engine tells whoever started it. Decides names only.

Neighbours: `serving.engine` tells, `client.serve` shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.coordination.verification import Outcome
from fusionai.scheduling.types import Plan
from fusionai.serving.interface import FaultNote


@dataclass(frozen=True, slots=True)
class StageLoading:
    """How far a machine is with its weights."""

    stage: int
    peer: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class StageLoaded:
    """`fetched_bytes`: by peer id it came from; what lay there already is not in it."""

    stage: int
    peer: str
    standby: bool
    resident_bytes: int
    fetched_bytes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """`source` sent `receiver` wrong bytes of a tensor."""

    source: str
    receiver: str
    key: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """A probe token has crossed all stages, twice with the same bits; again after each recovery."""


@dataclass(frozen=True, slots=True)
class PlanChanged:
    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nobody is there to go on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What came of a check. A task is a pass of a text through a stage; `tasks`: of all guarded stages so far."""

    stage: int
    peer: str
    referee: str
    outcome: Outcome
    reason: str
    tasks: int
    checked_tasks: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of the story; once when something is lost, once more (with the gap) when tokens flow again."""

    note: FaultNote


Progress = StageLoading | StageLoaded | SourceRefused | EngineReady | PlanChanged | Waiting | Checked | Fault
