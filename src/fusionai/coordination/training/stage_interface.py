"""Events that the machine of a training stage takes, and commands that it gives.

Neighbours: `stage` is the machine; `execution.training.runtime`, the simulator and the tests' virtual world feed it
events and perform its commands.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from fusionai.wire.messages import CommitRecord, Fence, Mode

Source = Literal["keep", "initialise", "import", "snapshot"]
"""Where a stage's state comes from at a resume."""


class StageWork(Struct, frozen=True):
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


class Attached(Struct, frozen=True):
    """`retain`: keep sent tensors for a neighbour's replay. `snapshot_every`: 0 if the stage has no standby."""

    fence: Fence
    retain: bool = False
    snapshot_every: int = 0


class Resumed(Struct, frozen=True):
    """See `wire.messages.Resume`."""

    committed: int
    source: Source
    base: int
    records: tuple[CommitRecord, ...] = ()
    replaying: frozenset[int] = frozenset()
    snapshot: bool = False
    watermark: int = 0


class StateArrived(Struct, frozen=True):
    """A complete state taken after `step` steps (imported, or from a snapshot) is in place."""

    step: int


class ForwardArrived(Struct, frozen=True):
    mode: Mode
    step: int
    microbatch: int
    producer: int


class BackwardArrived(Struct, frozen=True):
    step: int
    microbatch: int
    consumer: int


class SharedArrived(Struct, frozen=True):
    step: int
    sender: int
    phase: Literal["partial", "total"]


class Committed(Struct, frozen=True):
    """`save`: stream the resulting state before going on."""

    record: CommitRecord
    watermark: int
    save: bool = False


class OuterUpdateArrived(Struct, frozen=True):
    """The outer update after this step has arrived completely."""

    step: int


class ExportAsked(Struct, frozen=True):
    step: int


class WorkDone(Struct, frozen=True):
    """`missing`: after `initialise`, entries without an initialisation rule are still to be imported."""

    work: StageWork
    missing: bool = False


class WorkFailed(Struct, frozen=True):
    """A piece of work failed, and the driver has been informed. The stage can continue only after another attach."""

    work: StageWork


class Detached(Struct, frozen=True):
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


class Compute(Struct, frozen=True):
    """Run this work now; at most one piece is under way. Answer with `WorkDone`."""

    work: StageWork


class ReportStatus(Struct, frozen=True):
    """`retained_from`: first step whose sent tensors are still retained, up to the applied steps."""

    applied: int
    prepared: int
    retained_from: int


class ReportReady(Struct, frozen=True):
    applied: int


class ReportPrepared(Struct, frozen=True):
    step: int


class ReportApplied(Struct, frozen=True):
    step: int


class DropSums(Struct, frozen=True):
    """Forget contexts and partial gradient sums."""


class DropRetained(Struct, frozen=True):
    """Drop retained boundary tensors of steps below `watermark`."""

    watermark: int


class DropHeld(Struct, frozen=True):
    """Drop received but unused tensors: those of steps before `below`, or all, because their fence is over."""

    below: int | None = None


class SendRetained(Struct, frozen=True):
    """Stream the tensors that were sent in steps `first` to `below` - 1 to these neighbours again, in step order."""

    to: frozenset[int]
    first: int
    below: int


class LoadSnapshot(Struct, frozen=True):
    """Load the state from this machine's snapshot of `step` once it is complete; answer `StateArrived`."""

    step: int


class TakeSnapshot(Struct, frozen=True):
    """Send the present state, of `step`, to the standby, in parallel with other work. A later apply must not change
    what is sent."""

    step: int


class Refuse(Struct, frozen=True):
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
