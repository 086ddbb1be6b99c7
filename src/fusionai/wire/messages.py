"""All messages that cross a network, with their encoding, and one place to import their schemas from.

A message travels in one frame (`wire.frame`): a 16-byte header, this struct as msgpack, then the raw bytes of the
tensors it carries. Fields typed `msgspec.Raw` hold a type of a higher package (a profile or a plan of `scheduling`),
which decodes it against its own schema. All sizes are bounded by the schemas, so that they are checked before memory is
allocated for them.

The schemas are in one module for each pair of sides. `coordination` takes messages as events and returns them as
commands; `transport` moves them.
"""

from __future__ import annotations

from typing import Any, Final, Union, cast

import msgspec

from fusionai.wire.base import *
from fusionai.wire.broker import *
from fusionai.wire.exchange import *
from fusionai.wire.job import *
from fusionai.wire.serving import *
from fusionai.wire.training import *

Message = WireMessage
MESSAGES: Final[tuple[type[Message], ...]] = tuple(
    sorted(Message.__subclasses__(), key=lambda message: message.__module__)
)
"""All messages that a connection may carry, by module, whichever was imported first."""
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(cast("Any", Union)[MESSAGES])
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Return the message. Raises `msgspec.ValidationError` or `DecodeError`, which `wire.frame` turns into
    `WireError`."""
    return _DECODER.decode(data)
