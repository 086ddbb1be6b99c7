"""Messages of a training job between its driver and its stages, and between neighbouring stages.

`coordination.training` takes these messages as events and returns them as commands; `execution.training` runs the
stages.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import (
    Blob,
    Count,
    Fence,
    Index,
    Job,
    Mode,
    Name,
    Peer,
    Seconds,
    Secret,
    StepIndex,
    TensorHeader,
    Text,
    WireMessage,
)
from fusionai.wire.codecs import Codec, Exchanged, PackedTensor


class OptimizerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Optimizer of a job. Learning rates come with each commit."""

    kind: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_vectors: bool = False
    """Whether weight decay also touches parameters of rank below two (norms, biases)."""
    momentum: float = 0.0
    nesterov: bool = False
    state_bits: Literal[8, 32] = 32
    """Bits per value of AdamW's moments. 8 needs a quarter of the memory of 32: blocks of 256 values, each with one
    scale."""
    anchored: bool = False
    """Local updates: the optimizer state also contains the last agreed parameters, the outer momentum and the packing
    error of the last pseudo-gradient."""
    overlapped: bool = False
    """Local updates that train on during an exchange: the state also contains the parameters at which the last
    difference was taken."""


Saving = Literal["recompute", "offload", "offload_weights"]
"""Memory-saving modes of a stage, named as in `StageOptions`."""


class StageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a stage runs, the same for all stages of a job."""

    seed: Count = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16`: matrix products in bfloat16 by autocast, parameters and reductions in float32."""
    optimizer: OptimizerSpec | None = None
    microbatches: Count = 1
    in_flight: Count = 1
    """Microbatches this stage may have forwarded and not yet sent back (its credit)."""
    weight_lag: Count = 0
    """Microbatches whose weight gradients a stage may postpone to moments when it would otherwise wait (zero
    bubble)."""
    recompute: bool = False
    """The stage keeps only the inputs of its blocks and runs each block again in backward. Same bits, less memory."""
    offload: bool = False
    """Optimizer state lies in a file between updates. Each update reads and writes it piece by piece. Same bits."""
    offload_weights: bool = False
    """Weights lie in a file (next to an accelerator: in host memory) and are read block by block, in forward and in
    backward. Same bits. Requires `recompute`."""
    takeover: Literal["exact", "any", "tolerant"] = "exact"
    codecs: Annotated[tuple[Codec, ...], Meta(max_length=1024)] = ()
    """Codec of each boundary, in both directions: first entry for the inputs of the second stage, next for the third,
    and so on. Empty: nothing is packed."""
    sync_every: Count = 0
    """Local updates: steps between two exchanges with other jobs that train the same model; 0: no exchanges."""
    sync_codec: Exchanged = "none"
    """Codec of pseudo-gradients and outer updates."""
    sync_lag: Count = 0
    """Steps that a stage trains between sending its pseudo-gradient and adopting the outer update; less than
    `sync_every`."""
    sync_steps: Count = 0
    """Number of steps of the job. After the last one a stage waits for the outer update instead of training on."""
    sync_begun: Count = 0
    """Steps of the whole training run that were finished when this job began."""
    sync_rate: float = 1.0
    """Learning rate of the outer step, which every stage computes itself from the combined pseudo-gradients."""
    sync_momentum: float = 0.0
    """Nesterov momentum of the outer step."""
    sync_early: tuple[Count, Count, Count] = (0, 0, 0)
    """(first, until, every): between these steps of the whole run, exchanges happen every `every` steps. 0: no such
    phase."""
    base_stays: bool = False
    """The job owner keeps the parameters that are not trained. Saved stage states leave them out."""


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that defines an official step. The driver journals it before sending it. All floats are exact
    binary64."""

    step: Count
    scale: float
    """Factor by which gradients are multiplied (clipping)."""
    learning_rate: float
    total_norm: float
    norms_hash: Name
    """SHA-256 over the canonical list of (parameter, norm). A replay must reproduce it."""
    fence: Fence
    loss: float


class Attach(WireMessage, frozen=True, kw_only=True, tag="attach"):
    """Driver -> member, after `Enlist`: run this stage under this fence. Drop partial sums, keep the prepared step.
    Tensor `graph` (uint8): canonical JSON of the stage's graph (`ir.schema.Graph`). `boundary` holds the routes of each
    stage value (`ir.partition.StageGraph` without the graph); `execution` decodes it."""

    fence: Fence
    job: Job
    stage: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: StageOptions
    retain: bool = False
    """In jobs with standbys: keep sent boundary tensors for a neighbour's replay until the watermark passes their
    step."""
    standby: Peer = ""
    """Peer that keeps snapshots of this stage; empty: none."""
    standby_ticket: Blob = b""
    """The broker's ticket for the standby, which says where it listens."""
    snapshot_every: Count = 0
    """Steps between two snapshots."""
    secret: Secret = b""
    """Secret from which the keys of the stage's sketches are derived (spot checks); empty: no sketches are computed."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Prepare(WireMessage, frozen=True, kw_only=True, tag="prepare"):
    """Driver -> standby, once the round runs: load and test this stage's program in advance, for the `Attach` that
    follows if the stage's peer is lost. It has no answer. Fields as in `Attach`, with tensor `graph`."""

    fence: Fence
    stage: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: StageOptions
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Status(WireMessage, frozen=True, kw_only=True, tag="status"):
    """Member -> driver: state of this stage. `applied` is the number of steps applied, -1 without any state."""

    fence: Fence
    stage: Count
    applied: StepIndex
    prepared: StepIndex
    retained_from: StepIndex
    """First step whose sent tensors the stage retains. It has everything it sent from there up to the steps it has
    applied."""
    fingerprint: Name
    clock_s: Seconds


class Resume(WireMessage, frozen=True, kw_only=True, tag="resume"):
    """Driver -> member: reach `committed` applied steps, starting from the state of step `base`.

    `source` says where that state comes from. `keep`: keep the present state, apply the last record if it was missed,
    and send the neighbours named in `replaying` what is retained of steps `base` and later. `initialise`: from the
    seed. `import`: from the state that follows on the state stream. `snapshot`: from this machine's snapshot of step
    `base`. Then replay up to `committed` with `records`."""

    fence: Fence
    stage: Count
    committed: Count
    source: Literal["keep", "initialise", "import", "snapshot"]
    base: Count = 0
    records: Annotated[tuple[CommitRecord, ...], Meta(max_length=65_536)] = ()
    """Records of steps `base` to `committed` - 1; for `keep` only the last one."""
    replaying: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """Stages that replay these steps. The other stages send and need no tensors of these steps, except retained
    ones."""
    snapshot: bool = False
    """Send the standby a snapshot on reaching `committed`."""
    watermark: Count = 0
    """For `keep`, as in `Commit`: without it, a stage that misses commits repeatedly would retain more and more."""


class Snapshot(WireMessage, frozen=True, kw_only=True, tag="snapshot"):
    """Stage -> its standby (or holder -> holder, see `PassSnapshot`), on a state connection: some entries of the state
    of `step`. Snapshots of this job taken before step `watermark` are no longer needed."""

    fence: Fence
    stage: Count
    step: Count
    part: Count
    """Number of this part. Parts come in order from 0, the last one may be empty. After a gap the snapshot is
    unusable."""
    watermark: Count
    last: bool
    rest_of: Count | None = None
    """Step of an earlier snapshot that the receiver has completely. Entries that never change are taken from it and not
    sent again."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=100_000)] = ()


class SnapshotKept(WireMessage, frozen=True, kw_only=True, tag="snapshot_kept"):
    """Standby -> driver: this snapshot is complete."""

    fence: Fence
    stage: Count
    step: Count


class PassSnapshot(WireMessage, frozen=True, kw_only=True, tag="pass_snapshot"):
    """Driver -> holder of a snapshot: send it to `peer`, which will run the stage. `ticket`: the broker's for `peer`,
    which says where it listens; empty for the owner."""

    fence: Fence
    stage: Count
    step: Count
    peer: Peer
    ticket: Blob = b""


class StateChunk(WireMessage, frozen=True, kw_only=True, tag="state_chunk"):
    """Some entries of a stage's state, in either direction. Entry names: `model/<key>`, `optimizer/<key>/<slot>`."""

    fence: Fence
    stage: Count
    step: Count
    last: bool
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=100_000)] = ()


class Ready(WireMessage, frozen=True, kw_only=True, tag="ready"):
    """Member -> driver: the stage is at `applied`, its links are up, its program answered a probe."""

    fence: Fence
    stage: Count
    applied: Count


class Forward(WireMessage, frozen=True, kw_only=True, tag="forward"):
    """Activations (or job inputs) for one microbatch. `producer` is a stage number, or -1 for the data feed."""

    fence: Fence
    mode: Mode
    step: Count
    replica: Count
    microbatch: Index
    producer: Annotated[int, Meta(ge=-1, le=2**20)]
    consumer: Count
    packed: Annotated[tuple[PackedTensor, ...], Meta(max_length=4096)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class Backward(WireMessage, frozen=True, kw_only=True, tag="backward"):
    """Gradients from stage `consumer` to stage `producer`. `producer` computed the values or adds to the gradient sums
    of them, of their aliases and of shared parameters."""

    fence: Fence
    step: Count
    replica: Count
    microbatch: Index
    consumer: Count
    producer: Count
    packed: Annotated[tuple[PackedTensor, ...], Meta(max_length=4096)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class Output(WireMessage, frozen=True, kw_only=True, tag="output"):
    """Stage -> driver: job outputs (`loss`, `logits`) of one microbatch, by output name."""

    fence: Fence
    mode: Mode
    step: Count
    replica: Count
    microbatch: Index
    stage: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class SharedGradient(WireMessage, frozen=True, kw_only=True, tag="shared_gradient"):
    """Gradients of parameters that several stages hold (tied weights, replicas), summed over a step's microbatches.
    `partial`: to the parameter's home stage, for gradients that do not travel with each microbatch. `total`: the sum,
    back from it. Sent as `parts` consecutive messages."""

    fence: Fence
    step: Count
    sender: Count
    receiver: Count
    phase: Literal["partial", "total"]
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


WorkKind = Literal["forward", "backward", "weights", "apply", "send", "wait"]


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One piece of work, timed on the sender's monotonic clock, for the Gantt chart."""

    kind: WorkKind
    microbatch: Index
    start_s: Seconds
    end_s: Seconds


class Sketch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Random projections of the content of one message between stages (`execution.tensors`). `sent`: the stage that
    computed the sketch sent the message; false: it received it. `other`: the stage at the other end, -1 for the data
    feed."""

    sent: bool
    forward: bool
    other: Annotated[int, Meta(ge=-1, le=2**20)]
    microbatch: Index
    values: Annotated[tuple[float, ...], Meta(max_length=64)]


NonFinite = Literal["", "forward", "backward"]
"""Pass in which a stage first made values that are not finite from finite ones; empty: in none."""


class Prepared(WireMessage, frozen=True, kw_only=True, tag="prepared"):
    """Stage -> driver: all microbatches of `step` are summed. Carries one gradient norm per parameter (exact
    binary64)."""

    fence: Fence
    stage: Count
    step: Count
    norms: Annotated[dict[Name, float], Meta(max_length=1_000_000)]
    spans: Annotated[tuple[Span, ...], Meta(max_length=100_000)] = ()
    sketches: Annotated[tuple[Sketch, ...], Meta(max_length=1_000_000)] = ()
    """Sketches of everything the stage received and sent in this step, if its `Attach` had a secret."""
    nonfinite: NonFinite = ""


class StepKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Key under which `stage` computed its sketches of `step`."""

    stage: Count
    step: Count
    key: Secret


class Recheck(WireMessage, frozen=True, kw_only=True, tag="recheck"):
    """Driver -> verifier: run steps `first` to `below` - 1 of a stage that another peer ran, starting from your
    snapshot of `first`, and report the sketches. Answered by `Rechecking` once the program is loaded. The stage's
    inputs then arrive on state connections, in their original form. Fields as in `Attach`, with tensor `graph`."""

    fence: Fence
    stage: Count
    first: Count
    below: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: StageOptions
    records: Annotated[tuple[CommitRecord, ...], Meta(max_length=65_536)]
    """Commit records of these steps."""
    keys: Annotated[tuple[StepKey, ...], Meta(max_length=1_000_000)]
    """Keys of the stage and of its neighbours: each of them computed its sketches under its own key."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Rechecking(WireMessage, frozen=True, kw_only=True, tag="rechecking"):
    """Verifier -> driver: ready to receive the stage's inputs."""

    fence: Fence
    stage: Count
    first: Count
    below: Count


class SendEvidence(WireMessage, frozen=True, kw_only=True, tag="send_evidence"):
    """Driver -> member: send the verifier `peer` again the retained tensors that your `stage` sent to stage `about` in
    steps `first` to `below` - 1. `ticket`: the broker's for `peer`, which says where it listens; empty for the
    owner."""

    fence: Fence
    stage: Count
    about: Count
    first: Count
    below: Count
    peer: Peer
    ticket: Blob = b""


class EvidenceMissing(WireMessage, frozen=True, kw_only=True, tag="evidence_missing"):
    """Member -> driver, answer to a `SendEvidence` that it can't obey: some of what `stage` sent to `about` is not
    retained. Or a standby's to a `PassSnapshot` to the owner: it does not have that snapshot of `about`, which `stage`
    is then too."""

    fence: Fence
    stage: Count
    about: Count


class SketchesOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Sketches of `step` that `stage` should have reported, as computed by the verifier."""

    stage: Count
    step: Count
    sketches: Annotated[tuple[Sketch, ...], Meta(max_length=1_000_000)]


class StepNorms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Gradient norms per parameter of one step (exact binary64)."""

    step: Count
    norms: Annotated[dict[Name, float], Meta(max_length=1_000_000)]


class Rechecked(WireMessage, frozen=True, kw_only=True, tag="rechecked"):
    """Verifier -> driver: the result of running an audit interval again, or the `reason` why there is no result."""

    fence: Fence
    stage: Count
    first: Count
    below: Count
    sketches: Annotated[tuple[SketchesOf, ...], Meta(max_length=1_000_000)] = ()
    norms: Annotated[tuple[StepNorms, ...], Meta(max_length=65_536)] = ()
    state_distance: float = 0.0
    """Distance between the snapshot of `below` and the state that was computed: norm of the difference divided by the
    norm of the snapshot. The maximum over the parameters and each kind of optimizer slot."""
    begin_distance: float = 0.0
    """For `first` = 0: the same distance between the snapshot of step 0 and the parameters as initialised by their
    rules."""
    reason: Text = ""


class Commit(WireMessage, frozen=True, kw_only=True, tag="commit"):
    """Driver -> stages: apply this step. Retained tensors of steps below `watermark` may be discarded. `save`: stream
    the resulting state (`StateChunk`) before going on."""

    fence: Fence
    stage: Count
    record: CommitRecord
    watermark: Count
    save: bool = False


class Applied(WireMessage, frozen=True, kw_only=True, tag="applied"):
    """Stage -> driver: the step of the last `Commit` has been applied."""

    fence: Fence
    stage: Count
    step: Count


class Export(WireMessage, frozen=True, kw_only=True, tag="export"):
    """Driver -> stage: stream your state after `step` applied steps on the state stream."""

    fence: Fence
    stage: Count
    step: Count
