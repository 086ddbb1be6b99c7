"""Record each parameter's initialisation as a declarative program, by observing how a module is built.

A program can express certain random and fill operations. Any other operation makes it unknown (`None`), and the job
owner then sends the bytes (`capture.models.state`). Draws no random numbers itself: `ir.weights` runs the programs.

While the watch is open, every tensor operation passes through a dispatch mode. Tensors are identified by their storage,
so that views, `.data` and detached aliases belong to the tensor that they look into. Parameters move to the meta device
as they are registered, so nothing large is computed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.ir.schema import InitOp

Program = tuple[InitOp, ...]

_LARGE_BYTES = 2**28
"""Empty tensors of at least this size (256 MiB, chosen) are made on the meta device."""

_SHARED = "shared"

_PADDINGS = frozenset({"constant_pad_nd", "pad"})
"""Operators that copy if they pad by nothing, as when transformers ties an output bias to its matrix."""


@dataclass(slots=True)
class _Record:
    """One storage. `program`: what initialised it; None if that is unknown or has not happened yet."""

    program: Program | None
    anchor: StorageWeakRef
    """Keeps the storage's address from being reused without keeping its memory."""
    draws: frozenset[int] = frozenset()
    """Numbers of the draws that a value without a program was computed from."""
    parameter: nn.Parameter | None = None
    """The meta parameter that stands for a real one registered with this storage."""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


_MOMENTS = {"normal": (("mean", 0.0), ("std", 1.0)), "uniform": (("from", 0.0), ("to", 1.0))}
"""Arguments of the operations that draw in place, with their defaults."""


class InitialisationWatch(TorchDispatchMode):
    """Follows initialisation while it is entered; afterwards `program(tensor)` returns the programs."""

    def __init__(self, kept: frozenset[tuple[int, ...]] = frozenset()) -> None:
        """`kept`: shapes that get real memory however large they are."""
        super().__init__()
        self._kept = kept
        self._records: dict[int, _Record] = {}
        self._draws = 0

    def program(self, tensor: torch.Tensor) -> Program | None:
        """Return the program that made the whole of `tensor`, None if it is unknown."""
        record = self._lookup(tensor)
        return None if record is None or not _is_whole(tensor) else record.program

    def draws(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return the numbers of the draws that `tensor` holds or was computed from, as far as the watch saw it."""
        record = self._lookup(tensor)
        if record is None:
            return frozenset()
        return record.draws if record.program is None else _draws_of(record.program)

    def replacement(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the meta parameter that stands for this one, if it has been registered before (ties)."""
        record = self._lookup(parameter)
        return None if record is None else record.parameter

    def replace(self, real: nn.Parameter, meta: nn.Parameter) -> None:
        """Let both storages share one record, so code that still holds `real` can go on initialising it."""
        record = self._lookup(real)
        if record is None:
            record = _Record(None, StorageWeakRef(real.untyped_storage()))
            self._records[_address(real)] = record
        record.parameter = meta
        # The meta storage lives as long as the record, through `parameter`.
        self._records[_address(meta)] = record

    def drawn(self, program: Program) -> Program:
        """Return the program with a mark of its own draw, by which copies of the same draw are recognised."""
        self._draws += 1
        return (InitOp(_SHARED, (self._draws,)), *(step for step in program if step.op != _SHARED))

    def _copied(self, program: Program | None, *tensors: torch.Tensor) -> Program | None:
        """Return the program of a copy between `tensors`. A program draws in the order of the elements, so a copy in
        another order counts as a draw of its own."""
        if program is None or all(tensor.is_contiguous() for tensor in tensors):
            return program
        return self.drawn(program) if program[0].op == _SHARED else program

    def write(self, tensor: torch.Tensor, program: Program | None, sources: frozenset[int] = frozenset()) -> None:
        """Record that `tensor` now holds the result of `program`, or a value computed from the draws `sources`."""
        record = self._lookup(tensor)
        if record is None:
            record = _Record(None, StorageWeakRef(tensor.untyped_storage()))
            self._records[_address(tensor)] = record
        record.program = program if _is_whole(tensor) else self._row(record, tensor, program)
        record.draws = sources if record.program is None else frozenset()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        before = None if target is None else self.program(target)
        sources = frozenset[int]().union(*map(self.draws, _tensors((*args, *kwargs.values()))))
        if func is torch.ops.aten.empty.memory_format and self._is_large(args[0], kwargs):
            # The experts of one layer may take tens of gigabytes, which a parameter on the meta device does not need.
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name.endswith("_") and not name.endswith("__"):
            if target is not None:
                self.write(target, self._after(name[:-1], before, args, kwargs), sources)
        elif func._schema.is_mutable:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and self._lookup(value) is not None:
                    self.write(value, None, sources)
        elif isinstance(result, torch.Tensor) and _address(result) not in self._records:
            same = target is not None and result.shape == target.shape
            made = before if name in _PADDINGS and same else self._created(name, before, args, kwargs)
            self.write(result, made, sources)
        elif sources and isinstance(result, list | tuple):
            for value in _tensors(result):
                if _address(value) not in self._records:
                    self.write(value, None, sources)
        return result

    def _is_large(self, shape: Any, kwargs: Mapping[str, Any]) -> bool:
        itemsize = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
        device = kwargs.get("device")
        on_cpu = device is None or torch.device(device).type == "cpu"
        return on_cpu and math.prod(shape) * itemsize >= _LARGE_BYTES and tuple(shape) not in self._kept

    def _after(
        self, name: str, before: Program | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program | None:
        """Return the program of a tensor after the operation `name` on it, in place or not."""
        match name:
            case "zero":
                return (InitOp("fill", (0.0,)),)
            case "fill":
                return _filled(args, 1)
            case "normal" | "uniform":
                numbers = [
                    _number(args[place] if len(args) > place else kwargs.get(argument, default))
                    for place, (argument, default) in enumerate(_MOMENTS[name], start=1)
                ]
                given = [number for number in numbers if number is not None]
                return self.drawn((InitOp(name, tuple(given)),)) if len(given) == len(numbers) else None
            case "copy":
                match args:
                    case (torch.Tensor() as written, torch.Tensor() as source, *_) if source.shape == written.shape:
                        return self._copied(self.program(source), written, source)
                    case _:
                        return None
            case _:
                return _continued(before, _transform(name, args, kwargs))

    def _created(
        self, name: str, before: Program | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program | None:
        """Return the program of a new tensor returned by the operation `name`."""
        match name:
            case "zeros" | "zeros_like" | "new_zeros":
                return (InitOp("fill", (0.0,)),)
            case "ones" | "ones_like" | "new_ones":
                return (InitOp("fill", (1.0,)),)
            case "full" | "full_like" | "new_full":
                return _filled(args, 2 if name == "new_full" else 1)
            case "randn" | "randn_like":
                return self.drawn((InitOp("normal", (0.0, 1.0)),))
            case "rand" | "rand_like":
                return self.drawn((InitOp("uniform", (0.0, 1.0)),))
            case "clone" | "_to_copy" | "detach" | "alias" | "lift_fresh":
                return self._copied(before, args[0])
            case _:
                return _continued(before, _transform(name, args, kwargs))

    def _row(self, record: _Record, part: torch.Tensor, program: Program | None) -> Program | None:
        """Return the program of the whole tensor after `part` of it was written. Only a filled row can be expressed."""
        whole = record.parameter
        if record.program is None or program is None or len(program) != 1 or program[0].op != "fill" or whole is None:
            return None
        row_numel = math.prod(whole.shape[1:])
        if part.shape != whole.shape[1:] or not part.is_contiguous() or part.storage_offset() % max(row_numel, 1):
            return None
        return (*record.program, InitOp("fill_row", (part.storage_offset() // row_numel, program[0].args[0])))

    def _lookup(self, tensor: torch.Tensor) -> _Record | None:
        return self._records.get(_address(tensor))


def _filled(args: tuple[Any, ...], place: int) -> Program | None:
    value = _number(args[place]) if len(args) > place else None
    return None if value is None else (InitOp("fill", (value,)),)


def _continued(before: Program | None, steps: Program | None) -> Program | None:
    return None if before is None or steps is None else (*before, *steps)


def _transform(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program | None:
    """Return the steps of an elementwise operation with plain numbers, None for any other operation."""
    value = _number(args[1]) if len(args) > 1 else None
    match name:
        case "mul" if value is not None:
            return (InitOp("mul", (value,)),)
        case "div" if value:
            return (InitOp("mul", (1.0 / value,)),)
        case "add" if value is not None and not kwargs:
            return (InitOp("add", (value,)),)
        case "sub" if value is not None and not kwargs:
            return (InitOp("add", (-value,)),)
        case "neg":
            return (InitOp("mul", (-1.0,)),)
        case "erfinv":
            return (InitOp("erfinv"),)
        case "clamp":
            low = args[1] if len(args) > 1 else kwargs.get("min")
            high = args[2] if len(args) > 2 else kwargs.get("max")
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            bounds = (_number(low), _number(high))
            return None if bounds[0] is None or bounds[1] is None else (InitOp("clamp", (bounds[0], bounds[1])),)
        case _:
            return None


def _draws_of(program: Program) -> frozenset[int]:
    return frozenset(int(number) for step in program if step.op == _SHARED for number in step.args)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def families(draws: Mapping[str, frozenset[int]], computed: Collection[str]) -> dict[str, str]:
    """Return the parameters that must be made together -> the first one of theirs: those `computed` from draws, such as
    the lengths in weight normalisation, and all others of the same draws. `draws`: by parameter."""
    first, order = {key: key for key in draws}, {key: place for place, key in enumerate(draws)}

    def root(key: str) -> str:
        while first[key] != key:
            key = first[key]
        return key

    holder: dict[int, str] = {}
    for key, numbers in draws.items():
        for number in numbers:
            earlier, later = sorted((root(key), root(holder.setdefault(number, key))), key=order.__getitem__)
            first[later] = earlier
    made = {root(key) for key in computed if draws[key]}
    sizes = Counter(root(key) for key in draws)
    return {key: root(key) for key in draws if root(key) in made and sizes[root(key)] > 1}


def shared_draws(programs: Mapping[str, tuple[Program | None, tuple[int, ...]]]) -> dict[str, Program | None]:
    """Return the programs in the IR's form, from parameter -> (program, shape). Parameters of one shape that began with
    the same draws, as copies do, share a number made from the first one's name. All others draw by their own name."""
    drawn = {
        name: (program[0].args, shape)
        for name, (program, shape) in programs.items()
        if program is not None and program[0].op == _SHARED
    }
    sharing = Counter(drawn.values())
    first: dict[object, str] = {}
    made: dict[str, Program | None] = {}
    for name, (program, _) in programs.items():
        made[name] = program
        if name not in drawn or program is None:
            continue
        made[name] = program[1:]
        if sharing[drawn[name]] > 1:
            digest = hashlib.sha256(first.setdefault(drawn[name], name).encode()).digest()
            made[name] = (InitOp(_SHARED, (int.from_bytes(digest[:6], "little"),)), *program[1:])
    return made


def truncated_normal(mean: float, std: float, low: float, high: float) -> Program:
    """Return the program of the normal distribution cut to [low, high], by the inverse of its distribution function."""

    def distribution(x: float) -> float:
        return (1.0 + math.erf((x - mean) / std / math.sqrt(2.0))) / 2.0

    bounds = (2 * distribution(low) - 1, 2 * distribution(high) - 1)
    return (
        InitOp("uniform", bounds),
        InitOp("erfinv"),
        InitOp("mul", (std * math.sqrt(2.0),)),
        InitOp("add", (mean,)),
        InitOp("clamp", (low, high)),
    )


_TRUNCATE = "_no_grad_trunc_normal_"
_SILENT = ("dirac_", "orthogonal_", "sparse_")
"""Functions of `torch.nn.init` that return from a meta tensor without any operation that a watch could see."""


@contextmanager
def watching(kept: frozenset[tuple[int, ...]] = frozenset()) -> Iterator[InitialisationWatch]:
    """Open a watch; `kept` as in `InitialisationWatch`. Functions that do nothing on meta tensors are recorded while it
    is open. The truncated normal gets a program, the others make it unknown."""
    watch = InitialisationWatch(kept)

    def truncated(*args: Any) -> Program:
        return watch.drawn(truncated_normal(*map(float, args[:4])))

    with ExitStack() as recording, watch:
        for name in _SILENT:
            recording.enter_context(_recorded(watch, getattr(nn.init, name), lambda *_: None))
        recording.enter_context(_recorded(watch, getattr(nn.init, _TRUNCATE), truncated))
        yield watch


_recorder: Callable[..., Any] = print
"""The name that `_stand_in` calls. In its copies it is another one."""


def _stand_in(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _recorder(tensor, *args, **kwargs)


@contextmanager
def _recorded(
    watch: InitialisationWatch, function: FunctionType, program_of: Callable[..., Program | None]
) -> Iterator[None]:
    """While open, each call of `function` is followed by a note of the program that its arguments after the tensor
    mean. Its code is replaced, not its name: modules have imported it under names of their own."""
    code, defaults, names = function.__code__, function.__defaults__, function.__globals__
    unwatched = FunctionType(code, names, function.__name__, defaults, function.__closure__)
    name = f"_recorded_{function.__name__}_{id(watch)}"

    def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = unwatched(tensor, *args, **kwargs)
        watch.write(tensor, program_of(*args))
        return result

    names[name] = recorded
    function.__code__, function.__defaults__ = _stand_in.__code__.replace(co_names=(name,)), None
    try:
        yield
    finally:
        function.__code__, function.__defaults__ = code, defaults
        del names[name]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the tensor spans its storage, in any order: programs draw elements independently."""
    return tensor.storage_offset() == 0 and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
