"""The backend interface: what a framework must do to run stages (the paper's execution plane).

Decides nothing about jobs, networks or time. Implementations: `backends.torch`, `backends.jax` and, forward only,
`backends.onnxruntime`. One conformance suite runs on each. All calls are blocking and made from one thread at a time.
Tensors come and go as `HostTensor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, Protocol

from fusionai.ir.schema import Graph
from fusionai.primitives.pace import Pace, ServingPace
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Mode, Saving, StageOptions

WorksIn = Literal["caller", "threads", "device"]
"""Whose time a piece of work takes: the calling thread's (and of those that work with it), other threads' of this
process while the caller waits, or a device's beside the processor."""


@dataclass(frozen=True, slots=True)
class Call:
    """Which microbatch a call is about. Dropout is keyed by (seed of the job, step, microbatch, node id)."""

    mode: Mode
    step: int
    microbatch: int
    """Global index within the step, over all replicas."""
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a device: the part of a report that takes time to measure and may be remembered."""

    flops_per_s: float
    """Sustained float32 matrix-product speed with the allowed threads."""
    memory_bandwidth_bytes_per_s: float
    scratch_bytes_per_s: float = 0.0
    """Of the file that optimizer state may lie in, read and written; 0: not measured."""
    pace: Pace | None = None
    """In training (`backends.pace`); None: not measured."""
    serving: tuple[ServingPace, ...] = ()
    """By weight format; none: not measured."""
    attention_flops_per_s: float = 0.0
    """Of a piece of a prompt, against keys and values in a cache; 0: not measured."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a backend found out about its device (`Backend.probe`)."""

    backend: str
    backend_version: str
    device: str
    device_name: str
    flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    threads: int
    fingerprint: str
    """Hash of versions, instruction set, threads and the exact bits of a probe computation: equal fingerprints give
    bit-equal results."""
    scratch_bytes_per_s: float = 0.0
    pace: Pace | None = None
    serving: tuple[ServingPace, ...] = ()
    attention_flops_per_s: float = 0.0
    unsupported_ops: tuple[str, ...] = ()
    """Of the allow-list."""
    tasks: tuple[Literal["train", "serve"], ...] = ("train", "serve")
    weight_formats: tuple[str, ...] = ()
    """In serving; empty: all there are."""
    savings: tuple[Saving, ...] = ("recompute", "offload", "offload_weights")
    """What it can do in training to fit a small memory."""

    @property
    def speeds(self) -> Speeds:
        return Speeds(
            flops_per_s=self.flops_per_s,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            scratch_bytes_per_s=self.scratch_bytes_per_s,
            pace=self.pace,
            serving=self.serving,
            attention_flops_per_s=self.attention_flops_per_s,
        )


NOTHING_BEGUN: Final[Mapping[str, HostTensor]] = MappingProxyType({})


class StageProgram(Protocol):
    """One loaded stage with its parameters, contexts of microbatches in flight and partial gradient sums.

    State entries: `model/<key>` and `optimizer/<key>/<slot>`, keys as in `ParamSpec.key`.
    """

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
        """These entries of the state, as copies, in this order. Raises `ExecutionError` on an unknown one."""
        ...

    def forward(
        self, call: Call, inputs: Mapping[str, HostTensor], wanted: Sequence[str] | None = None
    ) -> dict[str, HostTensor]:
        """Values of `wanted` (graph output meanings; None: all). In mode `train` the context is kept until
        `backward`; in other modes nothing is kept. Sizes are checked against the graph's symbols before anything is
        allocated."""
        ...

    def backward(
        self, call: Call, gradients: Mapping[str, HostTensor], begun: Mapping[str, HostTensor] = NOTHING_BEGUN
    ) -> dict[str, HostTensor]:
        """Add this microbatch's parameter gradients to the sums; return gradients of those in `grad_inputs`: inputs,
        and parameters by their value names, which are returned and not added.

        `gradients`: graph output meaning -> gradient; outputs not named get none. `begun`: input or parameter value ->
        the sum of what later stages contribute to its gradient. This stage's contributions are added to it one by one,
        the last use first, as one process would."""
        ...

    def weight_gradients(self, call: Call) -> None:
        """Compute what `backward` of this microbatch left undone: it may return input gradients first, so that the
        stage before goes on, and leave weight gradients to a moment when this stage would wait (zero bubble, arXiv
        2401.10241). Called once per microbatch in their order when `options.weight_lag` is above 0, never otherwise;
        the sums are the same bits either way. A backend that leaves nothing undone does nothing here."""
        ...

    def gradient_norms(self) -> dict[str, float]:
        """Euclidean norm per trainable parameter key of the summed gradient, exact bits of the float32 norm.
        A parameter without gradient is absent."""
        ...

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]: ...

    def import_gradients(self, entries: Iterable[tuple[str, HostTensor]], *, add: bool) -> None:
        """Replace (or add to) the sums of these parameters: tied weights, replicas.

        One process adds the uses of a tied weight within a microbatch before it adds microbatches. Stages that share
        one get those bits by exporting their part after each microbatch and replacing their sum by zeros."""
        ...

    def apply(self, *, scale: float, learning_rate: float) -> None:
        """Scale the sums, take one optimizer step, clear the sums."""
        ...

    def discard(self) -> None:
        """Drop contexts and partial sums; state stays."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Parameters, optimizer state and gradients held now."""
        ...


class Backend(Protocol):
    """A framework on a device."""

    name: str
    device: str

    @property
    def works_in(self) -> WorksIn: ...

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Measures the device, a run of a few seconds at most. With `speeds` known from before it does not measure
        them; everything else, above all the fingerprint, is of this moment."""
        ...

    def warm_up(self) -> None:
        """Do now what a framework puts off to its first training step, some seconds of it: a machine that stands by may
        be needed at once."""
        ...

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        """Those of `ops` this backend can't run, sorted."""
        ...

    def load(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        memory_limit_bytes: int | None = None,
    ) -> StageProgram:
        """Prepare a stage of a *validated* graph. Every value's size at the symbols' largest values is computed
        (without allocating) and checked against the graph's declaration and the limit: `ExecutionError` otherwise."""
        ...

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """(total norm, scale) exactly as `torch.nn.utils.clip_grad_norm_` computes them from per-parameter norms in
        `model.parameters()` order."""
        ...
