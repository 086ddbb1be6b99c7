"""This peer's place in the pool: register, keep the lease, come back after the broker was away.

Decides when to try again (0.5 s, doubling to 15 s). A running job is not disturbed by the broker's absence.

Neighbours: `peer.daemon` starts it, `broker` answers, `transport.conversation` carries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from fusionai.primitives.errors import FusionError, RefusedError, TransportError, TrustError, WireError
from fusionai.scheduling.types import PeerProfile
from fusionai.transport.conversation import Conversation
from fusionai.transport.interface import Transport
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 15.0


class Registration:
    """`on_registered` is called after each success, `on_leave` when the machine's owner asked it to leave."""

    def __init__(
        self,
        transport: Transport,
        brokers: Sequence[str],
        *,
        boot: int,
        profile: PeerProfile,
        addresses: tuple[str, ...],
        jobs: Callable[[], tuple[str, ...]],
        on_registered: Callable[[wire.Registered], None],
        on_leave: Callable[[bool], None],
    ) -> None:
        self._transport = transport
        self._brokers = brokers
        self._register = wire.Register(
            boot=boot, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=addresses
        )
        self._jobs = jobs
        self._on_registered = on_registered
        self._on_leave = on_leave
        self._conversation: Conversation | None = None

    async def run(self) -> None:
        """Until cancelled. Raises what can't mend itself: a refusal, a broken trust."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._session()
                retry_s = FIRST_RETRY_S
            except (TransportError, WireError) as error:
                log.warning("the broker can't be reached (%s); next try in %.1f s", error, retry_s)
            self._conversation = None
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _session(self) -> None:
        channel = await self._transport.dial(self._brokers, expect=None, stream="control")
        conversation = Conversation(channel, notices=(wire.LeaveNotice,), on_notice=self._notice)
        try:
            answer = await conversation.ask(self._register)
            if not isinstance(answer, wire.Registered):
                raise TrustError(f"expected the broker to register this peer, got {type(answer).__name__}.")
            self._conversation = conversation
            self._on_registered(answer)
            while True:
                await asyncio.sleep(answer.heartbeat_s)
                await conversation.ask(wire.Heartbeat(boot=self._register.boot, jobs=self._jobs()))
        except RefusedError as error:
            if error.code in ("unknown_peer", "not_authorised", "bad_message"):
                raise
            raise TransportError(f"the broker refused: {error}") from error
        finally:
            await conversation.close()

    async def leave(self) -> None:
        """Tell the broker that this peer goes; a broker that can't be reached learns it from the lease."""
        if self._conversation is None:
            return
        try:
            await self._conversation.ask(wire.Leave(drain=False))
        except FusionError as error:
            log.info("could not say goodbye: %s", error)

    def _notice(self, message: wire.Message) -> None:
        if isinstance(message, wire.LeaveNotice):
            self._on_leave(message.drain)
