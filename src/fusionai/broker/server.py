"""The broker as a program: its connections and its timer, around `service`, with what `home` keeps.

Every error that can be found before the port is open is raised as one clear error, with nothing half-written. Each
connection is a conversation: one answer to every message, in order, with notices in between. Every connection has a
number, by which the broker state refers to members and drivers. The timer sleeps until the next lease ends. If the
process itself was suspended (a laptop asleep), all members get a new lease. `cli` calls `run_broker`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fusionai.broker.admission import LenderAdmission
from fusionai.broker.announcing import AddressWatch
from fusionai.broker.engines.engine_journal import EngineJournal
from fusionai.broker.engines.interface import JournalAway, JournalInDoubt, JournalTaken
from fusionai.broker.engines.watch import EngineWatch
from fusionai.broker.home import BrokerHome, open_when_free
from fusionai.broker.lent import RelayMeter
from fusionai.broker.options import BrokerOptions, check
from fusionai.broker.policy import PolicyWatch, load_policy
from fusionai.broker.reachability import Introducer, Observer, UdpPort
from fusionai.broker.service import BrokerService, Replies
from fusionai.coordination.broker.job_queue import QueuePolicy
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.state import PRESENT, BrokerRules
from fusionai.primitives.clock import Clock, SystemClock
from fusionai.primitives.errors import ChannelClosed, StorageError, TransportError, WireError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.process import set_aside_what_stays
from fusionai.transport.channels.link import answer_probe
from fusionai.transport.discovery import Announcer, NearbyPool, fingerprint
from fusionai.transport.interface import Channel, Remote
from fusionai.transport.routes.addresses import host_of, is_loopback, port_of
from fusionai.transport.routes.relay import Relay, RelayLimits
from fusionai.transport.routes.tcp import TcpListener, TcpTransport
from fusionai.wire.frame import BROKER_LIMITS
from fusionai.wire.messages import CodeAnswer, Message, Observe, Observed, Ping, Probe, Refused

NOTICE_TIMEOUT_S: Final = 10.0
RENEWAL_CHECK_S: Final = 3600.0
RETRY_S: Final = 1.0
RELAYED_S: Final = 600.0
"""Pause between two journal entries of what the relay has copied, in seconds (chosen). A killed broker forgets what it
copied since the last one."""
_LOG: Final = logging.getLogger(__name__)


@dataclass
class BrokerServer:
    """Serves connections. Pass `accept` to a transport's `listen`, and run `keep` at the same time."""

    service: BrokerService
    clock: Clock
    observer: Observer | None = None
    """Answers `Observe` requests."""
    _channels: dict[int, Channel] = field(default_factory=dict[int, Channel])
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _sending: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _earlier: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a deadline has come earlier than `_waiting_for_s`."""
    _waiting_for_s: float | None = None
    _superseded: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _in_doubt: asyncio.Future[Replies] | None = None
    """Replies to the message whose facts may have been journalled."""
    _ended: set[int] = field(default_factory=set[int])
    """Connections whose end could not be journalled yet."""

    @property
    def connections(self) -> int:
        """Return how many connections are open, without those that only measure a link."""
        return len(self._channels)

    async def accept(self, channel: Channel) -> None:
        """Serve one connection until it ends. Senders of tensors get one answer only, and so do strangers, unless it is
        the first of the two answers of joining with a code."""
        if channel.stream == "tensors" and channel.remote.role != "stranger":
            await _measured(channel)
            return
        number = next(self._numbers)
        self._channels[number] = channel
        if channel.remote.peer is not None and self.service.state.knows(channel.remote.peer):
            channel.admit(BROKER_LIMITS)
        try:
            while True:
                envelope = await channel.receive()
                message, stranger = envelope.message, channel.remote.role == "stranger"
                if not stranger and isinstance(message, Ping | Probe) and await answer_probe(channel, envelope):
                    # A member measures its link; probes carry no content of a job.
                    continue
                if isinstance(message, Observe) and (seen := await self._observed(channel, message)) is not None:
                    await channel.send(seen)
                    continue
                try:
                    outcome = self._receive(channel, number, message, carries=bool(envelope.tensors))
                except JournalInDoubt:
                    self._in_doubt = asyncio.get_running_loop().create_future()
                    outcome = await self._in_doubt
                if outcome.answer is not None:
                    await _answer(channel, outcome.answer)
                self._dispatch(outcome)
                if envelope.tensors or (stranger and not isinstance(outcome.answer, CodeAnswer)):
                    return
        finally:
            del self._channels[number]
            self._ended.add(number)
            self._report_ended()

    def _report_ended(self) -> None:
        """Journal the ends of connections; those that can't be journalled now are kept for later."""
        for number in sorted(self._ended):
            try:
                outcome = self.service.disconnected(number)
            except JournalInDoubt:
                outcome = Replies(answer=None)  # `resume` completes it
            except JournalTaken as error:
                self.superseded(error)
                return
            except JournalAway:
                return
            except StorageError as error:
                _LOG.error("the end of a connection could not be journalled: %s", error)
                return
            self._ended.discard(number)
            self._dispatch(outcome)

    def resume(self, written: bool | None) -> None:
        """Complete what an outage of the journal has left in doubt: it was `written`, or not, or nothing was in
        doubt (None)."""
        try:
            if written is not None:
                outcome = self.service.settle(written)
                waiting, self._in_doubt = self._in_doubt, None
                if waiting is not None and not waiting.done():
                    waiting.set_result(outcome)
                else:
                    self._dispatch(outcome)
            # Heartbeats may have been refused meanwhile.
            self._dispatch(self.service.stalled())
            self._report_ended()
        except JournalTaken as error:
            self.superseded(error)
        except StorageError as error:
            _LOG.error("the journal is out of reach again: %s", error)

    def superseded(self, error: JournalTaken) -> None:
        """End the broker, because another one keeps the pool."""
        if not self._superseded.done():
            self._superseded.set_exception(error)
        if self._in_doubt is not None and not self._in_doubt.done():
            reason = "This broker has been replaced by another; it is not known whether this was done. Ask that one."
            self._in_doubt.set_result(Replies(answer=Refused(code="failed", reason=reason)))

    async def _observed(self, channel: Channel, message: Observe) -> Observed | None:
        """Return how a member is seen from here; None for strangers."""
        peer = channel.remote.peer
        if self.observer is None or peer is None or not self.service.state.knows(peer):
            return None
        return await self.observer.answer(channel.remote, message)

    def ask(self, message: Message) -> Message:
        """Return the answer to a message of the broker's owner, from within this process."""
        try:
            outcome = self._decided(Remote(self.service.state.rules.broker, "broker"), next(self._numbers), message)
        except JournalInDoubt as error:
            return Refused(code="failed", reason=str(error))
        self._dispatch(outcome)
        return outcome.answer or Refused(code="failed", reason="The broker has no answer.")

    def adopt_policy(self, policy: QueuePolicy) -> None:
        """Follow another policy of the queue from now on. Raises `StorageError`."""
        try:
            self._dispatch(self.service.adopt_policy(policy))
        except JournalTaken as error:
            self.superseded(error)

    async def keep(self, stop: asyncio.Event) -> None:
        """Watch over leases until `stop`. Raises `JournalTaken` when another broker has taken the journal over."""
        timer = asyncio.create_task(self._watch())
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({timer, stopping, self._superseded}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            tasks = [timer, stopping, *self._sending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def note_relayed(self) -> None:
        """Journal what the relay copies, until cancelled."""
        while True:
            await asyncio.sleep(RELAYED_S)
            self.note_relayed_now()

    def note_relayed_now(self) -> None:
        try:
            if self.service.relayed.unnoted_bytes:
                self._dispatch(self.service.note_relayed())
        except JournalTaken as error:
            self.superseded(error)
        except StorageError as error:  # the next time counts it too; `resume` completes what is in doubt
            _LOG.warning("what was relayed could not be journalled: %s", error)

    def _receive(self, channel: Channel, number: int, message: Message, *, carries: bool) -> Replies:
        if channel.stream != "control":
            return Replies(answer=Refused(code="bad_message", reason="A broker listens on the control stream only."))
        if carries:
            return Replies(answer=Refused(code="bad_message", reason="No tensor passes through a broker."))
        return self._decided(channel.remote, number, message)

    def _decided(self, remote: Remote, number: int, message: Message) -> Replies:
        try:
            return self.service.receive(remote, number, message)
        except JournalTaken as error:
            self.superseded(error)
            return Replies(answer=Refused(code="failed", reason="This broker has been replaced by another."))

    def _dispatch(self, outcome: Replies) -> None:
        """Send notices without waiting: a member that does not read must not hold up the others."""
        for notice in outcome.notices:
            channel = self._channels.get(notice.connection)
            if channel is not None:
                task = asyncio.create_task(_notify(channel, notice.message))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)
        if outcome.evicted:  # else thousands of channels would be searched at each heartbeat
            for channel in [one for one in self._channels.values() if one.remote.peer in outcome.evicted]:
                channel.abort()
        deadline_s = self.service.next_deadline_s
        if deadline_s is not None and (self._waiting_for_s is None or deadline_s < self._waiting_for_s):
            self._earlier.set()

    async def _watch(self) -> None:
        while True:
            self._earlier.clear()
            deadline_s = self._waiting_for_s = self.service.next_deadline_s
            try:
                async with asyncio.timeout(None if deadline_s is None else deadline_s - self.clock.now_s()):
                    await self._earlier.wait()
                continue
            except TimeoutError:
                pass
            try:
                self._report_ended()
                self._dispatch(self._pass(deadline_s))
            except JournalTaken:
                raise
            except JournalAway:
                await asyncio.sleep(RETRY_S)
            except StorageError as error:
                _LOG.error("a loss could not be journalled, trying again: %s", error)
                await asyncio.sleep(RETRY_S)

    def _pass(self, deadline_s: float | None) -> Replies:
        """Handle `deadline_s`, which may have passed while this process was suspended."""
        if deadline_s is not None and self.clock.now_s() - deadline_s > self.service.state.rules.lease_s / 2:
            _LOG.warning("this process was suspended; all members get a new lease")
            return self.service.stalled()
        return self.service.tick()


async def _measured(channel: Channel) -> None:
    """Answer the probes with which a member measures its link to the broker. They carry no content of a job."""
    while await answer_probe(channel, await channel.receive()):
        pass
    await channel.send(Refused(code="bad_message", reason="A broker only measures links on this stream."))


async def _answer(channel: Channel, answer: Message) -> None:
    try:
        if not channel.send_at_once(answer):
            await channel.send(answer)
    except WireError as error:
        await channel.send(Refused(code="failed", reason=f"The answer does not fit into a frame: {error}"))


async def _notify(channel: Channel, message: Message) -> None:
    try:
        async with asyncio.timeout(NOTICE_TIMEOUT_S):
            await channel.send(message)
    except TimeoutError:
        _LOG.info("a connection does not take a notice; closing it")
        await channel.close()
    except (ChannelClosed, TransportError) as error:
        _LOG.info("a notice could not be sent: %s", error)


@dataclass(frozen=True, slots=True)
class Announcement:
    """The broker accepts connections. `invitation` is a secret that lets its holder join; empty: none was made. `code`
    is one for a machine nearby; empty: none was made, or no machine could find the broker. `members` and `jobs` are
    those of the journal. `healed`: a sentence for each damage in the journal that was repaired."""

    pool: str
    peer: PeerId
    addresses: tuple[str, ...]
    invitation: str
    members: int
    jobs: int
    healed: tuple[str, ...] = ()
    code: str = ""
    fingerprint: str = ""


async def run_broker(
    options: BrokerOptions,
    *,
    announce: Callable[[Announcement], None],
    stop: asyncio.Event,
    clock: Clock | None = None,
    notice: Callable[[str], None] = _LOG.info,
    opened: Callable[[BrokerServer], None] | None = None,
) -> None:
    """Keep the pool until `stop` is set. `announce` is called once, when members can connect, and before it `opened`.
    `notice` gets sentences for the broker's owner. Raises `UsageError` (options, port in use, another broker on this
    home), `TrustError` (a key others can read), `StorageError` (a damaged journal, a full disk)."""
    clock = clock or SystemClock()
    check(options)
    home = await open_when_free(options, clock, stop, notice)
    if home is None:
        return
    try:
        relay, rate_bytes_per_s = None, options.relay_bytes_per_s
        if rate_bytes_per_s is not None:
            relay = Relay(home.authority.public_key, clock, RelayLimits(pair_bytes_per_s=rate_bytes_per_s))
        service = _service(options, home, clock, relay)
        transport, server = TcpTransport(home.credentials), BrokerServer(service, clock)
        host, port = options.host, options.port
        listener = await transport.listen(server.accept, host=host, port=port, strangers=True, relay=relay)
        udp = UdpPort(home.credentials, server.accept, options.host, port_of(listener.addresses))
        server.observer = Observer(transport, udp.opened)
        try:
            watch = _watch_addresses(options, home, service, listener)
            service.codes.notice = service.notice = notice
            pool, (invitation, code) = service.state.pool, _first_invitation(options, service)
            if opened is not None:
                opened(server)
            announce(
                Announcement(
                    pool=home.authority.pool,
                    peer=home.identity.peer,
                    addresses=service.addresses,
                    invitation=invitation,
                    members=sum(member.phase in ("idle", "active", "draining") for member in pool.members.values()),
                    jobs=len(pool.live_jobs()),
                    healed=home.journal.healed,
                    code=code,
                    fingerprint=fingerprint(home.authority.public_key),
                )
            )
            set_aside_what_stays()

            beside = [asyncio.create_task(_renew(home, listener, service, clock)), asyncio.create_task(watch.run())]
            beside += [*_watches(options, home, server, notice), asyncio.create_task(server.note_relayed())]
            try:
                await server.keep(stop)
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                server.note_relayed_now()
        finally:
            await udp.close()
            await listener.close()
    finally:
        home.close()


def _first_invitation(options: BrokerOptions, service: BrokerService) -> tuple[str, str]:
    """Return an invitation and a code; empty if none is wanted at the start, or no machine could find the broker."""
    if not (service.state.pool == Pool() if options.invites is None else options.invites):
        return "", ""
    invitation = service.invite(uses=options.invitation_uses, lifetime_s=options.invitation_lifetime_s)
    return invitation, service.codes.make() if service.announces else ""


def _service(options: BrokerOptions, home: BrokerHome, clock: Clock, relay: Relay | None) -> BrokerService:
    """Return the service over the journal of `home`. Raises as `run_broker`."""
    return BrokerService(
        rules=BrokerRules(
            pool=home.authority.pool,
            broker=home.identity.peer,
            inviters=options.inviters,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            unattended_s=options.unattended_s,
            losses_before_rest=options.losses_before_rest,
            queue=QueuePolicy() if options.policy_file is None else load_policy(options.policy_file),
        ),
        journal=home.journal,
        authority=home.authority,
        clock=clock,
        ticket_lifetime_s=options.ticket_lifetime_s,
        introducer=Introducer(home.authority, relays=relay is not None),
        relayed=RelayMeter() if relay is None else RelayMeter(lambda: relay.copied_bytes),
        admission=LenderAdmission.by(options, clock),
    )


def _watch_addresses(
    options: BrokerOptions, home: BrokerHome, service: BrokerService, listener: TcpListener
) -> AddressWatch:
    """Make the listener's addresses known to the service and to this machine's own programs, and return the watch that
    does so again when they change."""

    def known(addresses: tuple[str, ...]) -> None:
        service.addresses = options.advertise or addresses
        home.keep_own_membership((*addresses, *service.addresses))

    def describe(addresses: tuple[str, ...]) -> NearbyPool:
        members = service.state.pool.members.values()
        machines = sum(member.phase in PRESENT and member.sponsor is None for member in members)
        return NearbyPool(home.authority.pool, home.authority.public_key, addresses, machines)

    known(listener.addresses)
    service.announces = options.announces and not all(is_loopback(host_of(one)) for one in listener.addresses)
    announcer = Announcer() if service.announces else None
    return AddressWatch(listener.candidates_now, known, describe, announcer)


def _watches(
    options: BrokerOptions, home: BrokerHome, server: BrokerServer, notice: Callable[[str], None]
) -> Iterator[asyncio.Task[None]]:
    """Start to keep the lease of a journal in an engine, and to follow the policy file. A journal in files needs no
    watch."""
    if isinstance(home.journal, EngineJournal):
        yield asyncio.create_task(EngineWatch(home.journal, server, notice).run())
    if options.policy_file is not None:
        yield asyncio.create_task(PolicyWatch(options.policy_file, server.adopt_policy, notice).run())


async def _renew(home: BrokerHome, listener: TcpListener, service: BrokerService, clock: Clock) -> None:
    """Renew the broker's own certificate before it ends, for as long as the broker runs."""
    while True:
        await asyncio.sleep(RENEWAL_CHECK_S)
        if home.renew_if_due(clock.wall_s()):
            try:
                home.keep_own_membership((*listener.candidates_now(), *service.addresses))
            except StorageError as error:
                _LOG.error("the renewed certificate is in use but could not be kept: %s", error)
