"""Host tensors become torch tensors and back without changing a bit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusionai.backends.torch import host
from fusionai.backends.torch.host import ALIGNMENT_BYTES, DTYPES, to_host, to_torch
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, host_tensor

CPU = torch.device("cpu")


def random_bytes(count: int) -> bytearray:
    return bytearray(np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8).tobytes())


def test_every_dtype_of_the_wire_is_known():
    assert DTYPES.keys() == ITEMSIZE_BYTES.keys()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize("own", [False, True])
def test_bits_survive_the_round_trip(dtype, shape, own):
    count = int(np.prod(shape)) * ITEMSIZE_BYTES[dtype]
    data = bytearray(count) if dtype == "bool" else random_bytes(count)
    tensor = to_torch(host_tensor(dtype, shape, data), CPU, own=own)
    assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[dtype], shape)
    back = to_host(tensor, own=own)
    assert (back.dtype, back.shape, bytes(back.data)) == (dtype, shape, bytes(data))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x.chunk(2, dim=1)[1],
        lambda x: x[:, :1].expand(4, 6),
        lambda x: x[1:],
        lambda x: x.reshape(2, 2, 6).permute(2, 0, 1),
    ],
    ids=["transposed", "half of each row", "expanded", "off alignment", "permuted"],
)
def test_strides_and_alignment_survive_where_they_are_asked_for(make):
    value = make(torch.arange(24, dtype=torch.float32).reshape(4, 6).clone())
    sent = to_host(value, laid_out=True)
    there = to_torch(sent, CPU)
    assert torch.equal(there, value)
    assert there.stride() == value.stride()
    assert there.data_ptr() % ALIGNMENT_BYTES == value.data_ptr() % ALIGNMENT_BYTES
    assert to_host(value).layout == ()


def test_large_gaps_are_closed_and_the_order_of_dimensions_stays():
    value = torch.zeros(4, 64, 6)[:, ::32].permute(1, 0, 2)
    sent = to_host(value, laid_out=True)
    assert sent.layout == (6, 12, 1, 0)
    assert torch.equal(to_torch(sent, CPU), value)
    assert to_host(torch.zeros(3, 4), laid_out=True).layout == ()


def aligned(count: int) -> memoryview:
    """Memory as torch would give it."""
    return torch.empty(count + ALIGNMENT_BYTES, dtype=torch.uint8).numpy().data[:count]


def test_aligned_writable_memory_is_used_in_place():
    view = aligned(64)
    tensor = to_torch(host_tensor("float32", (16,), view), CPU)
    view[:] = np.full(16, 2.5, dtype=np.float32).tobytes()
    assert torch.equal(tensor, torch.full((16,), 2.5))


@pytest.mark.parametrize("case", ["own", "unaligned", "read only"])
def test_other_memory_is_copied_to_aligned_memory(case):
    view = aligned(80)
    view[:] = np.arange(20, dtype=np.float32).tobytes()  # fresh memory may hold a NaN, which equals nothing
    part = {"own": view[:64], "unaligned": view[4:68], "read only": view[:64].toreadonly()}[case]
    tensor = to_torch(host_tensor("float32", (16,), part), CPU, own=case == "own")
    before = tensor.clone()
    view[:] = b"\1" * 80
    assert torch.equal(tensor, before)
    assert tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_strided_tensors_and_sizes_leave_as_contiguous_bytes():
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3).t()
    back = to_host(tensor)
    assert (back.shape, bytes(back.data)) == ((3, 2), tensor.contiguous().numpy().tobytes())
    size = to_host(7)
    assert (size.dtype, size.shape, int.from_bytes(size.data, "little")) == ("int64", (), 7)


def test_own_bytes_do_not_follow_the_tensor():
    tensor = torch.ones(4)
    kept, shared = to_host(tensor, own=True), to_host(tensor)
    tensor.zero_()
    assert bytes(kept.data) == np.ones(4, dtype=np.float32).tobytes()
    assert bytes(shared.data) == bytes(16)


def test_a_dtype_that_can_not_travel_is_refused():
    with pytest.raises(ExecutionError, match="complex64"):
        to_host(torch.zeros(1, dtype=torch.complex64))


@pytest.mark.parametrize("own", [False, True])
def test_a_single_element_leaves_whatever_its_stride(own: bool):
    values = torch.arange(12.0).reshape(3, 4)
    value = values[1:, 3:].diagonal()
    assert value.stride() != (1,)
    sent = to_host(value, own=own)
    assert (sent.shape, bytes(sent.data)) == ((1,), np.float32(7.0).tobytes())


def test_what_leaves_a_card_is_not_pinned_and_a_large_tensor_enters_without(monkeypatch: pytest.MonkeyPatch):
    """Pinned memory is kept for good, and what is sent on may be retained."""
    pinned: list[int] = []
    empty = torch.empty

    def noting(*sizes: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        if pin_memory:
            pinned.append(sizes[0])  # pyright: ignore
        return empty(*sizes, **options)  # pyright: ignore

    with FakeTensorMode():
        value = torch.zeros(3, device="cuda")
        monkeypatch.setattr(torch, "empty", noting)
        with pytest.raises(Exception, match="numpy"):  # a tensor without memory goes no further
            to_host(value)
    assert pinned == []
    cuda = SimpleNamespace(type="cuda")
    monkeypatch.setattr(host, "PINNED_BYTES", 64)
    for count in (64, 65):
        with pytest.raises((AttributeError, TypeError, RuntimeError)):  # there is no card to copy to
            to_torch(host_tensor("uint8", (count,), bytearray(count)), cuda)  # pyright: ignore
    assert pinned == [64]
