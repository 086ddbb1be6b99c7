"""Events that the machine of a training stage takes, and commands that it gives.

Neighbours: `stage` is the machine; `execution.training.runtime`, the simulator and the tests' virtual world feed it
events and perform its commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusionai.wire.messages import CommitRecord, Fence, Mode

Source = Literal["keep", "initialise", "import", "snapshot"]
"""Where a stage's state comes from at a resume."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """One piece of work for the compute thread. `record` only for `apply`. `difference`: send this stage's
    pseudo-gradient, how far its parameters have changed since the last outer update. `adopt`: adopt an outer update."""

    kind: Literal[
        "initialise",
        "forward",
        "backward",
        "weights",
        "share",
        "total",
        "norms",
        "apply",
        "difference",
        "adopt",
        "export",
    ]
    step: int = 0
    microbatch: int = 0
    mode: Mode = "train"
    record: CommitRecord | None = None


# ------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Attached:
    """`retain`: keep sent tensors for a neighbour's replay. `snapshot_every`: 0 if the stage has no standby."""

    fence: Fence
    retain: bool = False
    snapshot_every: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """See `wire.messages.Resume`."""

    committed: int
    source: Source
    base: int
    records: tuple[CommitRecord, ...] = ()
    replaying: frozenset[int] = frozenset()
    snapshot: bool = False
    watermark: int = 0


@dataclass(frozen=True, slots=True)
class StateArrived:
    """A complete state taken after `step` steps (imported, or from a snapshot) is in place."""

    step: int


@dataclass(frozen=True, slots=True)
class ForwardArrived:
    mode: Mode
    step: int
    microbatch: int
    producer: int


@dataclass(frozen=True, slots=True)
class BackwardArrived:
    step: int
    microbatch: int
    consumer: int


@dataclass(frozen=True, slots=True)
class SharedArrived:
    step: int
    sender: int
    phase: Literal["partial", "total"]


@dataclass(frozen=True, slots=True)
class Committed:
    """`save`: stream the resulting state before going on."""

    record: CommitRecord
    watermark: int
    save: bool = False


@dataclass(frozen=True, slots=True)
class OuterUpdateArrived:
    """The outer update after this step has arrived completely."""

    step: int


@dataclass(frozen=True, slots=True)
class ExportAsked:
    step: int


@dataclass(frozen=True, slots=True)
class WorkDone:
    """`missing`: after `initialise`, entries without an initialisation rule are still to be imported."""

    work: StageWork
    missing: bool = False


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """A piece of work failed, and the driver has been informed. The stage can continue only after another attach."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class Detached:
    reason: str


StageEvent = (
    Attached
    | Resumed
    | StateArrived
    | ForwardArrived
    | BackwardArrived
    | SharedArrived
    | Committed
    | OuterUpdateArrived
    | ExportAsked
    | WorkDone
    | WorkFailed
    | Detached
)

# ----------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Compute:
    """Run this work now; at most one piece is under way. Answer with `WorkDone`."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class ReportStatus:
    """`retained_from`: first step whose sent tensors are still retained, up to the applied steps."""

    applied: int
    prepared: int
    retained_from: int


@dataclass(frozen=True, slots=True)
class ReportReady:
    applied: int


@dataclass(frozen=True, slots=True)
class ReportPrepared:
    step: int


@dataclass(frozen=True, slots=True)
class ReportApplied:
    step: int


@dataclass(frozen=True, slots=True)
class DropSums:
    """Forget contexts and partial gradient sums."""


@dataclass(frozen=True, slots=True)
class DropRetained:
    """Drop retained boundary tensors of steps below `watermark`."""

    watermark: int


@dataclass(frozen=True, slots=True)
class DropHeld:
    """Drop received but unused tensors: those of steps before `below`, or all, because their fence is over."""

    below: int | None = None


@dataclass(frozen=True, slots=True)
class SendRetained:
    """Stream the tensors that were sent in steps `first` to `below` - 1 to these neighbours again, in step order."""

    to: frozenset[int]
    first: int
    below: int


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Load the state from this machine's snapshot of `step` once it is complete; answer `StateArrived`."""

    step: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Send the present state, of `step`, to the standby, in parallel with other work. A later apply must not change
    what is sent."""

    step: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Report to the driver that an event can't be obeyed."""

    reason: str


StageCommand = (
    Compute
    | ReportStatus
    | ReportReady
    | ReportPrepared
    | ReportApplied
    | DropSums
    | DropRetained
    | DropHeld
    | SendRetained
    | LoadSnapshot
    | TakeSnapshot
    | Refuse
)
