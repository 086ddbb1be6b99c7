"""Loads the QUIC library (iroh) and repairs its Python binding, or reports why it can't be used.

The Python binding of version 1.2.0 copies outgoing bytes one at a time in Python, which limits sending to 5 MB/s and
occupies a core. This module replaces that copy by a single `memmove`. Because the change touches private code of the
library, it is applied only to the version it was written for, and only if test buffers filled both ways are equal.
`quic` and `quic_channel` use the loaded library.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from types import ModuleType
from typing import Any, Final

from fusionai.primitives.errors import TransportError

VERSION: Final = "1.2.0"
_SAMPLES: Final = (b"", b"\x00", bytes(range(256)), b"\xff" * 15, b"ab" * 8, bytes(range(251)) * 40)
"""Test data, written one after another into one buffer that has to grow meanwhile."""
_INSTALL: Final = "Install it with `pip install 'fusionai[quic]'`; without it links go by TCP or over the relay."


def load() -> ModuleType:
    """Return the library with its copying repaired. Raises `TransportError` saying what is missing."""
    try:
        version = importlib.metadata.version("iroh")
        from iroh import iroh_ffi
    except (ImportError, OSError) as error:
        raise TransportError(f"QUIC needs the package iroh, which can't be loaded ({error}).", hint=_INSTALL) from error
    if version != VERSION:
        raise TransportError(f"QUIC needs iroh {VERSION}, {version} is installed.", hint=_INSTALL)
    _mend(iroh_ffi)
    return iroh_ffi


def available() -> bool:
    try:
        load()
    except TransportError:
        return False
    return True


def _mend(library: Any) -> None:
    """Replace the binding's copy, once per process.

    Raises `TransportError`, and leaves the library unchanged, if the replacement gives another result.
    """
    builder = library._UniffiRustBufferBuilder
    if builder.write is _write_at_once:
        return
    original = builder.write
    wanted = _written(library, original)
    if wanted != b"".join(_SAMPLES) or _written(library, _write_at_once) != wanted:
        raise TransportError(
            f"iroh {VERSION} is installed, but its Python binding is not the one expected.", hint=_INSTALL
        )
    builder.write = _write_at_once


def _written(library: Any, write: Any) -> bytes:
    """Return the content of a buffer after the samples have been written into it."""
    builder = library._UniffiRustBufferBuilder()
    try:
        for sample in _SAMPLES:
            write(builder, sample)
        return builder.rbuf.data[0 : builder.rbuf.len]
    finally:
        builder.discard()


def _write_at_once(self: Any, value: bytes) -> None:
    """Replacement of the binding's `write`: append `value` to the buffer, after reserving room for it."""
    with self._reserve(len(value)):
        if value:
            start = ctypes.cast(self.rbuf.data, ctypes.c_void_p).value or 0
            ctypes.memmove(start + self.rbuf.len, bytes(value), len(value))
