"""What waits at a stage: shared gradients come in several parts, and count when all are there."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.execution.training.arrivals import Arrivals
from fusionai.execution.training.held import Held
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


class Anything(Arrivals):
    """Takes whatever comes."""

    def __init__(self) -> None:
        return


def held(limit_bytes: int = 1000) -> Held:
    return Held(0, Anything(), limit_bytes)


def part(number: int, parts: int, *, sender: int = 2, phase: str = "partial") -> wire.SharedGradient:
    return wire.SharedGradient(
        fence=Fence(1, 1, 1), step=5, sender=sender, receiver=0, phase=phase, part=number, parts=parts
    )


def values(**named: float) -> dict[str, HostTensor]:
    return {
        name: host_tensor("float32", (1,), np.array([value], np.float32).tobytes()) for name, value in named.items()
    }


def number(tensor: HostTensor) -> float:
    return float(np.frombuffer(tensor.data, np.float32)[0])


def test_it_is_there_when_all_of_it_is() -> None:
    box = held()
    assert not box.keep(part(0, 2), values(a=1))
    assert box.keep(part(0, 1, sender=4), values(a=5, b=6)), "another sender's is whole by itself"
    assert box.keep(part(1, 2), values(b=2))
    taken = box.take_partials(5)
    assert [(sender, {key: number(value) for key, value in entries}) for sender, entries in taken] == [
        (2, {"a": 1, "b": 2}),
        (4, {"a": 5, "b": 6}),
    ]
    assert box.nbytes == 0


def test_what_is_sent_again_replaces_what_was_there() -> None:
    """The first sender died after a part of it; who stands in sends everything."""
    box = held()
    assert not box.keep(part(0, 2), values(a=1))
    assert not box.keep(part(0, 2), values(a=3))
    assert box.nbytes == 4
    assert box.keep(part(1, 2), values(b=4))
    assert {key: number(value) for _, entries in box.take_partials(5) for key, value in entries} == {"a": 3, "b": 4}


def test_sums_and_parts_are_told_apart() -> None:
    box = held()
    assert box.keep(part(0, 1, phase="total"), values(a=7))
    assert box.take_partials(5) == []
    assert len(box.take_totals(5)) == 1


def test_too_much_is_refused() -> None:
    box = held(limit_bytes=7)
    assert not box.keep(part(0, 2), values(a=1))
    with pytest.raises(ExecutionError, match="at most 7"):
        box.keep(part(1, 2), values(b=1))
    assert box.nbytes == 4


def test_nothing_is_left() -> None:
    box = held()
    box.keep(part(0, 2), values(a=1))
    box.drop()
    assert box.nbytes == 0
    assert not box.keep(part(1, 2), values(b=1)), "what was dropped does not count"
