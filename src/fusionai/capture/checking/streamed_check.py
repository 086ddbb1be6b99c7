"""Compare a graph with its module, whole and at full width, if neither fits in memory: parameters stay in a file.

The module runs unchanged on parameters that operators read from the file when they need them. An `OffloadedTensor` has
the shape of a parameter and no memory: every torch operator reads the values of such arguments first, and a view of one
is another `OffloadedTensor`. So autograd saves no values. The graph runs the same way in the interpreter of
`backends.torch`. The module's gradients go to the file one by one as backward makes them, and the graph's gradients are
compared with them one by one. Memory holds the operands of one operator, recently read values, and a bounded part of
what is saved for backward.

`capture.checking.self_check` decides when this comparison is used and which difference is too large.
"""

from __future__ import annotations

import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.interpreter import compile_graph
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.slots import DiskSlots
from fusionai.capture.capture import Captured
from fusionai.capture.checking import comparison, module_state
from fusionai.capture.checking.shrinking import TooLarge
from fusionai.capture.models.build import construct_empty
from fusionai.capture.tasks import TaskModule
from fusionai.capture.tracing import code_lines
from fusionai.ir.schema import ParamSpec
from fusionai.ir.weights import initialise
from fusionai.primitives.environment import scratch_directory
from fusionai.primitives.errors import ExecutionError, FusionError, ModelError
from fusionai.primitives.units import format_bytes

_LINE_EVERY_S: Final = 10.0
"""Shortest time between two lines of progress, in seconds."""
_CPU: Final = torch.device("cpu")

Progress = Callable[[str], None]


def streamed_differences(
    checked: Captured,
    inputs: Mapping[str, torch.Tensor],
    earlier: Mapping[str, torch.Tensor],
    seed: int,
    progress: Progress,
) -> comparison.WorstDifferences:
    """Run module and graph in training with gradients on `inputs`, before it in evaluation on `earlier` ones, as far as
    the graph does either. What the module keeps of the earlier run outside its buffers shows as a difference. Raises
    `TooLarge` with place and reason if the module can't be run this way."""
    with _as_too_large(checked.graph.name):
        weights = _Weights(checked, seed, progress)
    notes: list[str] = []
    task = TaskModule(weights.module, checked.task, checked.input_names)
    run = partial(_differences, checked, weights, task, DropoutKey(seed, 0, 0), notes)
    before = module_state.attributes(weights.module)
    with weights.put_into(weights.module):
        evaluation, written = None, list[str]()
        with module_state.restored_buffers(weights.module, written):  # an evaluation of a job changes none
            if checked.train and checked.evaluates:
                evaluation = run(earlier, training=False)[0]
            elif checked.train:
                with _as_too_large(checked.graph.name), torch.no_grad(), comparison.without_checkpoints():
                    task.train()(comparison.copied(earlier))
        forward, gradient, worst = run(inputs, training=checked.train)
    if written and evaluation is not None:
        notes.append(module_state.written_note(written))
    if named := module_state.changed_attributes(before, weights.module):
        notes.append(module_state.attributes_note(named))
    return comparison.WorstDifferences(forward, gradient, evaluation, worst, tuple(notes))


def _differences(
    checked: Captured,
    weights: _Weights,
    task: TaskModule,
    key: DropoutKey,
    notes: list[str],
    inputs: Mapping[str, torch.Tensor],
    *,
    training: bool,
) -> tuple[float, float | None, str]:
    """Run module and graph in one mode. Returns the worst difference of the outputs and, in training with a loss, that
    of the gradients and the key of its parameter."""
    graph, mode = checked.graph, "training" if training else "evaluation"
    with_gradients = training and "loss" in graph.outputs
    task.train(training)
    largest = 0.0

    def keep(parameter: str, gradient: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, comparison.magnitude(gradient))
        weights.file.write_gradient(parameter, gradient)

    with _as_too_large(graph.name), _saved(with_gradients) as saving, comparison.without_checkpoints():
        weights.begin(f"{mode} of the module")
        # If the draws differ in order, both sides are without draws.
        expected, graph = comparison.expected_outputs(task, graph, inputs, key, notes, training=training, saving=saving)
        if with_gradients and expected["loss"].requires_grad:
            weights.begin("gradients of the module")
            with weights.watched(weights.of_module, keep):
                expected["loss"].backward()
    expected = {name: value.detach() for name, value in expected.items()}
    weights.begin(f"{mode} of the graph")
    compared = _Compared(weights, largest)
    interpreter = compile_graph(graph, graph.outputs.keys(), with_state_writes=training, device=_CPU)
    values = {
        name: int(value) if graph.values[name].dtype == "symint" else value
        for name, value in inputs.items()
        if name in interpreter.inputs
    }
    params = {value: weights.of_graph[spec.key] for value, spec in graph.params.items()}
    with _saved(with_gradients) as saving:
        with saving():
            got, writes = interpreter.run(TorchContext(training, key), values, params)
        if with_gradients and got["loss"].requires_grad:
            weights.begin("gradients of the graph")
            with weights.watched(weights.of_graph, compared):
                got["loss"].backward()
    gradient, worst = compared.finish() if with_gradients else (None, "")
    buffers = {
        name: comparison.as_real(buffer) for name, buffer in checked.source.built.buffers(weights.module).items()
    }
    found = [comparison.relative_difference(got[name], value) for name, value in expected.items() if name in got]
    found += [comparison.relative_difference(value, buffers[name]) for name, value in writes.items()]
    return max(found), gradient, worst


class _Weights:
    """The module without memory, its parameters, and the graph's parameters. `of_module`, `of_graph`: by key. The
    graph's buffers and constants are in memory, as they are while capturing."""

    def __init__(self, checked: Captured, seed: int, progress: Progress) -> None:
        built, specs = checked.source.built, {spec.key: spec for spec in checked.graph.params.values()}
        self._progress = progress
        self._said_s = self._begun_s = time.monotonic()
        self._what = ""
        self._read: set[str] = set()
        self._read_bytes = 0
        # A module that was built in real memory stays there: a second one would take as much again.
        self.module = built.module if built.real else construct_empty(built)
        parameters = built.parameters(self.module)
        self._total_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self.file = ParameterFile({
            key: (str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), parameter.requires_grad)
            for key, parameter in parameters.items()
        })  # fmt: skip
        progress(f"self-check: {format_bytes(self._total_bytes)} of parameters go to a file")
        owed = _written(self.file, parameters, specs, seed, self.begin, self._noted)
        self._state: dict[str, torch.Tensor] = {}
        wanted = owed | {key for key, spec in specs.items() if spec.kind != "parameter"}
        for key, tensor in checked.state(wanted):
            if key in parameters:
                self.file.write(key, comparison.from_host(tensor, parameters[key].dtype))
                self._noted(key, parameters[key].nbytes)
            else:
                self._state[key] = comparison.from_host(tensor, getattr(torch, tensor.dtype))
        buffers = built.buffers(self.module)
        with torch.no_grad():
            for key, value in self._state.items():
                if key in buffers:
                    comparison.as_real(buffers[key]).copy_(value)
        self.of_module = {
            key: self._leaf(key, parameter, trained=parameter.requires_grad) for key, parameter in parameters.items()
        }
        self.of_graph: dict[str, torch.Tensor] = {
            key: self._leaf(key, parameters[key], trained=spec.trainable)
            if spec.kind == "parameter"
            else self._state[key]
            for key, spec in specs.items()
        }
        self._places = {id(parameter): key for key, parameter in parameters.items()}

    def begin(self, what: str) -> None:
        """Start a phase: progress lines name it from now on."""
        self._what = what
        self._read.clear()
        self._read_bytes = 0

    def values(self, key: str) -> torch.Tensor:
        value = self.file.read(key)
        self._noted(key, value.nbytes)
        return value

    @contextmanager
    def put_into(self, module: nn.Module) -> Iterator[None]:
        """While open, `module` has the parameters of `of_module`. Restores buffers and mode at the end."""
        mode, buffers = module.training, {name: buffer.clone() for name, buffer in module.named_buffers()}
        before: list[tuple[nn.Module, str, nn.Parameter]] = [
            (child, name, parameter)
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None
        ]
        try:
            for child, name, parameter in before:
                # Set with setattr instead of in the table, because recurrent layers keep a second list of their
                # parameters.
                setattr(child, name, self.of_module[self._places[id(parameter)]])
            yield
        finally:
            for child, name, parameter in before:
                setattr(child, name, parameter)
            module.train(mode)
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    buffer.copy_(buffers[name])

    @contextmanager
    def watched(self, leaves: Mapping[str, torch.Tensor], hook: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
        """While open, pass each gradient to `hook` as backward makes it, without keeping it."""

        def taken(key: str, leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            hook(key, gradient.to_dense() if gradient.layout != torch.strided else gradient)

        handles = [
            leaf.register_post_accumulate_grad_hook(partial(taken, key))
            for key, leaf in leaves.items()
            if leaf.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leaf(self, key: str, parameter: nn.Parameter, *, trained: bool) -> torch.Tensor:
        made = OffloadedTensor(parameter.detach().to("meta"), partial(self.values, key)).requires_grad_(trained)
        made._is_param = True
        return made

    def _noted(self, key: str, nbytes: int) -> None:
        if key not in self._read:
            self._read.add(key)
            self._read_bytes += nbytes
        now_s = time.monotonic()
        if now_s - self._said_s >= _LINE_EVERY_S:
            self._said_s = now_s
            share = self._read_bytes / max(1, self._total_bytes)
            self._progress(f"self-check: {self._what}, {share:.0%} of the parameters ({now_s - self._begun_s:.0f} s)")


def _written(
    file: ParameterFile,
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ParamSpec],
    seed: int,
    begin: Progress,
    noted: Callable[[str, int], None],
) -> set[str]:
    """Write the initial values of parameters that have an initialisation program; return the other keys."""
    begin("initialisation")
    others: set[str] = set()
    for key, parameter in parameters.items():
        spec = specs.get(key)
        if spec is None or spec.init is None:
            others.add(key)
            continue
        value = torch.from_numpy(np.asarray(initialise(key, spec.shape, spec.dtype, spec.init, seed)))
        # numpy has no bfloat16: its values come as raw bits.
        file.write(key, value.view(parameter.dtype) if spec.dtype == "bfloat16" else value.to(parameter.dtype))
        noted(key, parameter.nbytes)
    return others


class _Compared:
    """Takes the graph's gradients and compares each with the module's; a missing one counts as zeros."""

    def __init__(self, weights: _Weights, largest: float) -> None:
        self._weights = weights
        self._largest = largest
        self._rest = {key: leaf for key, leaf in weights.of_module.items() if leaf.requires_grad}
        self._found: tuple[float, str] = (0.0, "")

    def __call__(self, key: str, gradient: torch.Tensor) -> None:
        if self._rest.pop(key, None) is not None:
            wanted = self._weights.file.read_gradient(key)
            self._take(key, gradient, torch.zeros_like(gradient) if wanted is None else wanted)

    def finish(self) -> tuple[float, str]:
        """Return the worst difference and the key of its parameter."""
        for key in self._rest:
            wanted = self._weights.file.read_gradient(key)
            if wanted is not None:
                self._take(key, torch.zeros_like(wanted), wanted)
        return self._found

    def _take(self, key: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        self._found = max(self._found, (comparison.gradient_difference(got, wanted, self._largest), key))


@contextmanager
def _saved(used: bool) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """Yield a function whose result is opened around a forward; the backward must run while this context is open."""
    saved = SavedTensors()
    try:
        with torch.set_grad_enabled(used):
            yield saved.hooks if used else nullcontext
    finally:
        saved.close()


@contextmanager
def _as_too_large(name: str) -> Iterator[None]:
    """Raise `TooLarge` for any failure of running a module this way: the model may be correct."""
    try:
        yield
    except ExecutionError as error:
        raise TooLarge(f"{name} is too large to check in memory, and {error.message}", hint=error.hint) from error
    except FusionError:
        raise
    except Exception as error:  # the owner's module may raise anything
        where = code_lines.of_error(error)
        raise TooLarge(
            f"{name} is too large to check in memory, and with its parameters in a file it fails"
            f"{where}: {type(error).__name__}: {code_lines.reason(error)}.",
            hint="Check a smaller model built the same way first.",
        ) from error


KEPT_BYTES: Final = 2**28
"""Values that stay in memory, most recently read first: successive operators often read parts of one parameter."""
SAVED_BYTES: Final = 2**29
"""Tensors saved for backward that stay in memory; those saved later go to a file."""
_SMALL_BYTES: Final = 2**16
"""Smaller tensors are never moved to the file."""
_VALUE: Final = "value"
_GRADIENT: Final = "gradient"
_UNMARKED_VIEWS: Final = frozenset({torch.ops.aten._unsafe_view.default})
"""Views whose schema does not mark them as views."""


class OffloadedTensor(torch.Tensor):
    """A tensor on the CPU whose values `read` returns whenever an operator needs them. `like`: its meta tensor."""

    like: torch.Tensor
    read: Callable[[], torch.Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls: type[OffloadedTensor], like: torch.Tensor, read: Callable[[], torch.Tensor]) -> OffloadedTensor:
        made: OffloadedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=torch.device("cpu"),
        )
        made.like = like
        made.read = read
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return _view(func, args, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, OffloadedTensor):
                raise ModelError(
                    f"the module's forward writes to a parameter of shape {list(value.shape)} by {func}.",
                    hint="Register values that forward changes as buffers.",
                )
        read: tuple[tuple[Any, ...], dict[str, Any]]
        read = pytree.tree_map_only(OffloadedTensor, lambda tensor: tensor.read(), (args, kwargs))
        return func(*read[0], **read[1])


def _is_view(func: Any) -> bool:
    if func in _UNMARKED_VIEWS:
        return True
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, *rest = args
    likes = func(source.like, *rest, **kwargs)
    if isinstance(likes, torch.Tensor):
        return OffloadedTensor(likes, lambda: func(source.read(), *rest, **kwargs))
    return [
        OffloadedTensor(like, lambda place=place: func(source.read(), *rest, **kwargs)[place])
        for place, like in enumerate(likes)
    ]


class ParameterFile:
    """Values and gradients by key, in an unnamed file. `specs`: key -> (dtype, shape, whether it is trained). Raises
    `ExecutionError` if the disk has no room for all of it."""

    def __init__(self, specs: Mapping[str, tuple[str, tuple[int, ...], bool]]) -> None:
        layout: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
        for key, (dtype, shape, trained) in specs.items():
            layout[key, _VALUE] = (dtype, shape)
            if trained:
                layout[key, _GRADIENT] = (dtype, shape)
        self._slots = DiskSlots(layout, torch.device("cpu"), "parameters of the self-check")
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._kept_bytes = 0

    def write(self, key: str, value: torch.Tensor) -> None:
        self._slots.write(key, _VALUE, value)

    def read(self, key: str) -> torch.Tensor:
        """Return the values. Callers must not write to them, because other readers may share them."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        value = self._slots.read(key, _VALUE)
        assert value is not None, "every parameter is written before the first is read"
        self._kept[key] = value
        self._kept_bytes += value.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.nbytes
        return value

    def write_gradient(self, key: str, value: torch.Tensor) -> None:
        self._slots.write(key, _GRADIENT, value)

    def read_gradient(self, key: str) -> torch.Tensor | None:
        """Return the gradient; None if none was written."""
        return self._slots.read(key, _GRADIENT)


@dataclass(frozen=True, slots=True)
class _InFile:
    """Position of a saved tensor in the file: its sizes in memory order, and the dimension that each of them is."""

    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    dims: tuple[int, ...]


class SavedTensors:
    """Tensors that autograd saves for one backward: in memory up to `SAVED_BYTES`, then in a file."""

    def __init__(self, limit_bytes: int = SAVED_BYTES) -> None:
        self._room_bytes = limit_bytes
        self._file: Any = None
        self._end = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | _InFile:
        if isinstance(saved, OffloadedTensor) or saved.layout != torch.strided or saved.nbytes < _SMALL_BYTES:
            return saved
        if saved.nbytes <= self._room_bytes:
            self._room_bytes -= saved.nbytes
            return saved
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=scratch_directory(), buffering=0)  # noqa: SIM115  see `close`
        # Strides are kept: a product of transposed operands may round differently.
        strides = saved.stride()
        dims = tuple(sorted(range(saved.ndim), key=lambda dim: -strides[dim]))
        plain = saved.detach().resolve_conj().resolve_neg().permute(dims).contiguous()
        place = _InFile(self._end, saved.dtype, tuple(plain.shape), dims)
        data = plain.view(-1).view(torch.uint8).numpy().data
        self._file.seek(self._end)
        while data:
            data = data[self._file.write(data) :]
        self._end += plain.nbytes
        return place

    def _unpack(self, saved: torch.Tensor | _InFile) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        plain = torch.empty(saved.sizes, dtype=saved.dtype)
        into = plain.view(-1).view(torch.uint8).numpy().data
        self._file.seek(saved.offset)
        while into:
            read = self._file.readinto(into)
            if not read:
                raise OSError("the file of saved tensors ended early")
            into = into[read:]
        return plain.permute([saved.dims.index(dim) for dim in range(len(saved.dims))])
