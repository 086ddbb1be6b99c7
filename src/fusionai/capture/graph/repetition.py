"""Trace two layers of each kind of repeated layer; all further ones become copies of the second.

Layers are equal if they are members of one list with the same class, attributes, children and parameter sizes, and are
called with arguments of the same form. The first two of each kind are traced normally. For each further one the trace
holds one call of `fusion::repeated`, which `capture.graph.lowering` replaces by the second layer's operations with the
parameters renamed. Numbers that differ between layers, such as a layer's index, are watched while the first two are
traced: if a forward reads such a number, the layers count as different and all are traced."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fusionai.capture.tracing.patching import patched

FEWEST: Final = 3
"""Fewer equal layers are traced normally."""
TRACED: Final = 2
"""Layers traced per kind. The first may compute values that all layers share, so the second is the one to copy."""
_INTERNAL: Final = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Traced:
    """One traced layer. `sizes`: shapes, strides and dtypes of its results, except results that are its inputs;
    `fusion::repeated` returns tensors of these sizes."""

    path: str
    twin: int
    """Number of the previously traced layer of this kind, or its own number."""
    sizes: tuple[tuple[tuple[int | torch.SymInt, ...], tuple[int | torch.SymInt, ...], torch.dtype], ...]


@dataclass(slots=True)
class _Kind:
    """Layers that are equal except for integers. `indices`: (path in the layer, attribute) of those integers."""

    count: int
    indices: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Calls:
    """Calls of one kind of layer with arguments of the same form in this trace."""

    made: int = 0
    unlike: bool = False
    outputs: Any = None
    number: int = -1


@dataclass(slots=True)
class Repetition:
    """Repeated layers found and copied in one trace. `layers`: path of each layer that may be copied. `traced`: by the
    number of the mark. `written`: whether a copied layer's result was written to, which makes copies invalid."""

    layers: list[str] = field(default_factory=list)
    traced: list[Traced] = field(default_factory=list)
    copies: int = 0
    results: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @property
    def written(self) -> bool:
        return any(tensor._version != version for tensor, version in self.results)


_open: Repetition | None = None


@torch.library.custom_op("fusion::traced_layer", mutates_args=())
def traced_layer(inputs: list[torch.Tensor], outputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:  # noqa: ARG001
    """Mark the inputs and results of a layer in the trace."""
    return [output.clone() for output in outputs]


@traced_layer.register_fake
def _(inputs: list[torch.Tensor], outputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:  # noqa: ARG001
    return [torch.empty_strided(output.shape, output.stride(), dtype=output.dtype) for output in outputs]


@torch.library.custom_op("fusion::repeated", mutates_args=())
def repeated(inputs: list[torch.Tensor], number: int, layer: int) -> list[torch.Tensor]:
    """Stand in for a layer that equals the marked one."""
    raise NotImplementedError("fusion::repeated exists only while a module is traced")


@repeated.register_fake
def _(inputs: list[torch.Tensor], number: int, layer: int) -> list[torch.Tensor]:  # noqa: ARG001
    assert _open is not None
    return [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in _open.traced[number].sizes]


@contextmanager
def repeated_layers(module: nn.Module, *, whole: bool = False) -> Iterator[Repetition]:
    """While open, a trace of `module` copies its repeated layers; `whole`: all layers are traced."""
    global _open
    found = Repetition()
    kinds: dict[int, tuple[_Kind, int]] = {}
    if not whole:
        for kind, layers in _kinds(module):
            for path, layer in layers:
                kinds[id(layer.__dict__)] = (kind, len(found.layers))
                found.layers.append(path)
    calls: dict[Any, _Calls] = {}
    seen: set[int] = set()

    def call(forward: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        entry = kinds.get(id(layer.__dict__))
        if entry is None or get_proxy_mode() is None:
            return forward(layer, *args, **kwargs)
        kind, place = entry
        if place in seen:
            # The module runs again.
            calls.clear()
            seen.clear()
        seen.add(place)
        inputs: list[torch.Tensor] = []
        try:
            skeleton = (_flat(args, inputs), tuple((name, _flat(kwargs[name], inputs)) for name in sorted(kwargs)))
        except _Opaque:
            return forward(layer, *args, **kwargs)

        def key() -> Any:
            described = tuple(
                (tuple(str(size) for size in (*x.shape, *x.stride())), x.dtype, type(x) is nn.Parameter) for x in inputs
            )
            # Equal objects have the index of the first of them.
            first: dict[int, int] = {}
            same = tuple(first.setdefault(id(x), number) for number, x in enumerate(inputs))
            modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
            return id(kind), skeleton, described, same, modes

        known = calls.setdefault(key(), _Calls())
        if known.unlike or any(_hooked(child) for child in layer.modules()):
            return forward(layer, *args, **kwargs)
        known.made += 1
        if known.made <= TRACED:
            outputs = _trace(found, known, kind, place, forward, layer, inputs, args, kwargs)
            # Tracing the layer may have shown that two sizes are equal (batch of tokens and of labels), which changes
            # the key. Calls with the new key belong to the same kind.
            calls.setdefault(key(), known)
            return outputs
        found.copies += 1
        results = repeated(inputs, known.number, place)
        found.results.extend((result, result._version) for result in results)
        return _filled(known.outputs, inputs, iter(results))

    with _forwards_through({type(child) for child in module.modules() if id(child.__dict__) in kinds}, call):
        _open = found
        try:
            yield found
        finally:
            _open = None


def _trace(
    found: Repetition,
    known: _Calls,
    kind: _Kind,
    place: int,
    forward: Callable[..., Any],
    layer: nn.Module,
    inputs: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the layer and mark its results; note it if layers of this kind can't be copied."""
    versions = [x._version for x in inputs]
    before = _signature(layer)
    with _watched(layer, kind.indices) as watch:
        outputs = forward(layer, *args, **kwargs)
    results: list[torch.Tensor] = []
    try:
        skeleton = _flat(outputs, results, inputs)
    except _Opaque:
        known.unlike = True
        return outputs
    if (
        watch.used
        or any(x._version != version for x, version in zip(inputs, versions, strict=True))
        or _signature(layer) != before
        or (known.outputs is not None and known.outputs != skeleton)
        or not results
    ):
        known.unlike = True
        return outputs
    number = len(found.traced)
    known.outputs, twin, known.number = skeleton, max(known.number, 0) if known.made > 1 else number, number
    sizes = tuple((tuple(x.shape), tuple(x.stride()), x.dtype) for x in results)
    found.traced.append(Traced(found.layers[place], twin, sizes))
    marked = traced_layer(inputs, results, known.number)
    found.results.extend((result, result._version) for result in marked)
    return _filled(skeleton, inputs, iter(marked))


def _forwards_through(classes: set[type[nn.Module]], call: Callable[..., Any]) -> AbstractContextManager[None]:
    """While open, the forward of each class goes through `call`. Instances are not patched, because the traced object
    may be a stand-in for the layer."""

    def through(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return call(original, self, *args, **kwargs)

        return forward

    return patched(*((cls, "forward", through(cls.forward)) for cls in classes))


def _kinds(module: nn.Module) -> Iterator[tuple[_Kind, list[tuple[str, nn.Module]]]]:
    """Yield the repeated layers, outermost ones only."""
    paths: dict[int, int] = {}
    for _, child in module.named_modules(remove_duplicate=False):
        paths[id(child)] = paths.get(id(child), 0) + 1
    taken: list[str] = []
    for path, child in module.named_modules():
        if not isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        if any(path == other or path.startswith(f"{other}.") for other in taken):
            continue
        groups: dict[Any, list[tuple[str, nn.Module]]] = {}
        for name, layer in child.named_children():
            parts = list(layer.modules())
            if len(parts) > 2 and all(paths[id(part)] == 1 for part in parts) and not any(map(_hooked, parts)):
                groups.setdefault(_signature(layer), []).append((f"{path}.{name}" if path else name, layer))
        for layers in groups.values():
            for indices, alike in _by_numbers(layers):
                if len(alike) >= FEWEST:
                    taken.extend(name for name, _ in alike)
                    yield _Kind(len(alike), indices), alike


def _by_numbers(
    layers: list[tuple[str, nn.Module]],
) -> Iterator[tuple[tuple[tuple[str, str], ...], list[tuple[str, nn.Module]]]]:
    """Split layers by the integers in which some of them differ. One that differs in every layer is an index."""
    tables = [
        {
            (path, name): value
            for path, part in layer.named_modules()
            for name, value in part.__dict__.items()
            if type(value) is int
        }
        for _, layer in layers
    ]
    differing = [place for place in tables[0] if len({table[place] for table in tables}) > 1]
    indices = tuple(place for place in differing if len({table[place] for table in tables}) == len(tables))
    groups: dict[tuple[int, ...], list[tuple[str, nn.Module]]] = {}
    for table, layer in zip(tables, layers, strict=True):
        groups.setdefault(tuple(table[place] for place in differing if place not in indices), []).append(layer)
    for alike in groups.values():
        yield indices, alike


def _hooked(part: nn.Module) -> bool:
    return any(getattr(part, name) for name in _HOOKS)


def _signature(layer: nn.Module) -> Any:
    """Return a key that is equal for layers that compute the same, except for integers and values of parameters."""
    return tuple(
        (
            path,
            type(part),
            tuple(
                (name, _described(value, part))
                for name, value in sorted(part.__dict__.items())
                if name not in _INTERNAL and type(value) is not int
            ),
            tuple((name, _tensor_kind(value)) for name, value in part._parameters.items()),
            tuple((name, _tensor_kind(value)) for name, value in part._buffers.items()),
            tuple((name, part is None) for name, part in part._modules.items()),
        )
        for path, part in layer.named_modules()
    )


def _tensor_kind(value: torch.Tensor | None) -> Any:
    return None if value is None else (tuple(value.shape), value.dtype, value.requires_grad)


def _described(value: Any, owner: nn.Module) -> Any:
    """Return a hashable key, equal for values that behave the same. An opaque object equals only itself."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return type(value), value
        case torch.dtype() | torch.device() | torch.memory_format() | torch.Size() | Enum():
            return value
        case tuple() | list() | set() | frozenset():
            items = value if isinstance(value, tuple | list) else sorted(value, key=repr)
            return type(value), tuple(_described(item, owner) for item in items)
        case Mapping():
            return type(value), tuple((_described(key, owner), _described(item, owner)) for key, item in value.items())
        case types.MethodType():
            bound = "owner" if value.__self__ is owner else id(value.__self__)
            return "method", id(value.__func__), bound
        case functools.partial():
            return "partial", _described((value.func, value.args, value.keywords), owner)
        case _ if is_dataclass(value) and not isinstance(value, type):
            return type(value), tuple((name, _described(item, owner)) for name, item in _stored(value))
        case _:
            return type(value), id(value)


def _stored(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass as they are stored. Configurations of transformers whose layers differ refuse to
    be asked for a field that some layers have a value of their own for."""
    stored = getattr(value, "__dict__", None)
    for each in fields(value):
        yield each.name, getattr(value, each.name) if stored is None else stored.get(each.name)


class _Opaque(Exception):
    """An argument or result is neither a tensor nor a plain value, so what a layer does with it is unknown."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor: the result with this number, or the input with this number."""

    number: int
    input: bool = False


def _flat(value: Any, tensors: list[torch.Tensor], inputs: list[torch.Tensor] | None = None) -> Any:
    """Return `value` with places instead of tensors, and append the tensors to `tensors`. A result that is one of
    `inputs` becomes the place of that input."""
    match value:
        case torch.Tensor():
            for number, given in enumerate(inputs or ()):
                if given is value:
                    return _Place(number, input=True)
            tensors.append(value)
            return _Place(len(tensors) - 1)
        case None | bool() | int() | float() | str() | torch.dtype() | torch.device():
            return value if inputs is not None else (type(value), value)
        case torch.SymInt() if inputs is None:
            return torch.SymInt, str(value)
        case tuple() if type(value) is tuple:
            return tuple(_flat(item, tensors, inputs) for item in value)
        case _ if is_dataclass(value) and not isinstance(value, type) and inputs is None:
            return type(value), tuple(_flat(getattr(value, each.name), tensors) for each in fields(value))
        case _:
            raise _Opaque


def _filled(skeleton: Any, inputs: list[torch.Tensor], results: Iterator[torch.Tensor]) -> Any:
    match skeleton:
        case _Place(number, is_input):
            return inputs[number] if is_input else next(results)
        case tuple():
            return tuple(_filled(item, inputs, results) for item in skeleton)
        case _:
            return skeleton


@dataclass(slots=True)
class _Watch:
    used: bool = False


@contextmanager
def _watched(layer: nn.Module, indices: tuple[tuple[str, str], ...]) -> Iterator[_Watch]:
    """While open, replace the layer's indices by integers that record any use."""
    watch = _Watch()
    parts = dict(layer.named_modules())
    originals = [(parts[path].__dict__, name, parts[path].__dict__[name]) for path, name in indices]
    for attributes, name, value in originals:
        attributes[name] = _WatchedNumber(value, watch)
    try:
        yield watch
    finally:
        for attributes, name, value in originals:
            if isinstance(attributes.get(name), _WatchedNumber):
                attributes[name] = value
            else:
                watch.used = True


class _WatchedNumber:
    """An integer that records any use except being passed on."""

    __slots__ = ("_value", "_watch")

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._watch.used = True
        return int

    def __init__(self, value: int, watch: _Watch) -> None:
        self._value = value
        self._watch = watch


def _noting(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self._watch.used = True
        return getattr(self._value, name)(*args)

    return method


for _name in (
    *("__index__", "__int__", "__float__", "__bool__", "__hash__", "__str__", "__repr__", "__format__", "__trunc__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__pos__", "__abs__", "__invert__"),
    *(
        f"__{side}{operation}__"
        for operation in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "and", "or", "xor")
        for side in ("", "r")
    ),
    *("__lshift__", "__rshift__", "__rlshift__", "__rrshift__", "__round__", "__ceil__", "__floor__"),
):
    setattr(_WatchedNumber, _name, _noting(_name))
