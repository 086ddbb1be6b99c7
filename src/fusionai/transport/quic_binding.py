"""Loads the QUIC library (iroh) and mends its binding, or says clearly why it can't be used. Decides which version.

The Python binding of 1.2.0 copies outgoing bytes one at a time, in Python: 5 MB/s and a core. Here the copy is made in
one piece instead. That is a change to another's private code, so it is made to exactly the version it was written for,
and kept only if buffers filled both ways turn out the same.
Neighbours: `quic` and `quic_channel` use what this gives.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from types import ModuleType
from typing import Any, Final

from fusionai.primitives.errors import TransportError

VERSION: Final = "1.2.0"
_SAMPLES: Final = (b"", b"\x00", bytes(range(256)), b"\xff" * 15, b"ab" * 8, bytes(range(251)) * 40)
"""Written one after the other into one buffer, which grows meanwhile."""
_INSTALL: Final = "Install it with `pip install 'fusionai[quic]'`; without it links go by TCP or over the relay."


def load() -> ModuleType:
    """The library, its copying mended. Raises `TransportError` saying what is missing."""
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
    """Once. Raises `TransportError`, and leaves the library as it was, where the mended copy is not the same."""
    builder = library._UniffiRustBufferBuilder
    if builder.write is _write_at_once:
        return
    original = builder.write
    wanted = _written(library, original)
    if wanted != b"".join(_SAMPLES) or _written(library, _write_at_once) != wanted:
        raise TransportError(f"iroh {VERSION} is installed, but is not the library this version knows.", hint=_INSTALL)
    builder.write = _write_at_once


def _written(library: Any, write: Any) -> bytes:
    """What a buffer holds after the samples have been written into it."""
    builder = library._UniffiRustBufferBuilder()
    try:
        for sample in _SAMPLES:
            write(builder, sample)
        return builder.rbuf.data[0 : builder.rbuf.len]
    finally:
        builder.discard()


def _write_at_once(self: Any, value: bytes) -> None:
    """In place of the binding's method: `value` at the end of the buffer, which makes room first."""
    with self._reserve(len(value)):
        if value:
            start = ctypes.cast(self.rbuf.data, ctypes.c_void_p).value or 0
            ctypes.memmove(start + self.rbuf.len, bytes(value), len(value))
