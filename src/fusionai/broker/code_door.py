"""The broker's side of joining with a code: its shares, the exchanges in progress, and the answers to each message.

`coordination.broker.join_code` decides how often and until when a code may be tried, `security.code_exchange` computes.
`service` passes on the messages of strangers and says who may have a code made. Connections of strangers are few, short
and end after this exchange (`transport.channels.accepting`, `broker.server`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.broker.join_code import (
    CODE_LIFETIME_S,
    JOIN_CODE,
    MAX_EXCHANGES,
    CodeReplaced,
    ExchangeBegun,
    JoinCode,
    ProofShown,
    made_code,
)
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PeerId
from fusionai.transport.security.code_exchange import BrokerExchange, CodeKey, draw_code
from fusionai.wire.messages import CodeAccepted, CodeAnswer, CodeOffer, CodeProof, Message, Refused

_LOG: Final = logging.getLogger(__name__)
_ENDED: Final = {
    "used": "The join code was used: a machine got an invitation with it.",
    "dead": "The join code was tried wrongly too often and is dead. If that was not you, another machine in this "
    "network is guessing. `fusion invite --code` makes a new one.",
}
"""Sentence for the broker's owner, by the phase that a code has got into."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An exchange whose proof is awaited. `share`: the newcomer's."""

    exchange: BrokerExchange
    share: bytes


@dataclass
class CodeDoor:
    """At most one code is open. `invite` returns a new invitation for one machine and raises `RefusedError` or
    `StorageError`; `notice` gets sentences for the broker's owner; `draw` makes codes."""

    authority_key: bytes
    broker: PeerId
    clock: Clock
    invite: Callable[[], str]
    notice: Callable[[str], None] = _LOG.warning
    draw: Callable[[], str] = draw_code
    _code: JoinCode | None = None
    _ready: list[BrokerExchange] = field(default_factory=list[BrokerExchange])
    """Exchanges of the open code that no machine has begun. Their shares are computed in advance, so that the time of
    an answer says nothing about the code."""
    _begun: dict[int, _Begun] = field(default_factory=dict[int, _Begun])
    """Exchanges in progress, by the connection's number."""

    def make(self) -> str:
        """Return a new code. An earlier one ends."""
        if self._code is not None and self._code.phase == "open":
            self._code = JOIN_CODE.advance(self._code, CodeReplaced())
        self._begun.clear()
        code = self.draw()
        self._ready = [BrokerExchange(code, self.authority_key, self.broker) for _ in range(MAX_EXCHANGES)]
        self._code = made_code(self.clock.now_s(), CODE_LIFETIME_S)
        return code

    def answer(self, connection: int, message: CodeOffer | CodeProof) -> Message:
        """Return the answer to a stranger. Raises what `invite` raises."""
        code = self._code
        if code is None or code.phase != "open":
            return _refused("No join code is open.")
        match message:
            case CodeOffer():
                return self._begin(code, connection, message)
            case CodeProof():
                return self._judge(code, connection, message)

    def ended(self, connection: int) -> None:
        """Forget the exchange of a connection that is gone. It stays counted."""
        self._begun.pop(connection, None)

    def _begin(self, code: JoinCode, connection: int, message: CodeOffer) -> Message:
        if connection in self._begun:
            return _refused("One exchange per connection.")
        self._adopt(JOIN_CODE.advance(code, ExchangeBegun(self.clock.now_s())))
        if not self._ready:
            return _refused("The join code has expired or was tried too often.")
        exchange = self._ready.pop()
        self._begun[connection] = _Begun(exchange, message.share)
        return CodeAnswer(share=exchange.share)

    def _judge(self, code: JoinCode, connection: int, message: CodeProof) -> Message:
        begun = self._begun.pop(connection, None)
        if begun is None:
            return Refused(code="bad_message", reason="Expected a share before a proof.")
        key = _key_of(begun)
        right = key is not None and key.is_proof(message.proof)
        moved = self._adopt(JOIN_CODE.advance(code, ProofShown(self.clock.now_s(), right)))
        if moved.phase == "used" and key is not None:
            return CodeAccepted(sealed=key.seal(self.invite().encode()))
        if moved.phase == "expired":
            return _refused("The join code has expired.")
        left = "it is dead now" if moved.phase == "dead" else f"{moved.tries_left} more tries"
        return _refused(f"The code is wrong, or another machine is between this one and the broker ({left}).")

    def _adopt(self, moved: JoinCode) -> JoinCode:
        self._code = moved
        if moved.phase != "open":
            self._ready.clear()
            self._begun.clear()
            if moved.phase in _ENDED:
                self.notice(_ENDED[moved.phase])
        return moved


def _key_of(begun: _Begun) -> CodeKey | None:
    """Return the exchange's key; None for a share that is none."""
    try:
        return begun.exchange.key(begun.share)
    except TrustError:
        return None


def _refused(reason: str) -> Refused:
    return Refused(code="bad_code", reason=reason)
