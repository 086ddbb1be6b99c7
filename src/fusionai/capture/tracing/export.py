"""Trace a module into functional ATen operations with `torch.export` on fake tensors; allocates no tensor memory.

Chooses the dynamic sizes, keeps gradient stops through functionalisation, and turns tracing failures into errors about
the user's model. The exported program never leaves this process and is never saved: `capture.graph.lowering` turns it
into the IR."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import operator
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, Final, TextIO

import torch
from torch import fx, nn
from torch._export.utils import _collect_all_valid_cia_ops
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, exported_program
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusionai.capture.tasks import InputSpec, TaskModule
from fusionai.capture.tracing import code_lines, functions
from fusionai.capture.tracing.attention import scaled_dot_product
from fusionai.capture.tracing.by_mode import both_modes
from fusionai.capture.tracing.complex_parts import real_parts
from fusionai.capture.tracing.complex_rules import RULES
from fusionai.capture.tracing.custom_gradients import refuse_hooks, watched_gradients
from fusionai.capture.tracing.decomposing import decomposed
from fusionai.capture.tracing.decompositions import composed, rearranging, resizing
from fusionai.capture.tracing.draws import draws, uniform
from fusionai.capture.tracing.fixed_sets import fixed_sets
from fusionai.capture.tracing.patching import patched
from fusionai.primitives.errors import ModelError


class LongestApart(ModelError):
    """The model treats a sequence of the largest length asked for in another way than shorter ones, such as one as
    long as a table of positions that it cuts for others. `length`: that length."""

    def __init__(self, message: str, length: int) -> None:
        super().__init__(message, hint=_at_most(length - 1))
        self.length = length


class OneLength(ModelError):
    """The model works at one length of the sequence only."""


def _at_most(size: int) -> str:
    return f"Ask for at most {size}."


_EXAMPLE_SIZES = {"b": 3, "s": 13}
"""Sizes of the symbols while tracing: odd and different, so that they rarely equal a size of the model."""


def export(task: TaskModule, inputs: tuple[InputSpec, ...], symbols: Mapping[str, tuple[int, int]]) -> ExportedProgram:
    """Trace `task` in functional form, with every symbol's range. Raises `ModelError` if it can't be traced, and in
    training if it defines gradients of its own."""
    if task.module.training:
        refuse_hooks(task.module)
    sizes = {name: min(max(_EXAMPLE_SIZES.get(name, 7), low), high) for name, (low, high) in symbols.items()}
    dynamic = {
        name: Dim(name, min=low, max=high) for name, (low, high) in symbols.items() if low < high and sizes[name] > 1
    }
    example = {spec.name: torch.zeros(_shape(spec, sizes), dtype=spec.dtype) for spec in inputs}
    shapes = {
        spec.name: {i: dynamic[dim] for i, dim in enumerate(spec.dims) if isinstance(dim, str) and dim in dynamic}
        for spec in inputs
    }
    with warnings.catch_warnings(), _no_collection(), _fake_parameters(task) as mode, tracing(TracingContext(mode)):
        warnings.simplefilter("ignore")
        try:
            with (
                _quiet_export(),
                fixed_sets(task.module),
                watched_gradients() as gradients,
                functions.averaged_statistics(),  # before `both_modes`, which wraps the current forward
                both_modes(task.module),
                functions.recognised_causal_masks(),
                functions.unchecked_arguments(),
                functions.refused_by_name(),
                functions.Functions(),
            ):
                program = torch.export.export(task, (example,), dynamic_shapes=(shapes,), strict=False)
            _keep_gradient_stops(program)
            with _quick_tables():
                program = decomposed(program, decompositions(), mode)
            real_parts(program, RULES)
        except ModelError:
            raise
        except Exception as error:
            raise _model_error(error, inputs) from error
    if task.module.training:
        gradients.require_derived()
    return program


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return decompositions of operators into several of the vocabulary. Recurrent layers fix the sequence's length."""
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = {
        aten._weight_norm.default: _weight_norm,
        aten.native_batch_norm.default: _without_running_statistics,
        aten.scaled_dot_product_attention.default: scaled_dot_product,
        **rearranging(),
        **resizing(),
        **functions.losses_per_row(),
        **draws(uniform),
        **functions.recurrent_layers(),
    }
    return {**composed(), **table}


def _without_running_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Trace the batch normalisation inside instance normalisation as an operator that changes nothing."""
    if mean is not None or variance is not None:
        return NotImplemented
    return torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)


def _weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    dim %= direction.ndim
    if dim in (0, direction.ndim - 1):
        return torch.ops.aten._weight_norm_interface.default(direction, length, dim)[0]
    others = [at for at in range(direction.ndim) if at != dim]
    return direction * (length / torch.linalg.vector_norm(direction, 2, others, keepdim=True))


def output_dims(task: TaskModule, inputs: tuple[InputSpec, ...]) -> tuple[int | str, ...]:
    """Return the dims of the module's first output, found without memory by running it at two values of each symbol.
    Raises `ModelError` if a size is neither fixed nor a symbol."""
    used = sorted({dim for spec in inputs for dim in spec.dims if isinstance(dim, str)})
    sizes = {name: _EXAMPLE_SIZES.get(name, 7) for name in used}
    base = _output_shape(task, inputs, sizes)
    dims: list[int | str] = list(base)
    for name in used:
        other = _output_shape(task, inputs, sizes | {name: sizes[name] + 1})
        for index, (size, moved) in enumerate(zip(base, other, strict=True)):
            if size == moved:
                continue
            if (size, moved) != (sizes[name], sizes[name] + 1):
                raise ModelError(
                    f"the size of dimension {index} of the module's output is neither fixed nor {name!r}.",
                    hint="Add an example of `labels` to the example inputs.",
                )
            dims[index] = name
    return tuple(dims)


def _output_shape(task: TaskModule, inputs: tuple[InputSpec, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    was_training = task.module.training
    # In training mode the running statistics would change.
    task.eval()
    try:
        with (
            _fake_parameters(task) as mode,
            watched_gradients(),
            functions.unchecked_arguments(),
            mode,
            torch.no_grad(),
        ):
            result = task({spec.name: torch.zeros(_shape(spec, sizes), dtype=spec.dtype) for spec in inputs})
        return tuple(next(iter(result.values())).shape)
    except ModelError:
        raise
    except Exception as error:
        raise _model_error(error, inputs) from error
    finally:
        task.train(was_training)


def _shape(spec: InputSpec, sizes: Mapping[str, int]) -> list[int]:
    return [sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: tracing makes millions of small objects that live until its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Silenced(io.TextIOBase):
    """Standard error without the output of this thread."""

    def __init__(self, real: TextIO) -> None:
        self._real = real
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._real.write(text)

    def flush(self) -> None:
        self._real.flush()


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Suppress what a failing export prints (its unfinished graph, a traceback): our error names the line."""
    loggers = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    silent = [(logging.getLogger(name), "disabled", True) for name in loggers]
    with patched(*silent), contextlib.redirect_stderr(_Silenced(sys.stderr)):
        yield


class _Described(type):
    """`Callable`, of which `Callable[P, T]` is no new type: torch makes some for each of thousands of kernels."""

    def __getitem__(cls, _: Any) -> type:
        return cls

    def __instancecheck__(cls, instance: object) -> bool:
        return callable(instance)


_CALLABLE: Final = _Described("Callable", (), {})


def _quick_tables() -> AbstractContextManager[None]:
    """While open, torch does not look through all operators for the composite ones again, unless some were added, and
    registers kernels more quickly: a quarter of the time of capturing a small module."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return patched(
        (exported_program, "_collect_all_valid_cia_ops", partial(_composites, len(registered))),
        (torch._ops, "Callable", _CALLABLE),
    )


@cache
def _composites(_registered: int) -> set[Any]:
    return _collect_all_valid_cia_ops()


@contextmanager
def _fake_parameters(task: nn.Module) -> Iterator[FakeTensorMode]:
    """While open, parameters are fake tensors on the buffers' device, so nothing is allocated. At the end, buffers that
    forward assigned are the module's own again."""
    mode = FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True, prefer_deferred_runtime_asserts_over_guards=False),
        allow_non_fake_inputs=True,
        export=True,
    )
    # Sizes are symbols: describing an operation for the cache takes longer than recomputing its result's shape.
    mode.cache_enabled = False
    fakes: dict[int, nn.Parameter] = {}
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    buffers = [(module, dict(module._buffers)) for module in task.modules()]
    for module in task.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            originals.append((module, name, parameter))
            if id(parameter) not in fakes:
                with mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                fakes[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    try:
        for module, name, parameter in originals:
            module._parameters[name] = fakes[id(parameter)]
        yield mode
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter
        for module, held in buffers:
            module._buffers.update(held)


def _keep_gradient_stops(program: ExportedProgram) -> None:
    """Add an explicit detach to results of `torch.no_grad()` regions that depend on a parameter. Functionalisation
    inlines these regions and loses the stop of the gradient."""
    parameters = program.graph_signature.inputs_to_parameters
    learning: set[fx.Node] = set()

    def stops(node: Any) -> bool:
        return isinstance(node, fx.Node) and node.target is wrap_with_set_grad_enabled and node.args[0] is False

    for node in list(program.graph.nodes):
        if node.op == "placeholder" and node.name in parameters:
            learning.add(node)
        if node.op in ("placeholder", "output") or learning.isdisjoint(node.all_input_nodes):
            continue
        if stops(node):
            for result in [user for user in node.users if user.target is operator.getitem]:
                with program.graph.inserting_after(result):
                    stop = program.graph.call_function(torch.ops.aten.detach.default, (result,))
                stop.meta = dict(result.meta)
                result.replace_all_uses_with(stop, delete_user_cb=lambda user, stop=stop: user is not stop)
            learning.add(node)
        elif node.target is not torch.ops.aten.detach.default and not (
            node.target is operator.getitem and stops(node.args[0])
        ):
            learning.add(node)
    program.graph_module.recompile()


_SIZES: Final = {"b": "batch", "s": "sequence"}


def _model_error(error: Exception, inputs: tuple[InputSpec, ...]) -> ModelError:
    """Return the error as the place, the reason and a remedy in the model's own terms."""
    text = str(error)
    where = code_lines.of_error(error)
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        return ModelError(
            f"the model branches on the values of tensors{where}, which a graph can't express.",
            hint="Replace the branch by torch.where or arithmetic, or move it out of forward.",
        )
    if apart := re.search(r"specified range (\w+) <= (\d+) satisfy the generated guard [^\n]* != \2\b", text):
        name, most = _SIZES.get(apart[1], apart[1]), int(apart[2])
        message = f"the model treats a {name} of exactly {most} apart from all others{where}: one graph can't do both."
        return LongestApart(message, most) if apart[1] == "s" else ModelError(message, hint=_at_most(most - 1))
    if "specialized" in text or "Constraints violated" in text or "Not all values of" in text:
        found: list[str] = re.findall(r"marked (\w+) as dynamic", text) or re.findall(r"violated \((\w+)\)", text)
        fixed = sorted({_SIZES.get(name, name) for name in found})
        kind = OneLength if fixed == [_SIZES["s"]] else ModelError
        return kind(
            f"the model works at one size of the {' and '.join(fixed) or 'batch or sequence'} only{where}: its "
            "operations depend on the example's size, as those of a loop over positions do.",
            hint="Take sizes from x.shape without looping or branching over them (a recurrence in Python can't be "
            "captured for every length), or fix that size to one value.",
        )
    hint = "Check that its forward runs on the example inputs in plain PyTorch."
    if inputs and inputs[0].example is None:
        hint = (
            "It came without example inputs and was given token ids [batch, sequence]. A function that returns "
            "(module, example_inputs) can name other inputs: example_inputs is a dictionary of one tensor per input."
        )
    return ModelError(
        f"the model could not be traced{where}: {type(error).__name__}: {code_lines.reason(error)}.", hint=hint
    )
