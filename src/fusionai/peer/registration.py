"""This peer's place in the pool: registers, keeps the lease, and reconnects after the broker was away.

Retries start after 0.5 s and double up to 15 s, or up to the time between two heartbeats once the broker has said it:
after its absence the broker gives each member one lease, which is several heartbeats. Each peer shortens these pauses
by a factor of its own, from its key, because the members of a pool lose their broker at the same moment and must not
all come back at the same moment. A broker that does not answer in
time counts as absent too, because another one may have taken over from one that hangs. If the lease ran out and the job
went on without this peer, the broker refuses its heartbeat as stale: the peer then drops all state of jobs and
registers anew at once. The absence of the broker alone does not disturb a running job. `peer.daemon` starts this,
`transport.conversation` carries the messages.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

import msgspec

from fusionai.primitives.errors import FusionError, RefusedError, TransportError, TrustError, WireError
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import Membership, renew_if_due
from fusionai.transport.interface import Remote, Transport
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 15.0
ANSWER_S: Final = 8.0
"""Longest wait for an answer of the broker, in seconds (chosen): its journal's engine may take six of them, and a lease
is longer unless the broker's owner has shortened it."""


@dataclass
class Registration:
    """Keeps this peer registered with the broker.

    `on_registered` is called after each registration, `on_leave` when the machine's owner asked it to leave. `on_lost`
    is called when the pool has gone on without this peer, before it registers again: it drops every stage and snapshot,
    closes the connections of jobs, and must not block. `on_meet` gets the notice of a peer that wants to reach this
    one, and the broker that sent it. `links` are reported with each heartbeat. `addresses_now` is called after the
    broker was away and when `moved` returns true; changed addresses are announced. `endorsements` returns those that
    this machine carries now; new ones are sent at once. `on_answer` gets every answer, with the broker's clock and,
    of a heartbeat, the job that has this peer."""

    transport: Transport
    broker: BrokerAddresses
    _: KW_ONLY
    boot: int
    profile: PeerProfile
    addresses: tuple[str, ...]
    jobs: Callable[[], tuple[str, ...]]
    on_registered: Callable[[wire.Registered], None]
    on_leave: Callable[[bool], None]
    on_lost: Callable[[], None]
    on_meet: Callable[[wire.MeetNotice, Remote], None]
    links: Callable[[], tuple[wire.LinkView, ...]] = tuple
    addresses_now: Callable[[], Awaitable[tuple[str, ...]]] | None = None
    moved: Callable[[], bool] = bool
    endorsements: Callable[[], tuple[bytes, ...]] | None = None
    on_answer: Callable[[wire.Registered | wire.HeartbeatAck], None] = lambda _: None
    membership: Membership | None = None
    """Gets the list of evicted members and is renewed in time."""
    _conversation: Conversation | None = None
    _known: wire.Registered | None = None
    _drains: bool = False
    """Whether the broker must still be notified that this peer drains."""

    async def run(self) -> None:
        """Keep the registration until cancelled. Raises errors that retries can't cure: a refusal, a wrong key."""
        retry_s, factor = FIRST_RETRY_S, _factor(self.profile.peer)
        while True:
            try:
                await self._session()
            except (TransportError, WireError) as error:
                if self._conversation is not None:
                    # The broker had answered, so this is a new absence.
                    retry_s = FIRST_RETRY_S
                log.warning("the broker can't be reached (%s); next try in %.1f s", error, factor * retry_s)
            self._conversation = None
            await asyncio.sleep(factor * retry_s)
            longest_s = LAST_RETRY_S if self._known is None else max(FIRST_RETRY_S, self._known.heartbeat_s)
            retry_s = min(2 * retry_s, longest_s)

    async def _session(self) -> None:
        channel = await self.broker.dial(self.transport)
        notices = (wire.LeaveNotice, wire.MeetNotice, wire.RevocationNotice)
        conversation = Conversation(channel, notices=notices, on_notice=partial(self._notice, channel.remote))
        try:
            back = self._known is not None
            registered = await self._enter(conversation)
            if back:
                await self._announce_move(conversation)
            self._conversation = conversation
            if self._drains:
                await self.leave(drain=True)
            else:
                self.on_registered(registered)
            while True:
                await asyncio.sleep(registered.heartbeat_s)
                if not await self._beat(conversation):
                    registered = await self._enter_anew(conversation)
                    self.on_registered(registered)
                elif self.moved():
                    await self._announce_move(conversation)
                else:
                    await self._show_endorsements(conversation)
        except RefusedError as error:
            if error.code in ("unknown_peer", "not_authorised", "untrusted", "bad_message", "evicted"):
                raise
            if error.code == "failed":
                self.broker.pass_over()
            raise TransportError(f"the broker refused: {error}") from error
        finally:
            await conversation.close()

    async def _enter(self, conversation: Conversation) -> wire.Registered:
        """Register, or find by a heartbeat that the lease has not run out. State is dropped only if it has."""
        if self._known is not None:
            try:
                if await self._beat(conversation):
                    return self._known
            except RefusedError as error:
                # A broker set back to an earlier state may know the key, but not that it lends a machine.
                if error.code != "unknown_peer":
                    raise
        return await self._enter_anew(conversation)

    async def _enter_anew(self, conversation: Conversation) -> wire.Registered:
        profile = msgspec.Raw(msgspec.msgpack.encode(self.profile))
        answer = await self._ask(conversation, wire.Register(boot=self.boot, profile=profile, addresses=self.addresses))
        if not isinstance(answer, wire.Registered):
            raise TrustError(f"expected the broker to register this peer, got {type(answer).__name__}.")
        self._known = answer
        self._heard(answer)
        return answer

    async def _announce_move(self, conversation: Conversation) -> None:
        """Register changed addresses of this machine. It keeps its place in its job."""
        if self.addresses_now is None:
            return
        addresses = await self.addresses_now()
        if addresses != self.addresses:
            log.info("this machine can be reached elsewhere now: %s", ", ".join(addresses))
            self.addresses = addresses
            await self._enter_anew(conversation)

    async def _show_endorsements(self, conversation: Conversation) -> None:
        if self.endorsements is None:
            return
        try:
            carried = self.endorsements()
        except FusionError as error:
            log.warning("the endorsements can't be read, those shown before stay: %s", error)
            return
        if carried != self.profile.endorsements:
            self.profile = msgspec.structs.replace(self.profile, endorsements=carried)
            await self._enter_anew(conversation)

    async def _beat(self, conversation: Conversation) -> bool:
        """Return whether the lease goes on. If not, all state of jobs has been dropped when this returns."""
        try:
            heartbeat = wire.Heartbeat(boot=self.boot, jobs=self.jobs(), links=self.links())
            answer = await self._ask(conversation, heartbeat)
        except RefusedError as error:
            if error.code != "stale_fence":
                raise
            log.warning("the pool went on without this peer: %s", error)
            self.on_lost()
            return False
        if isinstance(answer, wire.HeartbeatAck):
            self._heard(answer)
            if self.membership is not None:
                await self._keep_up(conversation, self.membership, answer.revocations)
        return True

    def _heard(self, answer: wire.Registered | wire.HeartbeatAck) -> None:
        self.broker.learn(answer.brokers)
        self.on_answer(answer)

    async def _ask(self, conversation: Conversation, message: wire.Message) -> wire.Message:
        """Return the answer. Raises as `Conversation.ask`, and `TransportError` if none comes in time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await conversation.ask(message)
        except TimeoutError:
            self.broker.pass_over()
            raise TransportError(f"it did not answer within {ANSWER_S:g} s.") from None

    async def _keep_up(self, conversation: Conversation, membership: Membership, revocations: int) -> None:
        if revocations > membership.credentials.revoked.version:
            found = await self._ask(conversation, wire.RevocationQuery())
            if isinstance(found, wire.Revocations):
                self._take(found.signed)
        await renew_if_due(partial(self._ask, conversation), membership, now_wall_s=time.time())

    def _take(self, signed: bytes) -> None:
        if signed and self.membership is not None:
            self.membership.credentials.take_revocations(signed)

    async def leave(self, *, drain: bool = False) -> None:
        """Notify the broker that this peer leaves now or, with `drain`, after its work is handed over. If the broker
        can't be reached, the lease runs out, or the notice is sent when the broker is back."""
        self._drains = drain
        if self._conversation is None:
            return
        try:
            await self._ask(self._conversation, wire.Leave(drain=drain))
            self._drains = False
        except FusionError as error:
            log.info("could not say goodbye: %s", error)

    def _notice(self, broker: Remote, message: wire.Message) -> None:
        match message:
            case wire.LeaveNotice():
                self.on_leave(message.drain)
            case wire.RevocationNotice():
                self._take(message.signed)
            case wire.MeetNotice():
                self.on_meet(message, broker)
            case _:
                log.info("no handler for a notice of the broker: %s", message.__struct_config__.tag)


def _factor(peer: str) -> float:
    """Return the peer's own factor of all its pauses between retries, from 0.5 to 1."""
    digest = hashlib.blake2b(peer.encode(), digest_size=4, person=b"retry").digest()
    return 0.5 + int.from_bytes(digest, "little") / 2**33
