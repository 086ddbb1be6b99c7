"""Every module of kernels for processors can be imported: otherwise slower operators would take its place quietly."""

from __future__ import annotations

from importlib import import_module

import pytest

from fusionai.backends.torch.row_code import Op


@pytest.mark.parametrize("module", ["row_products", "row_kernels", "attention_kernels"])
def test_kernels_compile(module: str):
    pytest.importorskip("numba")
    import_module(f"fusionai.backends.torch.{module}")


def test_processors_compute_every_operator_but_the_lookup():
    pytest.importorskip("numba")
    row_kernels = import_module("fusionai.backends.torch.row_kernels")
    known = {vars(row_kernels)[f"_{op.name}"] for op in Op if op is not Op.TABLE}
    assert known == set(Op) - {Op.TABLE}
