"""Tensors that have arrived at a stage and wait for the work that uses them, by step: a replay delivers many steps at
once.

`execution.training.arrivals` checks that a tensor belongs to the stage; this module limits the bytes that may wait.
Credit bounds what well-behaved neighbours send, and the limit bounds the others. `execution.training.runtime` uses it
and first asks its stage machine whether a tensor is needed at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from fusionai.execution.training.arrivals import Arrivals
from fusionai.execution.training.codecs import Carried, Packed, unpack_all
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Told
from fusionai.wire.messages import Mode

Tensors = Mapping[str, Carried]
Some = TypeVar("Some", HostTensor, HostTensor | Packed)
Entries = list[tuple[str, HostTensor]]
ByConsumer = dict[str, dict[int, Carried]]
"""Value -> consumer stage -> its gradient."""


@dataclass(slots=True)
class _Shared:
    """Shared gradients from one stage, as far as they have arrived."""

    values: dict[str, HostTensor] = field(default_factory=dict[str, HostTensor])
    parts: set[int] = field(default_factory=set[int])


class Held:
    """Waiting tensors of one stage. `check` raises `ExecutionError` for wrong tensors, `keep` if the limit is
    exceeded."""

    def __init__(self, stage: int, arrivals: Arrivals, limit_bytes: int) -> None:
        self._stage = stage
        self._arrivals = arrivals
        self._limit_bytes = limit_bytes
        self._inputs: defaultdict[tuple[Mode, int, int], dict[str, Carried]] = defaultdict(dict)
        self._gradients: defaultdict[tuple[int, int], ByConsumer] = defaultdict(lambda: defaultdict(dict))
        self._partials: defaultdict[int, dict[int, _Shared]] = defaultdict(dict)
        """Step -> sender -> its part of the shared gradients."""
        self._totals: defaultdict[int, dict[int, _Shared]] = defaultdict(dict)
        """Step -> home stage -> its sums."""
        self._agreed: dict[tuple[int, Told], dict[str, Carried]] = {}
        """(step, form) -> values of the agreement after that step, as far as they have arrived."""
        self._whole: dict[int, Told] = {}
        """Step -> the form in which the agreement has arrived completely."""
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    @property
    def microbatches(self) -> int:
        """Number of microbatches whose inputs wait."""
        return len(self._inputs)

    def check(self, message: wire.Forward | wire.Backward | wire.SharedGradient, tensors: Tensors) -> None:
        match message:
            case wire.Forward():
                self._arrivals.forward(message, tensors)
            case wire.Backward():
                self._arrivals.backward(message, tensors)
            case wire.SharedGradient():
                self._arrivals.shared(message, tensors)

    def keep(self, message: wire.Forward | wire.Backward | wire.SharedGradient, tensors: Tensors) -> bool:
        """Store tensors that the stage machine needs, each at most once. Return whether the message is now complete."""
        match message:
            case wire.Forward():
                self._admit(tensors)
                self._inputs[message.mode, message.step, message.microbatch].update(tensors)
            case wire.Backward():
                self._admit(tensors)
                table = self._gradients[message.step, message.microbatch]
                for value, gradient in tensors.items():
                    table[value][message.consumer] = gradient
            case wire.SharedGradient():
                table = self._partials if message.phase == "partial" else self._totals
                known = table[message.step].setdefault(message.sender, _Shared())
                # A sender that resends after a fault sends the same values again, starting with the first part.
                self._freed({key: known.values.pop(key) for key in tensors.keys() & known.values.keys()})
                self._admit(tensors)
                known.values.update(unpack_all(tensors))
                known.parts.add(message.part)
                return len(known.parts) >= message.parts
        return True

    def keep_agreed(self, step: int, told: Told, values: Tensors, *, last: bool) -> frozenset[str]:
        """Store part of the agreement after `step` and return the names of all its values that have arrived. Values
        that come again replace the earlier ones."""
        known = self._agreed.setdefault((step, told), {})
        self._freed({key: known.pop(key) for key in values.keys() & known.keys()})
        self._admit(values)
        known.update(values)
        if last:
            self._whole[step] = told
        return frozenset(known)

    def take_agreed(self, step: int) -> tuple[Told, dict[str, Carried]]:
        """Return (form, values) of the form that arrived completely last. Values that came in another form are
        dropped."""
        found = {told: self._freed(self._agreed.pop((step, told), {})) for told in get_args(Told)}
        told = self._whole.pop(step)
        return told, found[told]

    def take_inputs(self, mode: Mode, step: int, microbatch: int) -> dict[str, Carried]:
        return self._freed(self._inputs.pop((mode, step, microbatch)))

    def take_gradients(self, step: int, microbatch: int) -> ByConsumer:
        taken = self._gradients.pop((step, microbatch), {})
        for by_consumer in taken.values():
            self._bytes -= sum(tensor.nbytes for tensor in by_consumer.values())
        return taken

    def take_partials(self, step: int) -> list[tuple[int, Entries]]:
        """Return (sender, its part), in stage order."""
        return self._taken(self._partials, step)

    def take_totals(self, step: int) -> list[tuple[int, Entries]]:
        """Return (home stage, its sums). Empty if this stage's own sums are the totals."""
        return self._taken(self._totals, step)

    def _taken(self, table: dict[int, dict[int, _Shared]], step: int) -> list[tuple[int, Entries]]:
        taken = sorted(table.pop(step, {}).items())
        return [(sender, list(self._freed(shared.values).items())) for sender, shared in taken]

    def _admit(self, tensors: Tensors) -> None:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes + nbytes > self._limit_bytes:
            raise ExecutionError(
                f"stage {self._stage} would hold {self._bytes + nbytes} bytes of tensors for later work, "
                f"expected at most {self._limit_bytes}."
            )
        self._bytes += nbytes

    def drop(self, below: int | None = None) -> None:
        """Drop everything, or the inputs of steps before `below`."""
        if below is None:
            for table in (self._inputs, self._gradients, self._partials, self._totals, self._agreed, self._whole):
                table.clear()
            self._bytes = 0
            return
        for key in [key for key in self._inputs if key[1] < below]:
            self._freed(self._inputs.pop(key))

    def _freed(self, tensors: dict[str, Some]) -> dict[str, Some]:
        self._bytes -= sum(tensor.nbytes for tensor in tensors.values())
        return tensors
