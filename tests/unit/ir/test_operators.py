"""The allow-list is consistent and holds nothing that touches the world."""

from __future__ import annotations

import re

import pytest

from fusionai.ir.operators import OPERATORS

_BANNED = re.compile(
    r"file|rand|bernoulli|multinomial|dropout|storage|set_|resize|as_strided|_pickle|save|load|exec|view\b"
)


def test_names_are_full_overload_names() -> None:
    for name, operator in OPERATORS.items():
        assert operator.name == name
        assert re.fullmatch(r"aten\.\w+\.\w+|sym\.\w+|fusion\.\w+", name), name


def test_nothing_reaches_outside_its_operands() -> None:
    assert [name for name in OPERATORS if name.startswith("aten.") and _BANNED.search(name)] == []


def test_nothing_works_in_place() -> None:
    assert [name for name in OPERATORS if re.search(r"aten\.\w*[a-z]_\.", name)] == []


def test_cost_free_means_free() -> None:
    for operator in OPERATORS.values():
        if operator.view:
            assert operator.flops == "none"
            assert operator.saves == "nothing"
        if operator.category in ("size", "create"):
            assert not operator.differentiable


@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("aten._native_batch_norm_legit_functional.default", 5),
        ("aten.native_layer_norm.default", 3),
        ("aten.max_pool2d_with_indices.default", 2),
        ("aten.split.Tensor", None),
        ("fusion.attention", 1),
    ],
)
def test_results(name: str, results: int | None) -> None:
    assert OPERATORS[name].results == results


@pytest.mark.slow
def test_every_aten_operator_exists_with_that_many_results() -> None:
    torch = pytest.importorskip("torch")
    for name, operator in OPERATORS.items():
        if not name.startswith("aten."):
            continue
        _, op, overload = name.split(".")
        schema = getattr(getattr(torch.ops.aten, op), overload)._schema
        assert not schema.is_mutable, name
        if operator.results is not None and operator.category != "size":
            assert len(schema.returns) == operator.results, name
            assert "List" not in str(schema.returns[0].type), name
        elif operator.results is None:
            assert "List" in str(schema.returns[0].type), name
