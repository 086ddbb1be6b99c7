"""Gradients that a module defines itself, which a trace does not see: found while tracing, then verified or refused.

`torch.export` records the forward of a `torch.autograd.Function` and drops its backward. Each call is therefore noted
while a module is traced. Afterwards the function's own gradient is compared with the gradient that automatic
differentiation derives from its forward, on random inputs of several magnitudes. If the gradients differ or can't be
compared, the function is refused with its class and the line that calls it. Hooks on gradients are refused as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd import function as autograd_function
from torch.utils import checkpoint as torch_checkpoint

from fusionai.capture.tracing import code_lines
from fusionai.capture.tracing.patching import patched
from fusionai.primitives.errors import ModelError

SEEDS: Final = (0, 1)
SCALES: Final = (1e-3, 0.3, 1.0, 5.0, 60.0, 1e3, 1e5)
"""Magnitudes of the inputs tried. Several, because a clamp for example is the identity on small inputs."""
TOLERANCE: Final = 1e-4
"""Largest accepted difference, relative to the largest gradient (chosen)."""
_SMALL: Final = 24
"""Larger sizes are first tried at a smaller one."""
_MOST_ELEMENTS: Final = 2**24
"""Elements of all arguments up to which a call is also tried at its real sizes (chosen)."""
_UNDERSTOOD: Final = ("torch.utils.checkpoint", "torch._library.autograd")
"""Modules with functions of torch that a trace handles: checkpoints run plainly, custom operators stay operators."""
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.Size)


@dataclass(frozen=True, slots=True)
class TracedFunctionCall:
    """One call of a `torch.autograd.Function` while tracing. `args`: tensors as `_Shape`, other arguments unchanged."""

    function: type[Function]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes and dtype of a tensor argument. `small`: the same sizes, with large ones reduced."""

    sizes: tuple[int, ...]
    small: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class GradientWatch:
    """Collects the calls of custom functions, one per kind of call."""

    calls: dict[object, TracedFunctionCall] = field(default_factory=dict)

    def require_derived(self) -> None:
        """Raise `ModelError` unless each function's gradient equals the one that automatic differentiation derives."""
        for call in self.calls.values():
            reason = _difference(call)
            if reason is not None:
                name = f"{call.function.__module__}.{call.function.__qualname__}"
                raise ModelError(
                    f"the model calls the torch.autograd.Function {name}{call.where}, whose backward a graph can't "
                    f"hold: {reason}.",
                    hint="Use operations whose derived gradient is the one you want: y = x + (f(x) - x).detach() "
                    "computes f(x) and passes the gradient straight through. Checkpointing needs no custom function: "
                    "a job has its own setting for recomputing, and torch.utils.checkpoint is supported.",
                )

    def note(self, function: type[Function], args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> None:
        spelt = _mapped(args, _described)
        named = {name: _mapped(arg, _described) for name, arg in kwargs.items()}
        call = TracedFunctionCall(function, spelt, named, where)
        self.calls.setdefault((function, repr(spelt), repr(named)), call)


@contextmanager
def watched_gradients() -> Iterator[GradientWatch]:
    """While open, note calls of custom functions (also through an `apply` that was bound earlier), raise `ModelError`
    on a gradient hook, run reentrant checkpoints plainly, and treat `x.data` as `x.detach()`."""
    watch = GradientWatch()
    # Every `Function.apply` calls this first, however it was bound.
    defined: Callable[[Any], bool] = autograd_function._is_setup_context_defined
    data: Any = torch.Tensor.data

    def noted(setup_context: Any) -> bool:
        frame: FrameType | None = sys._getframe(1)
        function = frame.f_locals.get("cls")
        if isinstance(function, type) and issubclass(function, Function) and function.__module__ not in _UNDERSTOOD:
            watch.note(
                function, frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {}), code_lines.of_frame(frame)
            )
        return defined(setup_context)

    def hooked(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:  # noqa: ARG001
        where = code_lines.of_frame(sys._getframe(1))
        raise ModelError(
            f"the model registers a hook on a gradient{where}, which a graph can't hold.",
            hint="Use operations with the derived gradient that you want: y = x * 2 - x.detach() doubles the gradient.",
        )

    def forward(_ctx: Any, run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return run(*args)

    with patched(
        (autograd_function, "_is_setup_context_defined", noted),
        (torch.Tensor, "register_hook", hooked),
        (torch.Tensor, "register_post_accumulate_grad_hook", hooked),
        (torch.Tensor, "data", property(lambda tensor: tensor.detach(), data.__set__)),
        (torch_checkpoint.CheckpointFunction, "forward", staticmethod(forward)),
    ):
        yield watch


def refuse_hooks(module: nn.Module) -> None:
    """Raise `ModelError` if a module or a parameter changes gradients by a hook."""
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise ModelError(
                f"the module {name or type(child).__name__} has a backward hook, which a graph can't hold.",
                hint="Remove the hook, or use operations whose derived gradient is the one you want.",
            )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f"the parameter {name} has a hook on its gradient, which a graph can't hold.",
                hint="Mask or scale the parameter where it is used: w * mask + (w * (1 - mask)).detach().",
            )


def _mapped(arg: Any, change: Callable[[Any], Any]) -> Any:
    """Return `arg` with every item of its nested tuples and lists changed."""
    match arg:
        case tuple():
            return tuple(_mapped(item, change) for item in arg)
        case list():
            return [_mapped(item, change) for item in arg]
        case _:
            return change(arg)


def _items(arg: Any) -> Iterator[Any]:
    """Yield the items of nested tuples and lists."""
    if isinstance(arg, tuple | list):
        for item in arg:
            yield from _items(item)
    else:
        yield arg


def _described(arg: Any) -> Any:
    match arg:
        case torch.Tensor():
            sizes = tuple(_hint(size) for size in arg.shape)
            return _Shape(sizes, tuple(size if size <= _SMALL else 8 + size % 8 for size in sizes), arg.dtype)
        case torch.SymInt():
            return _hint(arg)
        case _:
            return arg


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) and size.node.hint is not None else int(size)


def _difference(call: TracedFunctionCall) -> str | None:
    """Return why the gradient may differ from the one that automatic differentiation derives; None if they agree."""
    items = list(_items((*call.args, *call.kwargs.values())))
    for item in items:
        if not isinstance(item, (_Shape, *_PLAIN)):
            return f"it takes a {type(item).__name__}, so its gradient can't be compared with the derived one"
    elements = sum(torch.Size(item.sizes).numel() for item in items if isinstance(item, _Shape))
    reason: str | None = "its gradient could not be compared with the derived one"
    for small in (True, False):
        if not small and elements > _MOST_ELEMENTS:
            break
        compared = 0
        for scale in SCALES:
            for seed in SEEDS:
                try:
                    apart, moved = _apart(call, seed, scale, small)
                except Exception as error:  # noqa: BLE001  the owner's function may raise anything
                    reason = f"its gradient could not be compared with the derived one ({type(error).__name__})"
                    continue
                if apart:
                    return "its gradient differs from the one that automatic differentiation derives from its forward"
                compared += moved
        if compared:
            return None
    return reason


def _apart(call: TracedFunctionCall, seed: int, scale: float, small: bool) -> tuple[bool, bool]:
    """Return whether the function's outputs or gradients differ from the derived ones, and whether any is nonzero."""
    own = _gradients(call, seed, scale, small, lambda args, kwargs: call.function.apply(*args, **kwargs))
    derived = _gradients(call, seed, scale, small, lambda args, kwargs: _plainly(call.function, args, kwargs))
    if len(own) != len(derived):
        return True, False
    for mine, theirs in zip(own, derived, strict=True):
        if mine.shape != theirs.shape or bool((mine.isfinite() != theirs.isfinite()).any()):
            return True, False
        there = mine.isfinite()
        first, second = mine[there].double(), theirs[there].double()
        largest = max(first.abs().max().item(), second.abs().max().item()) if first.numel() else 0.0
        if first.numel() and (first - second).abs().max().item() > TOLERANCE * largest:
            return True, False
    return False, any(bool((grad[grad.isfinite()] != 0).any()) for grad in derived)


def _gradients(
    call: TracedFunctionCall,
    seed: int,
    scale: float,
    small: bool,
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
) -> list[torch.Tensor]:
    """Return the gradients of every floating input, for random gradients of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    leaves: list[torch.Tensor] = []

    def drawn(item: Any) -> Any:
        if not isinstance(item, _Shape):
            return item
        sizes = item.small if small else item.sizes
        if not item.dtype.is_floating_point:
            return torch.randint(0, 2, sizes, generator=generator).to(item.dtype)
        leaf = torch.randn(sizes, generator=generator, dtype=torch.float32) * scale
        # Zeros are common in padded sequences, and a function may define its gradient separately there.
        leaf = leaf.masked_fill(torch.rand(sizes, generator=generator) < 0.1, 0.0)
        leaf = leaf.to(item.dtype).requires_grad_()
        leaves.append(leaf)
        # Not a leaf, because a function may write into its arguments.
        return leaf * 1

    args = _mapped(call.args, drawn)
    kwargs = {name: _mapped(arg, drawn) for name, arg in call.kwargs.items()}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        result = run(args, kwargs)
    made = result if isinstance(result, tuple | list) else (result,)
    outputs = [x for x in made if isinstance(x, torch.Tensor) and x.is_floating_point() and x.requires_grad]
    if not outputs or not leaves:
        return [torch.zeros_like(leaf) for leaf in leaves]
    given = [torch.randn(item.shape, generator=generator).to(item.dtype) for item in outputs]
    found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


class _Context:
    """Accepts and discards what a forward saves: automatic differentiation saves what it needs."""

    needs_input_grad = (True,) * 64

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _plainly(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    forward: Callable[..., Any] = function.forward
    own_setup = autograd_function._is_setup_context_defined(function.setup_context)
    return forward(*args, **kwargs) if own_setup else forward(_Context(), *args, **kwargs)
