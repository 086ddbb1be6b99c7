"""Every message that crosses a network, as a schema. Decides fields, units and bounds; sends nothing.

A message travels in one frame (`wire.frame`): a 16-byte header, this struct as msgpack, then the raw bytes of the
tensors it carries. Fields typed `msgspec.Raw` hold a type of a higher package (a profile or a plan of `scheduling`),
decoded there against its own schema. Sizes are bounded here, before anything is allocated for them.

Neighbours: `coordination` takes these as events and gives them as commands, `transport` moves them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REFUSAL_SENTENCES,
    Address,
    Addresses,
    Blob,
    Count,
    Fence,
    Index,
    Job,
    Mode,
    Name,
    Neighbour,
    Peer,
    Placement,
    RefusalCode,
    Seconds,
    Secret,
    StepIndex,
    Stream,
    TensorHeader,
    Text,
    WireMessage,
)
from fusionai.wire.codecs import Codec, Exchanged, PackedTensor, Told
from fusionai.wire.meeting import (
    MAX_LINKS,
    MAX_NEAR,
    Introduced,
    LinkView,
    Meet,
    MeetNotice,
    Near,
    Observe,
    Observed,
    Way,
)
from fusionai.wire.serving import (
    MAX_TEXT,
    CacheFormat,
    CheckFailed,
    Digest,
    Hop,
    Load,
    Loaded,
    Loading,
    Pass,
    PassFailed,
    PassResult,
    ReadAgain,
    Reading,
    ReadText,
    Rebuild,
    Rebuilt,
    Segment,
    ServeOptions,
    ShownRows,
    ShowRows,
    TellMarks,
    ToldMarks,
    WeightAsk,
    WeightFormat,
    WeightPieces,
    WeightRefused,
    WeightSource,
    WeightSpec,
    Working,
)

MAX_BACK_BYTES: Final = 4 * 2**20
"""That a member may have sent to it for a measurement."""
HANDED_ON: Final = (
    REFUSAL_SENTENCES,
    Address,
    CacheFormat,
    Digest,
    Hop,
    MAX_NEAR,
    MAX_TEXT,
    LinkView,
    Near,
    Segment,
    ServeOptions,
    WeightFormat,
    Way,
    WeightSource,
    WeightSpec,
)
"""Parts of messages, defined beside this module, that others take from here."""


# ---------------------------------------------------------------------------------------------------- handshake


class Hello(WireMessage, frozen=True, kw_only=True, tag="hello"):
    """First message of the dialling side. `stream` says what this connection is for."""

    oldest_version: Count = OLDEST_PROTOCOL_VERSION
    newest_version: Count = PROTOCOL_VERSION
    stream: Stream = "control"
    software: Name = ""


class Welcome(WireMessage, frozen=True, kw_only=True, tag="welcome"):
    """The listening side accepts and names the version both speak."""

    version: Count
    software: Name = ""


class Refused(WireMessage, frozen=True, kw_only=True, tag="refused"):
    """No, and why. May answer anything; after a handshake it ends the connection."""

    code: RefusalCode
    reason: Text = ""


class Done(WireMessage, frozen=True, kw_only=True, tag="done"):
    """Yes, nothing more to say."""


# ------------------------------------------------------------------------------------------------ with the broker


class JoinRequest(WireMessage, frozen=True, kw_only=True, tag="join"):
    """A stranger with an invitation asks for a certificate. Sent on a connection without a client certificate."""

    token: Annotated[bytes, Meta(max_length=64)]
    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    purpose: Literal["provider", "owner"]


class JoinGranted(WireMessage, frozen=True, kw_only=True, tag="joined"):
    """DER certificates: the newcomer's own and the pool's authority."""

    peer: Peer
    certificate: Blob
    authority: Blob


class Register(WireMessage, frozen=True, kw_only=True, tag="register"):
    """A provider offers itself. `boot` differs at each start of the process. `profile` is `scheduling.PeerProfile`."""

    boot: Count
    profile: msgspec.Raw
    addresses: Addresses


class Registered(WireMessage, frozen=True, kw_only=True, tag="registered"):
    """The broker has taken a provider in, and how often it wants to hear from it."""

    heartbeat_s: Seconds
    pool: Name
    near: Annotated[tuple[Near, ...], Meta(max_length=MAX_NEAR)] = ()
    """Others whose connections come from where this one's does."""
    wall_s: Seconds = 0.0


class Heartbeat(WireMessage, frozen=True, kw_only=True, tag="heartbeat"):
    """Peer -> broker: this process is alive and works on these jobs."""

    boot: Count
    jobs: Annotated[tuple[Job, ...], Meta(max_length=64)] = ()
    links: Annotated[tuple[LinkView, ...], Meta(max_length=MAX_LINKS)] = ()
    """Its links to other members as they are now, for people, and those it probed, for planners."""


class HeartbeatAck(WireMessage, frozen=True, kw_only=True, tag="heartbeat_ack"):
    """The lease runs anew from now."""

    wall_s: Seconds = 0.0


class Leave(WireMessage, frozen=True, kw_only=True, tag="leave"):
    """This machine's peer leaves the pool: after its work is handed over (`drain`), or at once."""

    drain: bool = True


class LeaveNotice(WireMessage, frozen=True, kw_only=True, tag="leave_notice"):
    """The broker tells a peer's process that its machine's owner asked it to leave."""

    drain: bool = True


class PoolQuery(WireMessage, frozen=True, kw_only=True, tag="pool_query"):
    """Who is in the pool?"""


class MemberView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member of the pool as the broker knows it."""

    peer: Peer
    state: Name
    boot: Count
    addresses: Addresses
    profile: msgspec.Raw
    job: Name = ""
    stages: Annotated[tuple[Count, ...], Meta(max_length=1024)] = ()
    guards: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """The stages of that job whose snapshots it keeps."""
    last_heard_s: Seconds = 0.0
    rests_s: Seconds = 0.0
    """For `resting`: seconds until it may be given work again."""
    clears: Name = ""
    """The job that has no part for it any more and of which it still holds something: nobody else is given it yet."""
    links: Annotated[tuple[LinkView, ...], Meta(max_length=MAX_LINKS)] = ()
    """Its links to other members, as its last heartbeat said."""


class PoolView(WireMessage, frozen=True, kw_only=True, tag="pool_view"):
    """Answer to `PoolQuery`."""

    members: Annotated[tuple[MemberView, ...], Meta(max_length=100_000)] = ()


class JobRequest(WireMessage, frozen=True, kw_only=True, tag="job_request"):
    """A job owner asks for a plan to be made real: leases, a plan version, tickets. `plan` is `scheduling.Plan`."""

    job: Job
    title: Name
    plan: msgspec.Raw
    steps: Count = 0


class TicketFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A signed ticket (`transport.tickets`) and whom it is for."""

    peer: Peer
    ticket: Blob


class JobGranted(WireMessage, frozen=True, kw_only=True, tag="job_granted"):
    """`plan` with its version; one ticket per member and one for the driver; where each member listens."""

    job: Job
    plan: msgspec.Raw
    tickets: Annotated[tuple[TicketFor, ...], Meta(max_length=4096)]
    members: Annotated[tuple[MemberView, ...], Meta(max_length=4096)]
    wall_s: Seconds = 0.0


class JobReport(WireMessage, frozen=True, kw_only=True, tag="job_report"):
    """The driver says how its job stands. No text, token or tensor of the job passes here."""

    job: Job
    state: Literal["starting", "running", "stopping", "done", "failed"]
    step: StepIndex = -1
    detail: Text = ""


class JobQuery(WireMessage, frozen=True, kw_only=True, tag="job_query"):
    """Which jobs are there? With `job`, only that one and its story."""

    job: Name = ""


class JobView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job as the broker's journal has it."""

    job: Job
    title: Name
    owner: Peer
    state: Name
    step: StepIndex
    steps: Count
    plan_version: Count
    started_at_s: Seconds
    story: Annotated[tuple[Text, ...], Meta(max_length=10_000)] = ()


class JobList(WireMessage, frozen=True, kw_only=True, tag="job_list"):
    """Answer to `JobQuery`."""

    jobs: Annotated[tuple[JobView, ...], Meta(max_length=10_000)] = ()


class JobStop(WireMessage, frozen=True, kw_only=True, tag="job_stop"):
    """End this job cleanly. Allowed to its owner and to the broker's owner."""

    job: Job


class StopNotice(WireMessage, frozen=True, kw_only=True, tag="stop_notice"):
    """The broker tells a job's driver that somebody entitled asked it to stop."""

    job: Job


class InviteRequest(WireMessage, frozen=True, kw_only=True, tag="invite_request"):
    """The broker's owner asks for a new invitation."""

    uses: Annotated[int, Meta(ge=1, le=100_000)] = 1
    lifetime_s: Seconds = 86_400.0


class Invited(WireMessage, frozen=True, kw_only=True, tag="invited"):
    """Answer to `InviteRequest`: text to hand to the newcomer over a channel both trust."""

    invitation: Text


# ------------------------------------------------------------------------------------------------- within a job


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
    """Of AdamW's moments: 8 are an eighth of the bits, in blocks of 256 numbers with a scale each."""
    anchored: bool = False
    """Local updates: the state has what was agreed on last, the momentum, and what packing the difference lost, too."""
    overlapped: bool = False
    """Local updates that train on during an exchange: the state has what the last difference was taken of, too."""


Saving = Literal["recompute", "offload", "offload_weights"]
"""What a stage may do to fit a small memory, as `StageOptions` has it."""


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
    """Microbatches whose weight gradients a stage may leave for later, when it would otherwise wait (zero bubble)."""
    recompute: bool = False
    """The stage keeps what enters its blocks and runs each of them again in backward: the same bits, less memory."""
    offload: bool = False
    """Optimizer state lies in a file between updates, which read and write it piece by piece: the same bits."""
    offload_weights: bool = False
    """Weights lie in a file (beside an accelerator: in the host's memory) and are read block by block, forward and
    backward: the same bits. Only with `recompute`."""
    takeover: Literal["exact", "any", "tolerant"] = "exact"
    codecs: Annotated[tuple[Codec, ...], Meta(max_length=1024)] = ()
    """How what a stage gets from those before it, and gives back, is packed: for the second stage, the third and so on;
    empty: nowhere."""
    sync_every: Count = 0
    """Local updates: steps between two exchanges with other jobs that train the same model; 0: none."""
    sync_codec: Exchanged = "none"
    """How differences and agreements are packed."""
    sync_lag: Count = 0
    """Steps that a stage takes between telling its difference and adopting what was agreed on; below `sync_every`."""
    sync_steps: Count = 0
    """Steps of the job: after the last one nobody trains on."""
    sync_begun: Count = 0
    """Steps of the whole job that were over when this one began."""
    sync_rate: float = 1.0
    """The learning rate of the outer step, which every stage takes itself from what the differences come to."""
    sync_momentum: float = 0.0
    """Nesterov's momentum of the outer step."""
    sync_early: tuple[Count, Count, Count] = (0, 0, 0)
    """From the first of these steps of the whole job until the second exchanges come every third; 0: as ever."""
    base_stays: bool = False
    """The job owner keeps the parameters that are not trained: what is saved of a stage's state is without them."""


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What makes a step official, as journalled by the driver before it is sent. All floats are exact binary64."""

    step: Count
    scale: float
    """What gradients are multiplied by (clipping)."""
    learning_rate: float
    total_norm: float
    norms_hash: Name
    """SHA-256 over the canonical list of (parameter, norm): replay must reproduce it."""
    fence: Fence
    loss: float


class OpenJob(WireMessage, frozen=True, kw_only=True, tag="open_job"):
    """First message on a connection between members of a job: the dialling side shows its ticket."""

    job: Job
    fence: Fence
    ticket: Blob
    placement: Placement = b""
    """Of this round, signed by the job's owner; the owner itself needs none."""
    task: Literal["train", "serve"] = "train"
    """What kind of part the listener is to open, if it has none in this job yet."""


class Enlist(WireMessage, frozen=True, kw_only=True, tag="enlist"):
    """Driver -> member, first message of every round and once per member: adopt this (higher) fence. Your whole part
    in the job follows from it: stages that `neighbours` places elsewhere are forgotten, snapshots are kept."""

    fence: Fence
    job: Job
    neighbours: Annotated[tuple[Neighbour, ...], Meta(max_length=4096)]
    guards: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """Stages whose snapshots the receiver keeps."""
    partition: Name = ""
    """Names the cut of the graph: snapshots of another cut are dropped."""
    ticket: Blob
    """The receiver's own ticket, for the connections it dials."""
    placement: Placement
    """Signed by the job's owner, and shown with the ticket: whom it does not name nobody lets in."""


class SnapshotAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, order=True):
    """A whole state of `stage` after `step` steps."""

    stage: Count
    step: Count


class Enlisted(WireMessage, frozen=True, kw_only=True, tag="enlisted"):
    """Member -> driver, answer to `Enlist`: which snapshots it holds. The stages answer with `Status`."""

    fence: Fence
    fingerprint: Name
    snapshots: Annotated[tuple[SnapshotAt, ...], Meta(max_length=4096)] = ()


class Attach(WireMessage, frozen=True, kw_only=True, tag="attach"):
    """Driver -> member, after `Enlist`: run this stage under this fence; drop partial sums, keep what is prepared.

    Tensor `graph` (uint8): canonical JSON of the stage's graph (`ir.schema.Graph`). `boundary` holds the
    routes of each stage value (`ir.partition.StageGraph` without the graph); `execution` decodes it.
    """

    fence: Fence
    job: Job
    stage: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: StageOptions
    retain: bool = False
    """Whether boundary tensors are kept for a neighbour's replay until the line passes them (guarded jobs)."""
    guard: Peer = ""
    """Who keeps snapshots of this stage; nobody: empty."""
    guard_addresses: Addresses = ()
    snapshot_every: Count = 0
    """Steps between two snapshots."""
    secret: Secret = b""
    """What keys of marks follow from (spot checks); empty: no marks are made."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Prepare(WireMessage, frozen=True, kw_only=True, tag="prepare"):
    """Driver -> guard, once the round runs: have this stage's program loaded and tried, for the `Attach` that a loss of
    its peer would bring. No answer: nothing depends on it. Fields as in `Attach`, tensor `graph` too."""

    fence: Fence
    stage: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: StageOptions
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Status(WireMessage, frozen=True, kw_only=True, tag="status"):
    """Member -> driver: where I am. `applied` is the number of steps applied, -1 without any state."""

    fence: Fence
    stage: Count
    applied: StepIndex
    prepared: StepIndex
    retained_from: StepIndex
    """The stage still has everything it sent in this step and later ones, up to those it has applied."""
    fingerprint: Name
    clock_s: Seconds


class Resume(WireMessage, frozen=True, kw_only=True, tag="resume"):
    """Driver -> member: get to `committed` applied steps, starting from the state of step `base`.

    `keep` what you have, applying the last record if you missed it, and send those of `replaying` that are your
    neighbours what you retain of steps `base` and later; `initialise` from the seed; `import` the state that follows
    on the state stream; take your own `snapshot` of step `base`. Then replay up to `committed` with `records`."""

    fence: Fence
    stage: Count
    committed: Count
    source: Literal["keep", "initialise", "import", "snapshot"]
    base: Count = 0
    records: Annotated[tuple[CommitRecord, ...], Meta(max_length=65_536)] = ()
    """Of steps `base` to `committed` - 1; for `keep` only the last."""
    replaying: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """Stages that replay these steps: the others neither send nor need anything of them."""
    snapshot: bool = False
    """Give your guard a snapshot as soon as you are at `committed`."""
    line: Count = 0
    """For `keep`, as in `Commit`: whoever misses commits again and again would retain ever more."""


class Snapshot(WireMessage, frozen=True, kw_only=True, tag="snapshot"):
    """Stage -> its guard (or holder -> holder, see `PassSnapshot`): some entries of the state of `step`, on a state
    connection. `line`: snapshots of this job of earlier steps are nobody's base any more."""

    fence: Fence
    stage: Count
    step: Count
    part: Count
    """Parts come in order from 0; the last one may be empty. A gap makes the rest worthless."""
    line: Count
    last: bool
    rest_of: Count | None = None
    """What never changes is not sent again: it is that of the snapshot of this step, which the receiver has whole."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=100_000)] = ()


class SnapshotKept(WireMessage, frozen=True, kw_only=True, tag="snapshot_kept"):
    """Guard -> driver: this snapshot is whole."""

    fence: Fence
    stage: Count
    step: Count


class PassSnapshot(WireMessage, frozen=True, kw_only=True, tag="pass_snapshot"):
    """Driver -> holder of a snapshot: send it to `peer`, which is to run the stage."""

    fence: Fence
    stage: Count
    step: Count
    peer: Peer
    addresses: Addresses


class StateChunk(WireMessage, frozen=True, kw_only=True, tag="state_chunk"):
    """Some entries of a stage's state, in either direction. Entry names: `model/<key>`, `optimizer/<key>/<slot>`."""

    fence: Fence
    stage: Count
    step: Count
    last: bool
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=100_000)] = ()


class Ready(WireMessage, frozen=True, kw_only=True, tag="ready"):
    """Member -> driver: my stage is at `applied`, its links are up, its program answered a probe."""

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
    """Gradients from stage `consumer` to stage `producer`, which made the values or continues the sums of them, of
    aliases of values and of shared parameters."""

    fence: Fence
    step: Count
    replica: Count
    microbatch: Index
    consumer: Count
    producer: Count
    packed: Annotated[tuple[PackedTensor, ...], Meta(max_length=4096)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class Output(WireMessage, frozen=True, kw_only=True, tag="output"):
    """Stage -> driver: job outputs (`loss`, `logits`) of one microbatch, under their meaning."""

    fence: Fence
    mode: Mode
    step: Count
    replica: Count
    microbatch: Index
    stage: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class SharedGradient(WireMessage, frozen=True, kw_only=True, tag="shared_gradient"):
    """Gradients of parameters that several stages hold (tied weights, replicas), summed over a step's microbatches:
    `partial` to the home stage of those that do not travel with each microbatch, `total` back, in `parts` messages one
    after the other."""

    fence: Fence
    step: Count
    sender: Count
    receiver: Count
    phase: Literal["partial", "total"]
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=4096)] = ()


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A piece of work on the sender's monotonic clock, for the Gantt chart."""

    kind: Literal["forward", "backward", "weights", "apply", "send", "wait"]
    microbatch: Index
    start_s: Seconds
    end_s: Seconds


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Random projections of what one message between stages carried (`execution.marks`). `sent`: by the stage whose
    mark it is, else it got it. `other`: the stage at the other end, -1 for the data feed."""

    sent: bool
    forward: bool
    other: Annotated[int, Meta(ge=-1, le=2**20)]
    microbatch: Index
    values: Annotated[tuple[float, ...], Meta(max_length=64)]


class Prepared(WireMessage, frozen=True, kw_only=True, tag="prepared"):
    """Stage -> driver: all microbatches of `step` are summed; one gradient norm per parameter (exact binary64)."""

    fence: Fence
    stage: Count
    step: Count
    norms: Annotated[dict[Name, float], Meta(max_length=1_000_000)]
    spans: Annotated[tuple[Span, ...], Meta(max_length=100_000)] = ()
    marks: Annotated[tuple[Mark, ...], Meta(max_length=1_000_000)] = ()
    """Of all that the stage got and gave in this step, where the attach had a secret."""


class StepKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Under which `stage` made its marks of `step`."""

    stage: Count
    step: Count
    key: Secret


class Recheck(WireMessage, frozen=True, kw_only=True, tag="recheck"):
    """Driver -> referee: run steps `first` to `below` - 1 of a stage again, which another peer ran, from your snapshot
    of `first`, and tell the marks. Answered by `Rechecking` once the program is loaded; what the stage got then comes
    as it came to the stage, on state connections. Fields as in `Attach`, tensor `graph` too."""

    fence: Fence
    stage: Count
    first: Count
    below: Count
    graph_hash: Name
    boundary: msgspec.Raw
    options: StageOptions
    records: Annotated[tuple[CommitRecord, ...], Meta(max_length=65_536)]
    """Of these steps."""
    keys: Annotated[tuple[StepKey, ...], Meta(max_length=1_000_000)]
    """Of the stage and of its neighbours: what each of them saw is marked under its own."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=64)] = ()


class Rechecking(WireMessage, frozen=True, kw_only=True, tag="rechecking"):
    """Referee -> driver: ready for what the stage got."""

    fence: Fence
    stage: Count
    first: Count
    below: Count


class Testify(WireMessage, frozen=True, kw_only=True, tag="testify"):
    """Driver -> member: send the referee `peer` what your `stage` sent to stage `about` in steps `first` to
    `below` - 1, which you retain, once more."""

    fence: Fence
    stage: Count
    about: Count
    first: Count
    below: Count
    peer: Peer
    addresses: Addresses


class Untold(WireMessage, frozen=True, kw_only=True, tag="untold"):
    """Member -> driver, answer to a `Testify` that it can't obey: not all that `stage` sent to `about` is retained."""

    fence: Fence
    stage: Count
    about: Count


class MarksOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """As `stage` should have made them of `step`."""

    stage: Count
    step: Count
    marks: Annotated[tuple[Mark, ...], Meta(max_length=1_000_000)]


class StepNorms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Gradient norms per parameter of one step (exact binary64)."""

    step: Count
    norms: Annotated[dict[Name, float], Meta(max_length=1_000_000)]


class Rechecked(WireMessage, frozen=True, kw_only=True, tag="rechecked"):
    """Referee -> driver: what running a stretch again gave; with a `reason`, why it gave nothing."""

    fence: Fence
    stage: Count
    first: Count
    below: Count
    marks: Annotated[tuple[MarksOf, ...], Meta(max_length=1_000_000)] = ()
    norms: Annotated[tuple[StepNorms, ...], Meta(max_length=65_536)] = ()
    state_apart: float = 0.0
    """How far the snapshot of `below` is from the state that came out: the norm of the difference by the norm of the
    snapshot, of the parameters or of one kind of slot, whichever is most."""
    begin_apart: float = 0.0
    """For `first` = 0, the same of the snapshot of 0 and the parameters as their rules make them."""
    reason: Text = ""


class Commit(WireMessage, frozen=True, kw_only=True, tag="commit"):
    """Driver -> stages: apply. `line`: retained tensors of steps below it may be discarded. `save`: stream the state
    this leads to (`StateChunk`) before going on."""

    fence: Fence
    stage: Count
    record: CommitRecord
    line: Count
    save: bool = False


class Applied(WireMessage, frozen=True, kw_only=True, tag="applied"):
    """Stage -> driver: the step of the last `Commit` has been applied."""

    fence: Fence
    stage: Count
    step: Count


class Difference(WireMessage, frozen=True, kw_only=True, tag="difference"):
    """Stage -> driver, after the optimizer's last step before an exchange: how far the stage's parameters have come
    since the last agreement (agreed - present, and what packing lost last time), some of them in each message."""

    fence: Fence
    stage: Count
    step: Count
    last: bool
    packed: Annotated[tuple[PackedTensor, ...], Meta(max_length=100_000)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=100_000)] = ()


class Agreement(WireMessage, frozen=True, kw_only=True, tag="agreement"):
    """Driver -> stage: what is agreed on after `step`, some parameters in each message, in one of `Told`'s forms."""

    fence: Fence
    stage: Count
    step: Count
    last: bool
    told: Told
    packed: Annotated[tuple[PackedTensor, ...], Meta(max_length=100_000)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=100_000)] = ()


class Export(WireMessage, frozen=True, kw_only=True, tag="export"):
    """Driver -> stage: stream your state of `step` applied steps on the state stream."""

    fence: Fence
    stage: Count
    step: Count


class Detach(WireMessage, frozen=True, kw_only=True, tag="detach"):
    """Driver -> member: the job is over for you; forget it (all its stages and snapshots here)."""

    fence: Fence
    reason: Text = ""


class StageFailed(WireMessage, frozen=True, kw_only=True, tag="stage_failed"):
    """Member -> driver: my stage can't go on."""

    fence: Fence
    stage: Count
    code: RefusalCode
    reason: Text


class LinkLost(WireMessage, frozen=True, kw_only=True, tag="link_lost"):
    """Member -> driver: my connection to `peer` broke, fell silent or could not be opened."""

    fence: Fence
    peer: Peer
    reason: Text


class Ping(WireMessage, frozen=True, kw_only=True, tag="ping"):
    """Liveness and round-trip time between members, any stream."""

    sequence: Count
    sent_at_s: Seconds


class Pong(WireMessage, frozen=True, kw_only=True, tag="pong"):
    """Answer to `Ping` and to `Probe`, with its numbers, and with as many bytes as the probe asked for."""

    sequence: Count
    sent_at_s: Seconds
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=1)] = ()


class Probe(WireMessage, frozen=True, kw_only=True, tag="probe"):
    """Bulk bytes to measure a link's bandwidth; answered by `Pong` when the last byte has arrived."""

    sequence: Count
    sent_at_s: Seconds
    back_bytes: Annotated[int, Meta(ge=0, le=MAX_BACK_BYTES)] = 0
    """So many are to come back, to measure the other direction."""
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=1)] = ()


Message = (
    Hello
    | Welcome
    | Refused
    | Done
    | JoinRequest
    | JoinGranted
    | Register
    | Registered
    | Heartbeat
    | HeartbeatAck
    | Leave
    | LeaveNotice
    | PoolQuery
    | PoolView
    | JobRequest
    | JobGranted
    | JobReport
    | JobQuery
    | JobList
    | JobStop
    | StopNotice
    | InviteRequest
    | Invited
    | Meet
    | Introduced
    | MeetNotice
    | Observe
    | Observed
    | OpenJob
    | Enlist
    | Enlisted
    | Attach
    | Status
    | Resume
    | StateChunk
    | Snapshot
    | SnapshotKept
    | PassSnapshot
    | Prepare
    | Ready
    | Forward
    | Backward
    | Output
    | SharedGradient
    | Prepared
    | Recheck
    | Rechecking
    | Testify
    | Untold
    | Rechecked
    | Commit
    | Difference
    | Agreement
    | Applied
    | Export
    | Detach
    | StageFailed
    | LinkLost
    | Load
    | Loading
    | Loaded
    | WeightRefused
    | WeightAsk
    | WeightPieces
    | Pass
    | PassResult
    | PassFailed
    | Rebuild
    | Rebuilt
    | Working
    | TellMarks
    | ToldMarks
    | ReadAgain
    | Reading
    | ShowRows
    | ShownRows
    | ReadText
    | CheckFailed
    | Ping
    | Pong
    | Probe
)
"""Everything that may arrive."""

_DECODER: Final = msgspec.msgpack.Decoder(Message)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Raises `msgspec.ValidationError`/`DecodeError`; `wire.frame` turns them into `WireError`."""
    return _DECODER.decode(data)
