"""Local updates from the view of one job's driver: collects its stages' differences and receives agreements.

A job trains `every` steps on its own. Then its stages send their parameter differences, an `Exchange` combines them
with those of the other jobs, and the stages adopt the result. This module decides when a step's differences are
complete.

`training.driver` moves the messages, `training.outer` makes agreements, `execution.training.exchange` is the stages'
side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fusionai.execution.training.codecs import Carried, joined
from fusionai.execution.training.exchange import carried_shapes, check_values
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged, Told


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement after `step` of one job. `values`: in the form `told`, named as in
    `execution.exchange.carried_shapes`."""

    step: int
    told: Told
    values: Mapping[str, Carried]


class Exchange(Protocol):
    """Connection of one job to the others that train the same model."""

    async def agree(self, step: int, differences: Mapping[str, Carried]) -> Agreement:
        """Wait for the other jobs, up to a deadline. The same step always gets the same answer, also after a fault."""
        ...

    def known(self, since: int) -> Iterable[Agreement]:
        """Return the agreements of steps from `since` on, in order, for stages that run these steps again. Blocking."""
        ...

    def forget(self, below: int) -> None:
        """Drop agreements of steps below `below`, which no stage runs again. Blocking."""
        ...


class Differences:
    """Collects the differences of one round of a job's driver. `shapes`: stage -> parameter -> shape."""

    def __init__(self, shapes: Mapping[int, Mapping[str, tuple[int, ...]]], codec: Exchanged) -> None:
        self._shapes = {stage: carried_shapes(known, "mean") for stage, known in shapes.items()}
        self._codec: Exchanged = codec
        self._step = -1
        self._come: dict[int, dict[str, Carried]] = {}
        self._whole: set[int] = set()

    def take(self, message: wire.Difference, tensors: Mapping[str, HostTensor]) -> dict[str, Carried] | None:
        """Take part of a stage's differences. Return every parameter's difference once all stages have sent theirs,
        None before. A parameter of several stages takes the first stage's difference. Raises `ExecutionError` for
        invalid ones."""
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
