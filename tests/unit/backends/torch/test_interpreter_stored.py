"""How long the float32 numbers of stored weights live on torch."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from fusionai.backends.torch.interpreter import PackedReading, StoredWeight
from fusionai.backends.torch.operators import PLAIN
from fusionai.ir.schema import Node, ParamSpec, Ref, Stored
from fusionai.ir.weights import pack_stored
from fusionai.primitives.errors import ExecutionError
from harness.opened_weights import unpack_stored

LINEAR = Node(id=1, op="aten.linear.default", args=(Ref("x"), Ref("w")), outputs=("y",))
EMBEDDING = Node(id=2, op="aten.embedding.default", args=(Ref("w"), Ref("ids")), outputs=("y",))


def weight(form: Stored) -> tuple[StoredWeight, torch.Tensor]:
    """Return a packed weight and the numbers that it stands for."""
    values = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    spec = ParamSpec(key="w", kind="parameter", shape=(64, 64), dtype="float32", stored=form)
    data = pack_stored(values, form)
    return StoredWeight(torch.from_numpy(data.copy()), spec), torch.from_numpy(unpack_stored(data, (64, 64), form))


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_they_live_for_a_product_and_for_its_part_of_backward(form: Stored, monkeypatch: pytest.MonkeyPatch):
    made: list[weakref.ref[torch.Tensor]] = []
    shipped = StoredWeight.open

    def watched(self: StoredWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        opened = shipped(self, dtype)
        made.append(weakref.ref(opened))
        return opened

    monkeypatch.setattr(StoredWeight, "open", watched)
    kept, stands_for = weight(form)
    multiply = PackedReading({"w"}).of(LINEAR, PLAIN[LINEAR.op], half=False)
    x = torch.randn(5, 64, requires_grad=True)
    y = multiply(x, kept)
    assert [one() for one in made] == [None], "autograd keeps the bytes, not these"
    y.sum().backward()
    assert [one() for one in made] == [None, None], "made once more, and gone again"
    other = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(other, stands_for).sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_of_a_table_only_what_is_looked_up_is_made(form: Stored, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StoredWeight, "open", lambda *_: pytest.fail("the whole table"))
    kept, stands_for = weight(form)
    look_up = PackedReading({"w"}).of(EMBEDDING, PLAIN[EMBEDDING.op], half=False)
    numbers = torch.tensor([[3, 0], [63, 3]])
    torch.testing.assert_close(look_up(kept, numbers), stands_for[numbers], rtol=0, atol=0)
    with pytest.raises(ExecutionError, match="expected indices from 0 to 63, got 64"):
        look_up(kept, torch.tensor([64]))


def test_who_reads_none_is_left_alone():
    compute = PLAIN[LINEAR.op]
    assert PackedReading({"other"}).of(LINEAR, compute, half=False) is compute
