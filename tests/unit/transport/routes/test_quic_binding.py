"""The library for QUIC is used only where it is the one that is known; its copying is mended only where that is so."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fusionai.primitives.errors import TransportError
from fusionai.transport.routes import quic as quic_binding

installed = pytest.mark.skipif(not quic_binding.available(), reason="the library for QUIC, iroh, is not installed here")


@installed
def test_what_is_written_at_once_is_what_was_written_byte_by_byte():
    library: Any = quic_binding.load()
    builder = library._UniffiRustBufferBuilder()
    for value in (b"", b"one", bytes(100_000), memoryview(b"two")):
        builder.write(value)
    try:
        assert builder.rbuf.data[0 : builder.rbuf.len] == b"one" + bytes(100_000) + b"two"
    finally:
        builder.discard()
    assert quic_binding.load() is library, "a second time changes nothing"


@installed
def test_another_version_is_not_touched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.3.0")
    with pytest.raises(TransportError, match=r"needs iroh 1\.2\.0, 1\.3\.0 is installed"):
        quic_binding.load()
    assert not quic_binding.available()


def test_a_machine_without_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "iroh", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.0")
    with pytest.raises(TransportError) as missing:
        quic_binding.load()
    assert "pip install 'fusionai[quic]'" in str(missing.value)


class Buffer:
    """What the binding's builder looks like from outside, filled with other bytes than it was given."""

    def __init__(self) -> None:
        self.rbuf = SimpleNamespace(data=b"", len=0)

    def write(self, value: bytes) -> None:
        self.rbuf = SimpleNamespace(data=self.rbuf.data + bytes(value)[::-1], len=self.rbuf.len + len(value))

    def discard(self) -> None:
        pass


def test_a_library_that_fills_buffers_otherwise_is_left_as_it_was():
    library = SimpleNamespace(_UniffiRustBufferBuilder=Buffer)
    original = Buffer.write
    with pytest.raises(TransportError, match="its Python binding is not the one expected"):
        quic_binding._repair(library)
    assert Buffer.write is original
