"""Local updates as a job's driver sees them: differences of its stages come in, what all agreed on goes out.

A job trains `every` steps alone; then its stages say how far they have come, somebody who knows the other jobs
(`Exchange`) says what all of them agree on, and the stages go over to it. Decides when a step's differences are whole.

Neighbours: `training.driver` moves the messages, `training.outer` agrees, `execution.exchange` is the stages' side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fusionai.execution.codecs import Carried, joined
from fusionai.execution.exchange import carried_shapes, check_values
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged, Told


@dataclass(frozen=True, slots=True)
class Agreement:
    """After `step` of one job. `values`: in the form `told`, named as `execution.exchange.carried_shapes` says."""

    step: int
    told: Told
    values: Mapping[str, Carried]


class Exchange(Protocol):
    """What one job knows of the others."""

    async def agree(self, step: int, differences: Mapping[str, Carried]) -> Agreement:
        """Waits for others, but not for ever. Asked again for the same step, after a fault, it says the same."""
        ...

    def known(self, since: int) -> Iterable[Agreement]:
        """Those of steps from `since` on that were made, in order: for stages that run these steps again. Blocking."""
        ...

    def forget(self, below: int) -> None:
        """No stage runs steps before this one again. Blocking."""
        ...


class Differences:
    """Of one round of a job's driver. `shapes`: stage -> parameter -> shape."""

    def __init__(self, shapes: Mapping[int, Mapping[str, tuple[int, ...]]], codec: Exchanged) -> None:
        self._shapes = {stage: carried_shapes(known, "mean") for stage, known in shapes.items()}
        self._codec: Exchanged = codec
        self._step = -1
        self._come: dict[int, dict[str, Carried]] = {}
        self._whole: set[int] = set()

    def take(self, message: wire.Difference, tensors: Mapping[str, HostTensor]) -> dict[str, Carried] | None:
        """Every parameter's, once those of all stages are here. A parameter of several stages has one difference, that
        of the first. Raises `ExecutionError` for what is none."""
        if message.step > self._step:
            self._step = message.step
            self._come.clear()
            self._whole.clear()
        if message.step < self._step or message.stage in self._whole:
            return None
        shapes, values = self._shapes.get(message.stage, {}), joined(tensors, message.packed)
        check_values(values, shapes, self._codec, f"the difference of step {message.step}")
        come = self._come.setdefault(message.stage, {})
        come.update(values)
        if not message.last:
            return None
        if missing := sorted(shapes.keys() - come):
            raise ExecutionError(f"stage {message.stage} sent no difference of {', '.join(missing[:3])}.")
        self._whole.add(message.stage)
        if self._whole != self._shapes.keys():
            return None
        merged: dict[str, Carried] = {}
        for stage in sorted(self._come, reverse=True):
            merged |= self._come[stage]
        return merged
