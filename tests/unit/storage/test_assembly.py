"""Tensors put together from parts of others, and taken apart again."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.assembly import Assembly, Extent, assembled, inverted, whole


def numbers(*shape: int, start: int = 0) -> HostTensor:
    count = int(np.prod(shape))
    return host_tensor("float32", shape, np.arange(start, start + count, dtype=np.float32).tobytes())


def values(tensor: HostTensor) -> list[float]:
    return np.frombuffer(tensor.data, np.float32).tolist()


FUSED = {
    "gate.0": Assembly((2, 3), (Extent("fused", 0, 6),)),
    "up.0": Assembly((2, 3), (Extent("fused", 6, 6),)),
    "odd": Assembly((4,), (Extent("fused", 14, 2), Extent("fused", 12, 2))),
    "norm": whole("plain", (5,)),
}
SHAPES = {"fused": (16,), "plain": (5,)}
TENSORS = {"fused": numbers(16), "plain": numbers(5, start=100)}


def test_parts_are_put_together_and_taken_apart() -> None:
    made = {name: assembled(name, one, TENSORS.__getitem__) for name, one in FUSED.items()}
    assert values(made["up.0"]) == [6, 7, 8, 9, 10, 11]
    assert values(made["odd"]) == [14, 15, 12, 13]
    back = inverted(FUSED, SHAPES)
    for name, tensor in TENSORS.items():
        assert assembled(name, back[name], made.__getitem__) == tensor


@pytest.mark.parametrize(
    "assembly",
    [Assembly((5,), (Extent("plain", 1, 5),)), Assembly((4,), (Extent("plain", 0, 3),)), Assembly((0,), ())],
    ids=["beyond", "short", "nothing"],
)
def test_what_does_not_fit_is_refused(assembly: Assembly) -> None:
    with pytest.raises(StorageError, match=r"^w: "):
        assembled("w", assembly, TENSORS.__getitem__)


def test_parts_of_two_types_are_refused() -> None:
    both = Assembly((2,), (Extent("a", 0, 1), Extent("b", 0, 1)))
    held = {"a": numbers(1), "b": host_tensor("bfloat16", (1,), bytes(2))}
    with pytest.raises(StorageError, match="bfloat16 and float32"):
        assembled("w", both, held.__getitem__)


@pytest.mark.parametrize(
    "extents",
    [(Extent("w", 0, 3),), (Extent("w", 0, 3), Extent("w", 2, 2)), (Extent("w", 1, 3),)],
    ids=["a rest", "twice", "a gap"],
)
def test_only_what_keeps_every_element_once_can_be_inverted(extents: tuple[Extent, ...]) -> None:
    made = {"made": Assembly((sum(one.count for one in extents),), extents)}
    with pytest.raises(ValueError, match="element"):
        inverted(made, {"w": (4,)})
