"""Compare a graph with its module, whole and at full width, if neither fits in memory: parameters stay in a file.

The module runs unchanged on parameters that operators read from the file when they need them
(`capture.checking.offloaded`). The graph runs the same way in the interpreter of `backends.torch`. The module's
gradients go to the file one by one as backward makes them, and the graph's gradients are compared with them one by one.
Memory holds the operands of one operator, recently read values, and a bounded part of what is saved for backward.

`capture.checking.self_check` decides when this comparison is used and which difference is too large.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import nn

from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.interpreter import compile_graph
from fusionai.backends.torch.operators import TorchContext
from fusionai.capture.capture import Captured
from fusionai.capture.checking import comparison
from fusionai.capture.checking.offloaded import OffloadedTensor, ParameterFile, SavedTensors
from fusionai.capture.checking.shrinking import TooLarge
from fusionai.capture.models.build import construct_empty
from fusionai.capture.tasks import TaskModule
from fusionai.capture.tracing import code_lines
from fusionai.ir.schema import ParamSpec
from fusionai.ir.weights import initialise
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.units import format_bytes

_LINE_EVERY_S: Final = 10.0
"""Shortest time between two lines of progress, in seconds."""
_CPU: Final = torch.device("cpu")

Progress = Callable[[str], None]


def streamed_differences(
    checked: Captured, inputs: Mapping[str, torch.Tensor], seed: int, progress: Progress
) -> comparison.WorstDifferences:
    """Run module and graph on `inputs`, in evaluation and in training with gradients, as far as the graph does either.
    Raises `TooLarge` with place and reason if the module can't be run this way."""
    with _as_too_large(checked.graph.name):
        weights = _Weights(checked, seed, progress)
    notes: list[str] = []
    task = TaskModule(weights.module, checked.task, checked.input_names)
    run = partial(_differences, checked, weights, task, inputs, DropoutKey(seed, 0, 0), notes)
    with weights.put_into(weights.module):
        # Evaluation before training, because it does not change running statistics.
        evaluation = run(training=False)[0] if checked.train and checked.evaluates else None
        forward, gradient, worst = run(training=checked.train)
    return comparison.WorstDifferences(forward, gradient, evaluation, worst, tuple(notes))


def _differences(
    checked: Captured,
    weights: _Weights,
    task: TaskModule,
    inputs: Mapping[str, torch.Tensor],
    key: DropoutKey,
    notes: list[str],
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
