"""Backends by name: who is there opens, what is not there says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusionai.backends import registry
from fusionai.backends.registry import open_backend, suited
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


def test_a_framework_built_for_other_processors_is_named_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """jaxlib raises this on processors without AVX."""
    (tmp_path / "jax.py").write_text("raise RuntimeError('This version of jaxlib was built using AVX instructions')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [name for name in sys.modules if name.split(".")[0] == "jax" or ".backends.jax" in name]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UsageError, match=r"backend jax can't be used on this machine: .* AVX instructions") as raised:
        open_backend("jax", device="cpu")
    assert "fusion doctor" in (raised.value.hint or "")


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(UsageError, match="there is no backend 'jaxx'") as raised:
        open_backend("jaxx", device="cpu")
    assert raised.value.hint == "Did you mean jax?"


@pytest.mark.parametrize(
    ("installed", "build", "device", "taken"),
    [
        (("torch",), "2.13.0", "auto", "torch"),
        (("torch", "jax"), "2.13.0+cpu", "auto", "torch"),
        (("torch", "jax", "jax_cuda12_plugin"), "2.13.0", "auto", "torch"),
        (("torch", "jax", "jax_cuda12_plugin"), "2.13.0+cpu", "auto", "jax"),
        (("torch", "jax", "jax_cuda12_plugin"), "2.13.0+cpu", "cpu", "torch"),
        (("jax", "onnxruntime"), "", "auto", "jax"),
        (("onnxruntime",), "", "auto", "onnxruntime"),
    ],
)
def test_a_machine_takes_the_framework_that_suits_it(
    installed: tuple[str, ...], build: str, device: str, taken: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(registry, "version", lambda name: build)
    assert suited(device) == taken


def test_without_any_framework_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="no supported framework is installed") as raised:
        open_backend("auto")
    assert raised.value.hint is not None
    assert "pip install torch" in raised.value.hint
