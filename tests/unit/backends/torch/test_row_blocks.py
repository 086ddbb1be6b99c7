"""Memory in wide pages: places of their own, aligned, given back with the last tensor; the same numbers as anywhere."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from fusionai.backends.torch.row_blocks import PAGE_BYTES, WidePages, taken_bytes

SHAPES = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 4, 16, 2), torch.bfloat16), ((1,), torch.float32)]


def test_places_are_apart_aligned_and_zero() -> None:
    pages = WidePages(sum(taken_bytes(*one) for one in SHAPES))
    made = [pages.take(*one) for one in SHAPES]
    assert made[0].data_ptr() % PAGE_BYTES == 0
    for tensor, (shape, dtype) in zip(made, SHAPES, strict=True):
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
    for number, tensor in enumerate(made):
        tensor.fill_(number + 1)
    assert [float(tensor.flatten()[-1]) for tensor in made] == [1.0, 2.0, 3.0, 4.0]
    assert [float(tensor.flatten()[0]) for tensor in made] == [1.0, 2.0, 3.0, 4.0]


def test_what_does_not_fit_lies_elsewhere() -> None:
    pages = WidePages(64)
    first, second = pages.take((16,), torch.float32), pages.take((16,), torch.float32)
    assert abs(first.data_ptr() - second.data_ptr()) > 64
    assert not second.any()
    assert WidePages(0).take((4,), torch.float32).shape == (4,)
    assert pages.take((0, 4), torch.float32).shape == (0, 4)


def test_memory_goes_with_the_last_tensor() -> None:
    pages = WidePages(1024)
    memory = weakref.ref(pages._memory)
    tensor = pages.take((4,), torch.float32)
    del pages
    gc.collect()
    assert memory() is not None
    assert float(tensor.sum()) == 0.0
    del tensor
    gc.collect()
    assert memory() is None


def test_a_system_without_wide_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("no.")

    monkeypatch.setattr("fusionai.backends.torch.row_blocks.mmap.mmap", Plain)
    assert WidePages(64).take((16,), torch.float32).shape == (16,)
    monkeypatch.setattr("fusionai.backends.torch.row_blocks.sys.platform", "darwin")
    assert WidePages(64).take((16,), torch.float32).shape == (16,)
