"""Recomputation of activations in backward: a microbatch in flight holds only the inputs of its segments.

A graph is divided at the boundaries of its blocks. A segment is recomputed once, when backward first asks for one of
its tensors. The autograd graph is that of a plain run, and only its saved tensors are replaced. So every sum is taken
in the same order, with the same bits, even for weights that several segments share. Dropout follows from counters, so
its masks are equal too. The method is that of T. Chen et al., "Training deep nets with sublinear memory cost", 2016
(arXiv 1604.06174), with one segment per block instead of the square root of their number. `torch.utils.checkpoint` does
the same but loads torch's compiler, see `backend.without_compiler`.

Neighbours: `interpreter` has the steps, `program` runs them through this module, `compiled_stage` counts what is kept,
`slots` loads a segment's parameters before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from fusionai.backends.torch.interpreter import Interpreter
from fusionai.backends.torch.operators import TorchContext
from fusionai.ir.graph import reads

_NONE: Final[Mapping[str, Collection[str]]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RecomputedSegment:
    """Steps [start, stop) of an interpreter. `entering`: registers that they read and do not fill. `weights`: keys of
    the movable parameters whose bytes they read."""

    start: int
    stop: int
    entering: tuple[int, ...]
    weights: frozenset[str] = frozenset()


def segments(interpreter: Interpreter, weights: Mapping[str, Collection[str]] = _NONE) -> tuple[RecomputedSegment, ...]:
    """Return one segment per block. Nodes out of order, such as a mask that all blocks read, belong to the surrounding
    block. `weights`: value -> keys of the parameters that it is or may share memory with."""
    found: list[RecomputedSegment] = []
    start = 0
    highest = -1
    for position, step in enumerate(interpreter.steps):
        if step.node.block > highest:
            if position > start:
                found.append(_segment(interpreter, start, position, weights))
                start = position
            highest = step.node.block
    if start < len(interpreter.steps):
        found.append(_segment(interpreter, start, len(interpreter.steps), weights))
    return tuple(found)


def free(_part: RecomputedSegment) -> None:
    """Do nothing: the parameters are always in memory."""


def run_in_segments(
    interpreter: Interpreter,
    parts: tuple[RecomputedSegment, ...],
    context: TorchContext,
    inputs: Mapping[str, Any],
    params: Mapping[str, Any],
    precision: Callable[[], AbstractContextManager[object]],
    enter: Callable[[RecomputedSegment], None] = free,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run like `Interpreter.run`, keeping only the values that enter each of `parts` for backward.

    `precision`: the context the caller runs this in; entered again when a segment is recomputed. `enter`: called
    whenever a segment's parameters are about to be read, in backward too. Neither may hold the outputs, see
    `program._precision`. Inputs and parameters must not change before backward.
    """
    registers = interpreter.start(context, inputs, params)
    for part in parts:
        enter(part)
        if not context.training:
            interpreter.advance(registers, part.start, part.stop)
            continue
        entering = [registers[place] for place in part.entering]
        kept = _Kept(partial(_again, interpreter, part, context, entering, precision), partial(enter, part))
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            interpreter.advance(registers, part.start, part.stop)
    return interpreter.results(registers)


class _EnoughError(Exception):
    """Stops a recomputation when all tensors that backward can ask for exist again."""


def _again(
    interpreter: Interpreter,
    part: RecomputedSegment,
    context: TorchContext,
    entering: list[Any],
    precision: Callable[[], AbstractContextManager[object]],
) -> None:
    """Run a segment once more."""
    registers = interpreter.blank(context)
    for place, value in zip(part.entering, entering, strict=True):
        registers[place] = value
    with torch.enable_grad(), precision():
        interpreter.advance(registers, part.start, part.stop)


class _Kept:
    """Saved tensors of one segment of one microbatch: only their numbers, until backward asks for one."""

    def __init__(self, again: Callable[[], None], enter: Callable[[], None]) -> None:
        self._again = again
        self._enter = enter
        self._count = 0
        self._made: dict[int, Tensor] = {}

    def pack(self, _saved: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> Tensor:
        # Needed even if the tensor exists: it may be a parameter that was replaced by another segment's.
        self._enter()
        if number not in self._made:
            self._made = self._make()
        # Handed over, so that it lives only as long as backward needs it.
        return self._made.pop(number)

    def _make(self) -> dict[int, Tensor]:
        made: dict[int, Tensor] = {}

        def keep(saved: Tensor) -> None:
            # Detached: otherwise it would hold the graph of this run, through which no backward goes.
            made[len(made)] = saved.detach()
            if len(made) == self._count:
                raise _EnoughError

        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, _nothing):
                self._again()
        except _EnoughError:
            pass
        return made


def _segment(
    interpreter: Interpreter, start: int, stop: int, weights: Mapping[str, Collection[str]]
) -> RecomputedSegment:
    filled: set[int] = set()
    entering: dict[int, None] = {}
    keys: set[str] = set()
    for step in interpreter.steps[start:stop]:
        for name in reads(step.node):
            register = interpreter.values[name]
            if register not in filled:
                entering[register] = None
            keys.update(weights.get(name, ()))
        filled.update(interpreter.values[name] for name in step.node.outputs)
    return RecomputedSegment(start, stop, tuple(entering), frozenset(keys))


def _nothing(_saved: None) -> Tensor:
    raise AssertionError("nothing runs backward through a segment made again")
