"""The backend interface: what a framework must implement to run stages (the paper's execution plane).

Backends compute; jobs, networks and time belong to their callers. Each implementation has a folder in this package, and
one conformance suite tests them all. All calls block and come from one thread at a time. Tensors are passed in and out
as `HostTensor`.

The serving side: a stage is paged memory and a program. The caller says which session has which pages and what is
dropped (`coordination.serving.driver` decides it for the whole pipeline). Tokens of many sessions are packed along the
sequence of one call, with batch size 1. Positions follow from the segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from fusionai.ir.schema import Graph
from fusionai.primitives.pace import ServingSpeed, TrainingSpeed
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Mode, Saving, StageOptions
from fusionai.wire.serving import Segment, ServeOptions

WorksIn = Literal["caller", "threads", "device"]
"""Where a backend's work runs: on the calling thread (and threads that it starts to help), on other threads of this
process while the caller waits, or on a device besides the processor."""


@dataclass(frozen=True, slots=True)
class Call:
    """Identifies the microbatch of a call. Dropout is keyed by (seed of the job, step, microbatch, node id)."""

    mode: Mode
    step: int
    microbatch: int
    """Global index within the step, over all replicas."""
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a device: the part of a device report that takes time to measure and may be cached."""

    flops_per_s: float
    """Sustained float32 matrix-product speed with the allowed threads."""
    memory_bandwidth_bytes_per_s: float
    scratch_bytes_per_s: float = 0.0
    """Speed of reading and writing the file that optimizer state may be offloaded to; 0: not measured."""
    pace: TrainingSpeed | None = None
    """Pace of training (`backends.measurement`); None: not measured."""
    serving: tuple[ServingSpeed, ...] = ()
    """One entry per weight format; empty: not measured."""
    attention_flops_per_s: float = 0.0
    """Speed of a prompt chunk's attention over cached keys and values; 0: not measured."""

    def figures(self) -> dict[str, Any]:
        """Return the speeds by name."""
        return {speed.name: getattr(self, speed.name) for speed in fields(Speeds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport(Speeds):
    """Properties and speeds of a backend's device, as `Backend.probe` found them."""

    backend: str
    backend_version: str
    device: str
    device_name: str
    memory_bytes: int
    threads: int
    fingerprint: str
    """Hash of versions, instruction set, threads and the exact bits of a probe computation. Equal fingerprints mean
    bit-equal results."""
    unsupported_ops: tuple[str, ...] = ()
    """Operators of the allow-list that this backend lacks."""
    tasks: tuple[Literal["train", "serve"], ...] = ("train", "serve")
    weight_formats: tuple[str, ...] = ()
    """Weight formats for serving; empty: all formats."""
    savings: tuple[Saving, ...] = ("recompute", "offload", "offload_weights")
    """Memory-saving techniques that this backend supports in training."""

    @property
    def speeds(self) -> Speeds:
        return Speeds(**self.figures())


NOTHING_BEGUN: Final[Mapping[str, HostTensor]] = MappingProxyType({})
"""Default of `begun` in `StageProgram.backward`: no contributions of later stages."""


class StageProgram(Protocol):
    """One loaded stage with its parameters, contexts of microbatches in flight and partial gradient sums. State
    entries: `model/<key>` and `optimizer/<key>/<slot>`, keys as in `ParamSpec.key`."""

    def initialise(self) -> tuple[str, ...]:
        """Set every parameter from (options.seed, key). Returns state entries that have no initialisation rule and
        must be imported."""
        ...

    def import_state(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        """Overwrite state. Raises `ExecutionError` on an unknown entry, a wrong shape or dtype."""
        ...

    def export_state(self, parts: Sequence[Literal["model", "optimizer"]]) -> Iterator[tuple[str, HostTensor]]:
        """Stream state in canonical (sorted) order. The bytes are copies: a later `apply` does not change them."""
        ...

    def export_entries(self, names: Sequence[str]) -> list[tuple[str, HostTensor]]:
        """Return copies of these state entries, in this order. Raises `ExecutionError` on an unknown name."""
        ...

    def forward(
        self, call: Call, inputs: Mapping[str, HostTensor], wanted: Sequence[str] | None = None
    ) -> dict[str, HostTensor]:
        """Return the values of `wanted` (graph output meanings; None: all). In mode `train` the context is kept until
        `backward`; in other modes nothing is kept. Sizes are checked against the graph's symbols before anything is
        allocated."""
        ...

    def backward(
        self, call: Call, gradients: Mapping[str, HostTensor], begun: Mapping[str, HostTensor] = NOTHING_BEGUN
    ) -> dict[str, HostTensor]:
        """Add this microbatch's parameter gradients to the sums and return the gradients of the values in
        `grad_inputs`.

        Those values are inputs, or parameters by their value names; gradients of such parameters are returned and not
        added. `gradients`: graph output meaning -> gradient; an output that is not named has none. `begun`: input or
        parameter value -> sum of the contributions of later stages to its gradient. This stage adds its own
        contributions one by one, those of the last use first, as a single process would.
        """
        ...

    def weight_gradients(self, call: Call) -> None:
        """Compute the weight gradients that `backward` of this microbatch deferred.

        `backward` may return input gradients first, so that the previous stage can go on, and leave weight gradients to
        a moment at which this stage would wait (zero bubble, arXiv 2401.10241). Called once per microbatch, in order,
        if `options.weight_lag` is above 0, and never otherwise. The sums have the same bits either way. A backend that
        defers nothing does nothing here.
        """
        ...

    def gradient_norms(self) -> dict[str, float]:
        """Return trainable parameter key -> Euclidean norm of the summed gradient, with the exact bits of the float32
        norm. A parameter without a gradient is absent."""
        ...

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]: ...

    def import_gradients(self, entries: Iterable[tuple[str, HostTensor]], *, add: bool) -> None:
        """Replace the gradient sums of these parameters (or add to them): for tied weights and replicas. A single
        process adds the uses of a tied weight within a microbatch before it adds microbatches. Stages that share a
        weight get the same bits by exporting their part after each microbatch and replacing their sum by zeros."""
        ...

    def apply(self, *, scale: float, learning_rate: float) -> None:
        """Scale the sums, take one optimizer step, clear the sums."""
        ...

    def discard(self) -> None:
        """Drop contexts and partial sums; state stays."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Bytes of the parameters, optimizer state and gradients held now."""
        ...


class Backend(Protocol):
    """A framework on a device."""

    name: str
    device: str

    @property
    def works_in(self) -> WorksIn: ...

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Measure the device; takes a few seconds at most. Given the `speeds` of an earlier probe, measure everything
        but those; the fingerprint is always computed afresh."""
        ...

    def warm_up(self) -> None:
        """Do now what a framework would otherwise do in its first training step, which takes some seconds, so that a
        spare can take over at once."""
        ...

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        """Return the operators among `ops` that this backend can't run, sorted."""
        ...

    def load(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        memory_limit_bytes: int | None = None,
    ) -> StageProgram:
        """Prepare a stage of a *validated* graph. Every value's size at the symbols' largest values is computed without
        allocating, and checked against the graph's declaration and the limit. Raises `ExecutionError` if a check
        fails."""
        ...

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """Return (total norm, scale), exactly as `torch.nn.utils.clip_grad_norm_` computes them from per-parameter
        norms in `model.parameters()` order."""
        ...


FEW_POSITIONS: Final = 16
"""Up to this many positions of a session, after earlier ones, give the same bits together as one by one. Chosen."""
TILE_POSITIONS: Final = 32
"""Positions of a prompt whose attention is computed together, in tiles that end at multiples of this. Prompt pieces
that also end at such multiples give the same bits whatever their lengths."""


class ServingProgram(Protocol):
    """One loaded stage with its weights and caches.

    `fusion.attention` nodes append their keys and values to the cache of each segment's session and attend to all
    positions of that session up to each position. Layers with a window keep one ring per session, as long as the window
    plus a pass; other layers are paged by the session's page table. The bits of a session's rows do not depend on what
    else is in the pass, nor on whether up to `FEW_POSITIONS` positions after the session's first pass come together or
    one by one.
    """

    def import_weights(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        """Load weights, keyed by `ParamSpec.key`, in any order, each once, with the dtypes of the model's files. Each
        weight is converted, packed or quantised in turn, and its source is released. Raises `ExecutionError` on an
        unknown key, a wrong shape, or a dtype that can't be converted."""
        ...

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of weights that were not imported yet, sorted."""
        ...

    def allocate(self) -> None:
        """Allocate the caches. A standby stage has none until it is promoted. A second call does nothing."""
        ...

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        """Return the values `wanted` (graph output meanings) for the packed positions of `segments`.

        `inputs`: the graph's inputs except `position_ids`, with shapes [1, positions, ...]. `rows`: return only these
        positions of each result. A graph without attention keeps nothing and takes any rows; `segments` may be empty
        then. Sizes are checked before anything is allocated. Raises `ExecutionError` if a segment starts beyond the
        cached positions, if its pages do not suffice or do not exist, or if more sessions need a ring than there are
        rings.
        """
        ...

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop the page tables and rings of these sessions; unknown ones are ignored."""
        ...

    def forget_all(self) -> None: ...

    @property
    def cached(self) -> dict[int, int]:
        """Session -> number of cached positions."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights as they are kept, and of the caches."""
        ...


class ServingBackend(Protocol):
    """The part of a backend that serves. A backend without it takes no part in serving jobs."""

    def serve(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> ServingProgram:
        """Prepare a stage of a validated graph. The sizes of weights and caches are computed first and checked against
        the limit; raises `ExecutionError` if they exceed it. Parameters that two stages share (tied weights) are held
        by both."""
        ...
