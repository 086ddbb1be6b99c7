"""Measure how far two computations of the same tensors differ: outputs and gradients, relative to the expected ones.

While a module is compared in training, its draws are replaced by the graph's, in order (`SameDraws`): a module draws in
the order of its forward, the graph computes each draw from counters. `torch.utils.checkpoint` runs as a plain call,
because it would draw again in backward; gradients are the same either way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.semantic import scaled_mask, uniform
from fusionai.capture.tasks import TaskModule
from fusionai.capture.tracing.draws import IN_PLACE, draws, leaky_by_chance
from fusionai.capture.tracing.patching import patched
from fusionai.ir.graph import needed_nodes
from fusionai.ir.schema import Arg, Graph, Node
from fusionai.ir.serving import BY_MODE, RANDOM
from fusionai.primitives.tensors import HostTensor

_ROUNDING: Final = 1e-6
"""Differences of gradients up to this fraction of the largest gradient count as rounding: about 8 float32 epsilons."""
_LEAST: Final = 1e-30
"""Smallest divisor of a difference, so that tensors of zeros do not divide by zero."""
_PART_ELEMENTS: Final = 2**20
"""Elements compared at a time: float64 copies of two whole float32 tensors would take four times the memory of one."""


def from_host(tensor: HostTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with a copy of the data."""
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in the graph's form: a complex tensor as its parts in a last dimension of 2."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def relative_difference(got: HostTensor | torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference over the largest expected magnitude; infinite if only one has a NaN."""
    if tuple(got.shape) != tuple(expected.shape):
        return math.inf
    value = got.detach() if isinstance(got, torch.Tensor) else from_host(got, expected.dtype)
    difference = _apart(value, expected)
    if math.isnan(difference):
        return 0.0 if torch.equal(value.isnan(), expected.isnan()) else math.inf
    return difference / max(magnitude(expected), _LEAST) if difference else 0.0


def gradient_difference(got: torch.Tensor, wanted: torch.Tensor, largest: float) -> float:
    """Return the relative difference of a parameter's gradient. `largest`: magnitude of the largest gradient of all
    parameters. A difference below float32 rounding of `largest` is taken relative to `largest`, because some gradients
    consist of rounding errors only: that of a key projection's bias is zero."""
    if got.shape != wanted.shape:
        return math.inf
    difference = _apart(got, wanted)
    if difference <= _ROUNDING * largest:
        return difference / max(largest, _LEAST)
    return relative_difference(got, wanted)


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor, NaN if it contains one."""
    return _largest(part.double().abs().max().item() for part in _parts(tensor.detach()))


def _apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors of the same shape."""
    pairs = zip(_parts(got.detach()), _parts(wanted.detach()), strict=True)
    return _largest((one.double() - other.double()).abs().max().item() for one, other in pairs)


def _largest(values: Iterable[float]) -> float:
    largest = 0.0
    for value in values:
        if math.isnan(value):
            return value
        largest = max(largest, value)
    return largest


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ranges of the first dimension, with at most `_PART_ELEMENTS` elements unless one row has more."""
    if not tensor.numel():
        return
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    step = max(1, _PART_ELEMENTS * len(rows) // rows.numel())
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


@dataclass(frozen=True, slots=True)
class WorstDifferences:
    """Worst relative differences, as in `self_check.SelfCheck`. `worst`: the parameter whose gradient differs most, if
    known. `notes`: in which ways the comparison differed from a job's run."""

    forward: float
    gradient: float | None
    evaluation: float | None
    worst: str
    notes: tuple[str, ...]


class _Plain:
    """Stands for the autograd function that recomputes: only runs the function."""

    @staticmethod
    def apply(run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return run(*args)


def without_checkpoints() -> AbstractContextManager[None]:
    """While open, checkpointed functions keep their activations instead of recomputing them."""

    def plainly(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return patched(
        (checkpoint, "CheckpointFunction", _Plain), (checkpoint, "_checkpoint_without_reentrant_generator", plainly)
    )


_ARGUMENT: Final = {"fusion.dropout": "p", "fusion.attention": "dropout"}
_LEAKY_BY_CHANCE: Final = (torch.ops.aten.rrelu_with_noise.default, torch.ops.aten.rrelu_with_noise_.default)
_MIDDLE: Final = 0.5
"""Replaces every uniform number if nothing is drawn."""


class SameDraws(TorchDispatchMode):
    """Replaces the module's draws, in training or in evaluation, by those of `graph` at `key`. Without a key nothing is
    dropped and every uniform number is 0.5, as in `without_draws`."""

    def __init__(self, graph: Graph, key: DropoutKey | None, *, training: bool = True) -> None:
        super().__init__()
        self._nodes = [node for node in _needed(in_mode(graph, training=training)) if _draws(node, training)]
        self._key = key
        self._drawn = 0
        self._fits = True
        self._table = draws(self._uniform)

    @property
    def all_replayed(self) -> bool:
        """Return whether every draw of the module had a counterpart in the graph, and the reverse."""
        return self._fits and self._drawn == len(self._nodes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands: list[Any] = list(args)
        if func is torch.ops.aten.bernoulli_.float:
            kept = float(operands[1]) if len(operands) > 1 else 0.5
            if (mask := self._mask(operands[0], kept)) is not None:
                return operands[0].copy_(mask)
        if func in _LEAKY_BY_CHANCE:
            made, slopes = leaky_by_chance(self._uniform, *operands, **(kwargs or {}))
            operands[1].copy_(slopes)
            return operands[0].copy_(made) if func in IN_PLACE else made
        computed = self._table.get(IN_PLACE.get(func, func))
        if computed is None:
            return func(*args, **(kwargs or {}))
        made = computed(*operands, **(kwargs or {}))
        return operands[0].copy_(made) if func in IN_PLACE else made

    def _mask(self, noise: torch.Tensor, kept: float) -> torch.Tensor | None:
        """Return the mask of plain dropout; None if this is another kind of draw. Dropout divides the mask by the
        probability of keeping an element, so a mask filled with that probability drops nothing."""
        if self._key is None:
            dropped = any(_like(_probability(node), 1.0 - kept) for node in self._nodes if node.op != RANDOM)
            return torch.full_like(noise, kept) if dropped else None
        node = self._nodes[self._drawn] if self._drawn < len(self._nodes) else None
        if node is not None and node.op == RANDOM:
            return None
        self._drawn += 1
        if node is None or not _like(_probability(node), 1.0 - kept):
            self._fits = False
            return torch.full_like(noise, kept)
        p = _probability(node)
        return scaled_mask(tuple(noise.shape), p, self._key, node.id, dtype=torch.float32, device=noise.device) != 0

    def _uniform(self, like: torch.Tensor) -> torch.Tensor:
        place, self._drawn = self._drawn, self._drawn + 1
        if self._key is not None and place < len(self._nodes) and self._nodes[place].op == RANDOM:
            return uniform(like, self._key, self._nodes[place].id)
        self._fits = self._key is None
        return torch.full_like(like, _MIDDLE)


def expected_outputs(
    task: TaskModule,
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    key: DropoutKey,
    notes: list[str],
    *,
    training: bool,
    saving: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[dict[str, torch.Tensor], Graph]:
    """Run the module with the graph's draws. Returns its outputs and the graph to compare: if the module draws in
    another order, both sides are without draws, and a note says so. `saving`: opened around each forward."""
    buffers = {name: buffer.clone() for name, buffer in task.module.named_buffers()}
    replay = SameDraws(graph, key, training=training)
    with replay, saving():
        expected = task(copied(inputs))
    if replay.all_replayed:
        return expected, graph
    mode = "training" if training else "evaluation"
    notes.append(f"In {mode} the module draws random numbers in another order than the graph: compared without draws.")
    with torch.no_grad():
        for name, buffer in task.module.named_buffers():
            buffer.copy_(buffers[name])
    with SameDraws(graph, None, training=training), saving():
        return task(copied(inputs)), without_draws(graph)


def copied(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies for one forward, which may change them in place."""
    return {name: value.clone() for name, value in inputs.items()}


def without_draws(graph: Graph) -> Graph:
    """Return the same graph with every dropout probability 0 and every uniform number 0.5."""

    def kept(node: Node) -> Node:
        if node.op == RANDOM:
            return msgspec.structs.replace(node, op="aten.full_like.default", args=(*node.args, _MIDDLE))
        if _probability(node) == 0.0:
            return node
        kwargs: dict[str, Arg] = {**node.kwargs, _ARGUMENT[node.op]: 0.0}
        return msgspec.structs.replace(node, kwargs=kwargs)

    return msgspec.structs.replace(graph, nodes=tuple(kept(node) for node in graph.nodes))


def in_mode(graph: Graph, *, training: bool) -> Graph:
    """Return `graph` with each selection by mode replaced by the operand of that mode."""

    def chosen(node: Node) -> Node:
        if node.op != BY_MODE:
            return node
        return msgspec.structs.replace(node, op="aten.alias.default", args=(node.args[0 if training else 1],))

    return msgspec.structs.replace(graph, nodes=tuple(chosen(node) for node in graph.nodes))


def drawn_in_evaluation(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that draw random numbers in evaluation."""
    return tuple(node for node in _needed(in_mode(graph, training=False)) if node.op == RANDOM)


def _draws(node: Node, training: bool) -> bool:
    return node.op == RANDOM or (training and _probability(node) > 0.0)


def _needed(graph: Graph) -> tuple[Node, ...]:
    return needed_nodes(graph, {*graph.outputs.values(), *graph.state_writes})


def _like(one: float, other: float) -> bool:
    return math.isclose(one, other, abs_tol=1e-9)


def _probability(node: Node) -> float:
    value = node.kwargs.get(_ARGUMENT.get(node.op, ""), 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
