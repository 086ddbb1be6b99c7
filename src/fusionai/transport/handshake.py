"""The version handshake: `Hello` from the dialling side, `Welcome` or `Refused` in return. Pure.

Decides which protocol versions are compatible, which streams a stranger may open, and which frame limits hold
afterwards.
"""

from __future__ import annotations

from typing import Final

from fusionai import __version__
from fusionai.primitives.errors import RefusedError, TrustError, WireError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.interface import Remote, Role
from fusionai.wire.frame import STRANGER_LIMITS, STREAM_LIMITS, FrameLimits
from fusionai.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REFUSAL_SENTENCES,
    Hello,
    Message,
    Refused,
    Stream,
    Welcome,
)

SOFTWARE: Final = f"fusionai/{__version__}"


def hello(stream: Stream) -> Hello:
    return Hello(stream=stream, software=SOFTWARE)


def answer(message: Message, remote: Remote) -> tuple[Stream, Welcome | Refused]:
    """Return the listening side's answer to the first message. Raises `WireError` if that is no `Hello`."""
    if not isinstance(message, Hello):
        raise WireError(f"expected hello as the first message, got {message.__struct_config__.tag}.")
    version = min(message.newest_version, PROTOCOL_VERSION)
    if version < max(message.oldest_version, OLDEST_PROTOCOL_VERSION):
        reason = (
            f"This side speaks protocol versions {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, "
            f"the other {message.oldest_version} to {message.newest_version}."
        )
        return message.stream, Refused(code="protocol_version", reason=reason)
    if remote.role == "stranger" and message.stream != "control":
        return message.stream, Refused(code="not_authorised", reason="A stranger may only ask to join.")
    return message.stream, Welcome(version=version, software=SOFTWARE)


def check_answer(message: Message) -> None:
    """Check the answer to `Hello`. Raises `RefusedError` on a refusal, `WireError` on anything but a valid welcome."""
    match message:
        case Welcome(version=version):
            if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
                raise WireError(f"expected a protocol version that this side offered, got {version}.")
        case Refused():
            raise refusal(message)
        case _:
            raise WireError(f"expected welcome, got {message.__struct_config__.tag}.")


def refusal(message: Refused) -> RefusedError:
    """The refusal as an error: the code's sentence, with the other side's reason as hint."""
    return RefusedError(REFUSAL_SENTENCES[message.code], code=message.code, hint=message.reason or None)


def check_remote(remote: Remote, expect: PeerId | None) -> None:
    """Raises `TrustError` unless the other side is `expect`, or the pool's broker if `expect` is None."""
    if expect is None and remote.role != "broker":
        raise TrustError(f"expected the pool's broker, got a {remote.role} of the pool at that address.")
    if expect is not None and remote.peer != expect:
        got = "a stranger" if remote.peer is None else f"peer {short(remote.peer)}"
        raise TrustError(f"expected peer {short(expect)}, got {got} at that address.")


def limits_from(sender: Role, stream: Stream) -> FrameLimits:
    """Return the limits of frames that a side with this role may send after the handshake."""
    return STRANGER_LIMITS if sender == "stranger" else STREAM_LIMITS[stream]
