"""The planner's types: problem in, immutable plan and certificate out. Decides names and units; computes nothing.

Neighbours: `scheduling.planner` solves, `ir.cost` fills `BlockCost`, backends and transport measure profiles, `broker`
versions plans, `execution` and `training` obey them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.primitives.pace import Pace, ServingPace
from fusionai.wire.codecs import Codec, Compression
from fusionai.wire.messages import Saving

Lever = Literal["auto", "never", "always"]
"""What may be done about a small memory: where the plan finds it needed, nowhere, everywhere."""


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: immutable, strict, keyword-only."""


class Link(_Data, frozen=True, kw_only=True):
    """A directed pair or an access link."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0


class PeerProfile(_Data, frozen=True, kw_only=True):
    """What a peer can do, measured, and what its provider allows."""

    peer: str
    name: str = ""
    backend: str = "torch"
    backend_version: str = ""
    device: str = "cpu"
    device_name: str = ""
    flops_per_s: float
    """Measured float32 speed with `threads` threads, before `share`."""
    memory_bandwidth_bytes_per_s: float = 0.0
    pace: Pace | None = None
    """In training; None: not measured."""
    serving: Annotated[tuple[ServingPace, ...], Meta(max_length=8)] = ()
    """By weight format; where the one that is wanted is not measured, serving goes by `flops_per_s` and
    `memory_bandwidth_bytes_per_s`."""
    attention_flops_per_s: float = 0.0
    """In serving: of attention to what is before, whose operations `BlockCost.attended_flops` counts; 0: not measured,
    it goes by `flops_per_s` then."""
    scratch_bytes_per_s: float = 0.0
    """Of a file that optimizer state may lie in, read and written; 0: not measured."""
    memory_bytes: int
    """What the provider lends (`--max-memory`), at most what is there."""
    threads: int = 1
    share: float = 1.0
    """Part of the time the provider lends, in (0, 1]."""
    fingerprint: str = ""
    uplink: Link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    downlink: Link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    unsupported_ops: tuple[str, ...] = ()
    tasks: tuple[Literal["train", "serve"], ...] = ("train", "serve")
    """What its backend can take part in."""
    weight_formats: tuple[str, ...] = ()
    """How its backend can keep weights in serving; empty: in all ways."""
    savings: tuple[Saving, ...] = ("recompute", "offload", "offload_weights")
    """What its backend can do in training to fit a small memory."""
    roles: tuple[Literal["stage", "owner"], ...] = ("stage",)
    power_w: float | None = None
    endorsements: Annotated[tuple[Annotated[bytes, Meta(max_length=512)], ...], Meta(max_length=16)] = ()
    """Signed words of others that its key is to be trusted (`transport.endorsements`); who carries them can't forge
    them."""

    @property
    def effective_flops_per_s(self) -> float:
        return self.flops_per_s * self.share


class BlockCost(_Data, frozen=True, kw_only=True):
    """One block of the graph (or a role's nodes) for one microbatch, at the job's batch and sequence sizes."""

    block: int
    forward_flops: float
    backward_flops: float
    parameter_bytes: int
    """Storage of the parameters held by this block (a tied parameter counts in each block that holds it)."""
    trainable_bytes: int
    activation_bytes: int
    """Kept from forward to backward per microbatch."""
    workspace_bytes: int = 0
    output_bytes: int
    """What crosses a cut *after* this block, forward."""
    gradient_bytes: int
    """What comes back over that cut, backward."""
    ops: tuple[str, ...] = ()
    calls: int = 0
    """Operators that are called for a microbatch, in training."""
    moved_bytes: float = 0.0
    """What operators read and write for a microbatch, forward and backward, in training."""
    looked_up_bytes: int = 0
    """Serving: of `parameter_bytes`, tables of which a pass reads only some rows."""
    cache_token_bytes: int = 0
    """Serving: keys and values of one token, in layers that keep all of them."""
    cache_session_bytes: int = 0
    """Serving: rings of the layers that keep a window, for one session."""
    attended_flops: float = 0.0
    """Serving: of one position, for each position before it that layers without a window look at. It makes long prompts
    slow; what a token costs is planned without it."""


class ServingNeeds(_Data, frozen=True, kw_only=True):
    """What a serving job asks of its stages. With it, the problem's block costs are those of one position of a pass
    (`ir.serving_cost`), weights counted as they are kept."""

    weights: Literal["fp32", "bf16", "fp16", "int8", "int4"] = "fp32"
    cache: Literal["fp32", "bf16", "fp16"] = "fp32"
    page_tokens: int = 16
    context_tokens: int
    """Longest prompt plus answer."""
    sessions: int
    """At most so many at a time."""
    cache_tokens: int = 0
    """Positions of cache there should be room for; fewer, but no fewer than one context, where memory is short."""
    pass_tokens: int = 512
    retain: bool = True
    """Stages keep what they sent on, for the next one's cache to be rebuilt."""
    whole: bool = False
    """Each text is computed anew for every token, as long as half a context on average."""
    result_bytes: int = 0
    """Of one row of logits, which goes to the job owner when the head is not there."""


class RolePlacement(_Data, frozen=True, kw_only=True):
    """`feed` and `loss` are placed by the plan, by default with the job owner."""

    role: Literal["feed", "loss"]
    place: Literal["owner", "pool"] = "owner"


class SharedWeight(_Data, frozen=True, kw_only=True):
    """A trainable parameter that several blocks read and whose gradient, where machines share it, is added in another
    order than in one process. `blocks`: one number per use, the last use first."""

    key: str
    nbytes: int
    blocks: tuple[int, ...]
    interleaves: bool = False
    """Whether its order of uses goes back to earlier blocks: then stages of one machine add it otherwise, too."""


class Problem(_Data, frozen=True, kw_only=True):
    """What to plan. `blocks` in order; those that stay with the owner (`scheduling.ends`) are not offered to the pool's
    peers."""

    task: Literal["train", "serve"] = "train"
    graph_hash: str
    blocks: tuple[BlockCost, ...]
    peers: tuple[PeerProfile, ...]
    owner: PeerProfile | None = None
    roles: tuple[RolePlacement, ...] = (RolePlacement(role="feed"), RolePlacement(role="loss"))
    kept_first: int = 0
    """Blocks at the beginning that stay with the job owner, where `feed` is; in serving never fewer than one."""
    kept_last: int = 0
    """Blocks at the end that stay with the job owner, where `loss` is; never fewer than one."""
    stages: int | None = None
    """Exactly so many pool stages; None lets the planner choose."""
    microbatches: int
    microbatch_tokens: int
    optimizer_bytes_per_trainable_byte: float = 2.0
    """AdamW in float32 keeps two float32 slots per parameter."""
    links: dict[str, Link] = {}
    """Exceptions to the access-link model: `"<from>><to>"` -> link."""
    replicas: int | Literal["auto"] = 1
    """Training: so many chains of stages, each with a share of every step's microbatches, whose gradients are summed
    at the step's end."""
    reduction_bytes_per_trainable_byte: float = 0.0
    """What a stage holds of other replicas' gradients while they are summed."""
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    pinned: dict[int, str] = {}
    """Block number -> the peer whose stage holds it."""
    incumbent: Plan | None = None
    spares_wanted: int | None = None
    takeover: Literal["exact", "tolerant"] = "exact"
    """Whether a machine that computes other bits may guard a stage or stand in for its peer."""
    compression: Compression = "none"
    """How activations and gradients between stages are packed in training. Costs count float32."""
    recompute: Lever = "never"
    """Training: whether stages make activations again in backward instead of keeping them; `auto`: those that must."""
    offload: Lever = "never"
    """Training: whether optimizer state lies in a file of the peer's between updates."""
    offload_weights: Lever = "never"
    """Training: whether weights lie in a file of the peer's (beside an accelerator: in the host's memory) until a block
    needs them."""
    shared_weights: tuple[SharedWeight, ...] = ()
    """Training: parameters whose gradients depend on the cut in the last bits (`scheduling.cut_bits`)."""
    serving: ServingNeeds | None = None
    """For task `serve`. There `feed` stands for the first block (the embedding), `loss` for the last (the head)."""


class StagePlacement(_Data, frozen=True, kw_only=True):
    """One stage on one peer. Block ranges are half-open and contiguous."""

    stage: int
    peer: str
    blocks: tuple[int, int]
    roles: tuple[Literal["feed", "loss", "stage"], ...] = ("stage",)
    replica: int = 0
    """Stages of one replica follow each other; microbatch m crosses those of replica m mod replicas."""
    in_flight: int = 1
    compute_s: float = 0.0
    """Predicted forward + backward of one microbatch."""
    send_s: float = 0.0
    """Predicted transfer of one microbatch's activation and gradient over the link to the next stage."""
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    in_flight_bytes: int = 0
    """Of `memory_bytes`, what one microbatch in flight takes."""
    recompute: bool = False
    """Training: the stage keeps what enters its blocks and runs them again in backward; `compute_s` has it in."""
    recompute_s: float = 0.0
    """Of `compute_s`, what running them again takes."""
    recompute_saves_bytes: int = 0
    """What the stage would hold besides, were they kept."""
    offload: bool = False
    """Training: optimizer state lies in a file of the peer's and is read and written by every update."""
    offload_s: float = 0.0
    """What that takes of every step."""
    offload_saves_bytes: int = 0
    """What it leaves free of `memory_limit_bytes`."""
    offload_weights: bool = False
    """Training: weights lie in a file of the peer's (beside an accelerator: in the host's memory) and are read block by
    block; `compute_s` has that in."""
    offload_weights_s: float = 0.0
    """What that takes of every step: reading for each microbatch, and the update."""
    offload_weights_saves_bytes: int = 0
    """What it leaves free of `memory_limit_bytes`."""
    fingerprint: str = ""
    """Of the peer's numerics when it was given the stage; empty: not known, so nothing equals it."""
    weight_bytes: int = 0
    """Serving: of `memory_bytes`, the weights as they are kept."""
    cache_bytes: int = 0
    """Serving: of `memory_bytes`, keys and values, and what is retained of the boundary."""


class Excluded(_Data, frozen=True, kw_only=True):
    peer: str
    reason: str


class Certificate(_Data, frozen=True, kw_only=True):
    """How good the plan is: `optimality_gap` = bound / predicted - 1 of tokens per second, 0.0 when proven optimal."""

    method: str
    exact: bool
    bound_tokens_per_s: float
    optimality_gap: float
    explored: int = 0


class Guard(_Data, frozen=True, kw_only=True):
    """A spare keeps snapshots of a stage and takes it over when its peer is lost. One spare may guard several."""

    stage: int
    peer: str
    exact: bool = True
    """Whether the fingerprints of the two peers promise bit-equal results."""


class TolerantTakeover(_Data, frozen=True, kw_only=True):
    """From a step on, machines of other numerics compute, or a cut that adds gradients in another order: results may be
    apart from those of the plan before."""

    step: int
    """So many steps were official; the next one is the first that may differ."""
    stages: tuple[int, ...]
    """Of the plan that began there, those that other numerics compute."""
    peers: tuple[str, ...]
    """Their peers."""
    recut: bool = False
    """Whether the stages are others than before."""
    tolerance: float = 0.0
    """How far losses may be apart, relative (`backends.tolerance`)."""


PROMPT_TOKENS: Final = 2048
"""Of the prompt that a plan predicts, or as many as a session's context has."""


class ServingSizes(_Data, frozen=True, kw_only=True):
    """What every stage of a serving plan is told, and what all sessions together can expect."""

    weights: Literal["fp32", "bf16", "fp16", "int8", "int4"]
    cache: Literal["fp32", "bf16", "fp16"]
    page_tokens: int
    pages: int
    sessions: int
    context_tokens: int
    pass_tokens: int
    passes_in_flight: int
    """So many passes fill the pipeline when all sessions generate."""
    tokens_per_s_together: float
    """Predicted, all sessions generating."""
    prompt_tokens_per_s: float = 0.0
    """Predicted, of a prompt of `PROMPT_TOKENS` that nobody else disturbs, until its first token; 0: not predicted."""


class Plan(_Data, frozen=True, kw_only=True):
    """Partition + placement + schedule. Immutable; `version` 0 until the broker mints one.

    `stages` in pipeline order, with those of the job owner: the last (the loss, by default) and, where the model's
    beginning stays there, the first. Where there are several replicas: one chain after the other, numbered on.
    """

    version: int = 0
    task: Literal["train", "serve"] = "train"
    graph_hash: str
    stages: tuple[StagePlacement, ...]
    feed: str
    """Peer id of the data feed; in serving of whoever gives tokens and takes the results."""
    spares: tuple[str, ...] = ()
    """Peers that stood by when the plan was made. Those in `guards` are reserved for the job, the others are free."""
    guards: tuple[Guard, ...] = ()
    """At most one per stage."""
    snapshot_every: int = 0
    """Steps between two snapshots of a guarded stage; 0 when nobody is guarded."""
    microbatches: int
    step_time_s: float
    tokens_per_s: float
    single_peer_tokens_per_s: float | None = None
    bottleneck: str = ""
    reduction_s: float = 0.0
    """Of a step, what summing the replicas' gradients takes."""
    commit_s: float = 0.0
    """Of a step, what the word that it is complete takes, to the job owner and back."""
    codecs: tuple[Codec, ...] = ()
    """Training: how what crosses behind each stage but the last is packed; empty: nowhere. Nothing crosses behind the
    last stage of a replica, where `none` stands."""
    excluded: tuple[Excluded, ...] = ()
    warnings: tuple[str, ...] = ()
    certificate: Certificate
    serving: ServingSizes | None = None
    """Serving: a step is one token of one session; `tokens_per_s` is what one session gets."""
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Training: of this job up to this plan, oldest first; of very many the first and the newest. Empty: bits are those
    of the job's first plan."""

    @property
    def replicas(self) -> int:
        """Training: chains of stages, each with a share of every step's microbatches."""
        return 1 + max((stage.replica for stage in self.stages), default=0)

    def microbatches_of(self, stage: StagePlacement) -> int:
        """Training: of a step, those that cross this stage."""
        return len(range(stage.replica, self.microbatches, self.replicas))

    def is_next(self, one: StagePlacement, other: StagePlacement) -> bool:
        """Whether what `one` makes goes to `other` or the other way round: neighbours in one chain."""
        return one.replica == other.replica and abs(one.stage - other.stage) == 1
