"""Backends by name: who is there opens, what is not there says what to install."""

from __future__ import annotations

import sys

import pytest

from fusionai.backends.registry import open_backend
from fusionai.primitives.errors import UsageError


def test_a_backend_opens_by_its_name():
    assert open_backend("torch", device="cpu").name == "torch"


def test_a_package_that_is_not_installed_is_named_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    for module in [name for name in sys.modules if name.startswith("fusionai.backends.onnxruntime")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match="backend onnxruntime needs the Python package onnxruntime") as raised:
        open_backend("onnxruntime", device="cpu")
    assert raised.value.hint == "Install it: pip install 'fusionai[onnxruntime]'."


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(UsageError, match="there is no backend 'jaxx'") as raised:
        open_backend("jaxx", device="cpu")
    assert raised.value.hint == "Did you mean jax?"
