"""The planner's types: the problem as input, the immutable plan with its certificate as output.

`scheduling.planner` solves problems, `ir.cost` computes `BlockCost`, and backends and transport measure profiles.
`broker` versions plans; `execution` and `training` execute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.ir.cost import BlockCost
from fusionai.primitives.pace import ServingSpeed, TrainingSpeed
from fusionai.wire.codecs import Codec, Compression
from fusionai.wire.messages import Saving

SavingMode = Literal["auto", "never", "always"]
"""Where stages may use a technique to save memory: where the planner finds it needed, nowhere, or everywhere."""


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all types here: immutable, keyword-only, unknown fields rejected."""


class Link(_Data, frozen=True, kw_only=True):
    """Bandwidth and latency of one direction between two machines, or of an access link."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0


class PeerProfile(_Data, frozen=True, kw_only=True):
    """A peer's measured performance and the limits its provider sets."""

    peer: str
    name: str = ""
    machine: str = ""
    """Identity of the machine if this is one of its further devices; empty: the peer is its machine's first device.
    Known from the broker, which certified the device's key for that machine."""
    parts: Annotated[int, Meta(ge=1)] = 1
    """Number of members of the machine that divide the device, to work for several jobs at a time."""
    backend: str = "torch"
    backend_version: str = ""
    device: str = "cpu"
    device_name: str = ""
    flops_per_s: float
    """Measured float32 speed with `threads` threads, before `share`."""
    memory_bandwidth_bytes_per_s: float = 0.0
    pace: TrainingSpeed | None = None
    """Measured training speed; None if not measured."""
    serving: Annotated[tuple[ServingSpeed, ...], Meta(max_length=8)] = ()
    """Measured serving speed by weight format. If the requested format is missing, `flops_per_s` and
    `memory_bandwidth_bytes_per_s` are used."""
    attention_flops_per_s: float = 0.0
    """Serving: measured speed of attention to earlier positions; 0: not measured, `flops_per_s` is used."""
    host_copy_bytes_per_s: float = 0.0
    """Measured speed of copies between the device and the machine's memory; 0 if not measured, or if both are one."""
    launch_s: float = 0.0
    """Measured seconds that starting a kernel takes; 0 if not measured."""
    scratch_bytes_per_s: float = 0.0
    """Speed of reading and writing a file for optimizer state; 0 if not measured."""
    memory_bytes: int
    """Memory that the provider lends (`--max-memory`), at most the machine's available memory."""
    threads: int = 1
    share: float = 1.0
    """Fraction of the time that the provider lends, in (0, 1]."""
    fingerprint: str = ""
    uplink: Link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    downlink: Link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    unsupported_ops: tuple[str, ...] = ()
    tasks: tuple[Literal["train", "serve"], ...] = ("train", "serve")
    """Tasks that its backend supports."""
    weight_formats: tuple[str, ...] = ()
    """Weight formats that its backend supports in serving; empty if it supports all."""
    savings: tuple[Saving, ...] = ("recompute", "offload", "offload_weights")
    """Techniques to save memory that its backend supports in training."""
    roles: tuple[Literal["stage", "owner"], ...] = ("stage",)
    power_w: float | None = None
    endorsements: Annotated[tuple[Annotated[bytes, Meta(max_length=512)], ...], Meta(max_length=16)] = ()
    """Signed statements by which other keys vouch for this peer's key (`transport.security.trust`)."""
    isolation: Annotated[tuple[Annotated[str, Meta(max_length=32)], ...], Meta(max_length=16)] = ()
    """What keeps a job from the rest of the peer's machine (`backends.worker.confinement`); empty: nothing does."""

    @property
    def effective_flops_per_s(self) -> float:
        return self.flops_per_s * self.share

    def is_beside(self, other: PeerProfile) -> bool:
        """Return whether both are devices of one machine, which are lost together when it is switched off."""
        return (self.machine or self.peer) == (other.machine or other.peer)

    @property
    def divided_device(self) -> tuple[str, str, str] | None:
        """Return what is equal for the parts of one device; None for a device that is lent whole."""
        return (self.machine or self.peer, self.device, self.device_name) if self.parts > 1 else None


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """Link in one direction between two peers. `shared`: a transfer occupies the access links of both."""

    bandwidth_bytes_per_s: float
    latency_s: float
    shared: bool


_SAME_MACHINE = DirectedLink(bandwidth_bytes_per_s=inf, latency_s=0.0, shared=False)


def hop(sender: PeerProfile, receiver: PeerProfile, exceptions: Mapping[str, Link]) -> DirectedLink:
    """Return the hop from `sender` to `receiver`; free if they are the same peer. `exceptions`: `from>to` -> link.

    A transfer runs at the slower of the sender's uplink and the receiver's downlink and occupies both. An exception
    (two machines in one home, a bad route) replaces that for one direction of one pair; it occupies neither."""
    if sender.peer == receiver.peer:
        return _SAME_MACHINE
    own = exceptions.get(f"{sender.peer}>{receiver.peer}")
    if own is not None:
        return DirectedLink(own.bandwidth_bytes_per_s, own.latency_s, shared=False)
    return DirectedLink(
        bandwidth_bytes_per_s=min(sender.uplink.bandwidth_bytes_per_s, receiver.downlink.bandwidth_bytes_per_s),
        latency_s=sender.uplink.latency_s + receiver.downlink.latency_s,
        shared=True,
    )


class ServingNeeds(_Data, frozen=True, kw_only=True):
    """Requirements of a serving job on its stages. If a problem has them, its block costs are those of one position of
    a pass (`ir.cost`), with weights in the format in which they are kept."""

    weights: Literal["fp32", "bf16", "fp16", "int8", "int4", "packed"] = "fp32"
    cache: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    page_tokens: int = 16
    context_tokens: int
    """Largest number of tokens of prompt plus answer."""
    longest_tokens: int = 0
    """Largest number of tokens of prompt plus answer if the cache has room for them beyond what is wanted; 0:
    `context_tokens`."""
    sessions: int
    """Largest number of sessions at a time."""
    cache_tokens: int = 0
    """Wanted size of the cache in positions; if memory is short it is smaller, but holds one whole context."""
    pass_tokens: int = 512
    retain: bool = True
    """Whether stages keep what they sent, so that the next stage's cache can be rebuilt."""
    whole: bool = False
    """Whether every token recomputes the whole text, on average half a context."""
    text_tokens: int = 0
    """Length in tokens of the texts that the blocks' costs are of: the model is an encoder, which computes each text
    once. 0: the costs are of one position."""
    result_bytes: int = 0
    """Size of one row of logits, sent to the job owner if the head is elsewhere."""


class RolePlacement(_Data, frozen=True, kw_only=True):
    """Where the role `feed` or `loss` is placed; by default with the job owner."""

    role: Literal["feed", "loss"]
    place: Literal["owner", "pool"] = "owner"


class SharedWeight(_Data, frozen=True, kw_only=True):
    """A trainable parameter that several blocks read. If its blocks are on several machines, its gradient is added in
    another order than in one process. `blocks`: one number per use, the last use first."""

    key: str
    nbytes: int
    blocks: tuple[int, ...]
    interleaves: bool = False
    """Whether its uses return to earlier blocks: then even stages on one machine add in another order."""


class Problem(_Data, frozen=True, kw_only=True):
    """The planning problem. `blocks` are in order; those that stay with the owner
    (`scheduling.problem.embedding_and_head`) are not offered to the pool's peers."""

    task: Literal["train", "serve"] = "train"
    graph_hash: str
    blocks: tuple[BlockCost, ...]
    peers: tuple[PeerProfile, ...]
    owner: PeerProfile | None = None
    roles: tuple[RolePlacement, ...] = (RolePlacement(role="feed"), RolePlacement(role="loss"))
    kept_first: int = 0
    """Number of first blocks that stay with the job owner if `feed` is there; in serving at least one."""
    kept_last: int = 0
    """Number of last blocks that stay with the job owner if `loss` is there; at least one."""
    stages: int | None = None
    """Exact number of pool stages; None lets the planner choose."""
    microbatches: int
    microbatch_tokens: int
    optimizer_bytes_per_trainable_byte: float = 2.0
    """AdamW in float32 keeps two float32 slots per parameter."""
    links: dict[str, Link] = {}
    """Exceptions to the access-link model: `"<from>><to>"` -> link."""
    replicas: int | Literal["auto"] = 1
    """Training: number of chains of stages, each with a share of the microbatches; gradients are summed per step."""
    reduction_bytes_per_trainable_byte: float = 0.0
    """Memory for other replicas' gradients while they are summed."""
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    pinned: dict[int, str] = {}
    """Block number -> peer whose stage must hold the block."""
    incumbent: Plan | None = None
    spares_wanted: int | None = None
    takeover: Literal["exact", "tolerant"] = "exact"
    """Whether only a machine with bit-identical results (`exact`) may stand by for or take over a stage, or any."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Training: format of the matrix products, which decides the measured speed that counts."""
    compression: Compression = "none"
    """Training: how activations and gradients between stages are packed. `BlockCost` has their float32 sizes."""
    recompute: SavingMode = "never"
    """Training: whether stages recompute activations in backward; `auto`: only stages that must."""
    offload: SavingMode = "never"
    """Training: whether optimizer state is kept in a file on the peer between updates."""
    offload_weights: SavingMode = "never"
    """Training: whether weights are in a file (with an accelerator: in host memory) until a block needs them."""
    shared_weights: tuple[SharedWeight, ...] = ()
    """Training: parameters whose gradients differ in the last bits between cuts (`scheduling.training.cut_bits`)."""
    serving: ServingNeeds | None = None
    """Required for task `serve`, in which `feed` is the first block (the embedding) and `loss` the last (the head)."""

    @property
    def everyone(self) -> list[PeerProfile]:
        """The peers and, last, the job owner's machine if it is known; twice if it is a peer as well."""
        return [*self.peers, *([] if self.owner is None else [self.owner])]

    @property
    def needs(self) -> ServingNeeds:
        """What a serving job needs; the planner checked that the problem says so."""
        assert self.serving is not None, "a serving problem says what it needs"
        return self.serving

    @property
    def unit(self) -> str:
        """What speeds count: texts of an encoder, else tokens."""
        return "texts" if self.serving is not None and self.serving.text_tokens else "tokens"

    @property
    def owner_id(self) -> str:
        """Peer id of the job owner's machine; empty if it is unknown."""
        return "" if self.owner is None else self.owner.peer

    @property
    def linked(self) -> set[str]:
        """Peers with links of their own."""
        return {end for key in self.links for end in key.split(">")}

    def links_among(self, peers: AbstractSet[str]) -> dict[str, Link]:
        return {key: link for key, link in self.links.items() if peers >= set(key.split(">"))}

    def blocks_of(self, stage: StagePlacement) -> tuple[BlockCost, ...]:
        first = self.blocks[0].block
        return self.blocks[stage.blocks[0] - first : stage.blocks[1] - first]

    def name_of(self, peer: str) -> str:
        """Return the peer's display name, or its id if it has none."""
        return next((one.name for one in self.everyone if one.peer == peer and one.name), peer)


class StagePlacement(_Data, frozen=True, kw_only=True):
    """One stage on one peer. Block ranges are half-open and contiguous."""

    stage: int
    peer: str
    blocks: tuple[int, int]
    roles: tuple[Literal["feed", "loss", "stage"], ...] = ("stage",)
    replica: int = 0
    """Replica of the stage; its stages are consecutive, and microbatch m crosses replica m mod replicas."""
    in_flight: int = 1
    compute_s: float = 0.0
    """Predicted seconds of forward and backward of one microbatch."""
    send_s: float = 0.0
    """Predicted transfer seconds of one microbatch's activation and gradient over the link to the next stage."""
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    in_flight_bytes: int = 0
    """Part of `memory_bytes` that one microbatch in flight takes."""
    recompute: bool = False
    """Training: the stage keeps only its blocks' inputs and runs them again in backward, as `compute_s` includes."""
    recompute_s: float = 0.0
    """Part of `compute_s` for running blocks again."""
    recompute_saves_bytes: int = 0
    """Additional memory the stage would need if activations were kept."""
    offload: bool = False
    """Training: optimizer state is in a file on the peer, which every update reads and writes."""
    offload_s: float = 0.0
    """Seconds per step for reading and writing that file."""
    offload_saves_bytes: int = 0
    """Additional memory the stage would need without it."""
    offload_weights: bool = False
    """Training: weights are in a file (with an accelerator: in host memory) and are read block by block."""
    offload_weights_s: float = 0.0
    """Seconds per step for reading weights for each microbatch, and for the update."""
    offload_weights_saves_bytes: int = 0
    """Additional memory the stage would need without it."""
    fingerprint: str = ""
    """Fingerprint of the peer's numerics when it got the stage; empty if unknown, which equals no other."""
    weight_bytes: int = 0
    """Serving: part of `memory_bytes` for weights, in the format in which they are kept."""
    cache_bytes: int = 0
    """Serving: part of `memory_bytes` for keys, values and the retained boundary."""


class Excluded(_Data, frozen=True, kw_only=True):
    peer: str
    reason: str


class Certificate(_Data, frozen=True, kw_only=True):
    """How close the plan is to the best possible. `optimality_gap` = bound / predicted - 1, 0.0 if proven optimal."""

    method: str
    exact: bool
    bound_tokens_per_s: float
    optimality_gap: float
    explored: int = 0

    @classmethod
    def of(cls, method: str, speed: float, bound: float, *, exact: bool = False, explored: int = 0) -> Certificate:
        """Return the certificate for a speed and a bound in tokens per second; the bound is at least the speed."""
        bound = max(bound, speed)
        return cls(
            method=method, exact=exact, bound_tokens_per_s=bound, optimality_gap=bound / speed - 1, explored=explored
        )


class Standby(_Data, frozen=True, kw_only=True):
    """A spare that keeps snapshots of a stage, or of several, and takes it over when its peer is lost."""

    stage: int
    peer: str
    exact: bool = True
    """Whether the two peers' fingerprints are equal, so that results are bit-identical."""
    beside: bool = False
    """Whether it is another device of the machine that runs the stage. It takes over when the device fails, but not
    when the machine is switched off, and it does not check the stage's work."""


class TolerantTakeover(_Data, frozen=True, kw_only=True):
    """A plan change after which results may differ from those of the plan before. The cause is machines with other
    numerics, or a cut that adds gradients in another order."""

    step: int
    """Number of steps committed before the change; the next step is the first that may differ."""
    stages: tuple[int, ...]
    """Stages of the new plan that run on machines with other numerics."""
    peers: tuple[str, ...]
    """Peers of these stages."""
    recut: bool = False
    """Whether the stages were cut anew."""
    tolerance: float = 0.0
    """Largest relative difference of losses (`backends.tolerance`)."""


PROMPT_TOKENS: Final = 2048
"""Length of the prompt for which a plan predicts the prompt speed, at most a session's context."""


class ServingSizes(_Data, frozen=True, kw_only=True):
    """Sizes that all stages of a serving plan share, and the predicted speed of all sessions together."""

    weights: Literal["fp32", "bf16", "fp16", "int8", "int4", "packed"]
    cache: Literal["fp32", "bf16", "fp16", "int8"]
    page_tokens: int
    pages: int
    sessions: int
    context_tokens: int
    pass_tokens: int
    passes_in_flight: int
    """Number of passes that keeps the pipeline busy when all sessions generate."""
    tokens_per_s_together: float
    """Predicted tokens per second of all sessions together."""
    prompt_tokens_per_s: float = 0.0
    """Predicted speed of a prompt of `PROMPT_TOKENS`, without other requests; 0 if not predicted."""
    text_tokens: int = 0
    """If set, the plan is of an encoder, and its speeds count texts of this many tokens instead of tokens."""


class Plan(_Data, frozen=True, kw_only=True):
    """Partition, placement and schedule of a job; immutable. `version` is 0 until the broker assigns one. `stages` are
    in pipeline order and include those of the job owner: the last (the loss, by default) and, if the model's beginning
    stays there, the first. Several replicas follow one after the other, with consecutive stage numbers."""

    version: int = 0
    task: Literal["train", "serve"] = "train"
    graph_hash: str
    stages: tuple[StagePlacement, ...]
    feed: str
    """Peer id of the data feed; in serving, of the machine that sends tokens and receives the results."""
    spares: tuple[str, ...] = ()
    """Standby peers when the plan was made. Those in `standbys` are reserved for the job, the others are free."""
    standbys: tuple[Standby, ...] = msgspec.field(default=(), name="guards")
    """Warm standbys, at most one per stage."""
    snapshot_every: int = 0
    """Steps between two snapshots of a stage with a standby; 0 if no stage has one."""
    microbatches: int
    step_time_s: float
    tokens_per_s: float
    single_peer_tokens_per_s: float | None = None
    bottleneck: str = ""
    reduction_s: float = 0.0
    """Seconds of a step for summing the replicas' gradients."""
    commit_s: float = 0.0
    """Seconds of a step for reporting its completion to the job owner and for the owner's confirmation."""
    codecs: tuple[Codec, ...] = ()
    """Training: codec of the boundary after each stage but the last; empty if nothing is packed. Nothing crosses after
    the last stage of a replica, whose entry is `none`."""
    excluded: tuple[Excluded, ...] = ()
    warnings: tuple[str, ...] = ()
    certificate: Certificate
    serving: ServingSizes | None = None
    """Set for serving plans, in which a step is one token and `tokens_per_s` one session's speed."""
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Training: plan changes of this job that may have changed bits, oldest first; if there are very many, the first
    and the newest. Empty: results are bit-identical to the job's first plan."""

    @property
    def replicas(self) -> int:
        """Number of chains of stages, each with a share of every step's microbatches; 1 in serving."""
        return 1 + max((stage.replica for stage in self.stages), default=0)

    @property
    def ranges(self) -> tuple[tuple[int, tuple[int, int]], ...]:
        """(replica, block range) of every stage: equal for plans with the same cut."""
        return tuple((stage.replica, stage.blocks) for stage in self.stages)

    @property
    def standbys_beside(self) -> frozenset[tuple[int, str]]:
        """(stage, peer) of every standby on the machine that runs the stage."""
        return frozenset((standby.stage, standby.peer) for standby in self.standbys if standby.beside)

    def microbatches_of(self, stage: StagePlacement) -> int:
        """Return the number of a step's microbatches that cross this stage, in training."""
        return len(range(stage.replica, self.microbatches, self.replicas))

    def is_next(self, one: StagePlacement, other: StagePlacement) -> bool:
        """Return whether the two stages are neighbours in one chain, in either order."""
        return one.replica == other.replica and abs(one.stage - other.stage) == 1
