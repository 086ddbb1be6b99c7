"""A pool whose broker lies: the shipped broker and its authority over real TLS on loopback; what it says is twisted.

It certifies whomever it likes, as it is the authority, and answers what a test has it answer. Members are keys with
certificates that have registered; what they listen with is up to the test. Decides nothing. Neighbours: tests of
`client.pool.job_trust`, `client.pool.session` and of whole jobs against a broker that inserts, swaps or replays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.broker.journal import Journal
from fusionai.broker.server import BrokerServer
from fusionai.broker.service import BrokerService, Replies
from fusionai.client.pool.job_trust import JobTrust
from fusionai.client.pool.session import PoolSession
from fusionai.coordination.broker.state import BrokerRules
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.ids import PeerId
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import Membership
from fusionai.transport.interface import Channel, Listener, Remote
from fusionai.transport.peer_transport import PeerTransport
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import Authority, CertifiedRole, MemberCredentials, load_authority
from fusionai.transport.security.identity import load_identity, public_bytes
from fusionai.transport.security.signed import Seal
from fusionai.transport.security.trust import Signer, TrustList, TrustListFile, endorse, key_text, save_trust_list
from fusionai.wire import messages as wire
from fusionai.wire.messages import Message
from harness.credentials import credentials

Lie = Callable[[Message, Message], Message]
"""(question, true answer) -> what the broker says."""


def truth(_question: Message, answer: Message) -> Message:
    return answer


class LyingService(BrokerService):
    """Says what `lie` makes of the true answer."""

    lie: Lie = staticmethod(truth)

    def receive(self, remote: Remote, connection: int, message: Message) -> Replies:
        outcome = super().receive(remote, connection, message)
        answer = None if outcome.answer is None else self.lie(message, outcome.answer)
        return Replies(answer=answer, notices=outcome.notices)


@dataclass
class Lender:
    """A member that has registered. `heard`: connections of members that came to its door, by who they were."""

    name: str
    credentials: MemberCredentials
    profile: PeerProfile
    listener: Listener
    heard: list[PeerId | None] = field(default_factory=list[PeerId | None])

    @property
    def peer(self) -> PeerId:
        return self.credentials.identity.peer


class MaliciousPool:
    """Use as an async context. `signer`: a signing key that the owner trusts; `trust_list`: its trust file."""

    def __init__(self, directory: Path, *, level: PrivacyLevel = "trusted") -> None:
        self.directory = directory
        self.clock = SystemClock()
        self.signer = Ed25519PrivateKey.from_private_bytes(b"the key that the owner trusts...")
        self.lenders: dict[str, Lender] = {}
        self.authority: Authority = load_authority(directory / "broker", "pool", now_wall_s=self.clock.wall_s())
        self.trust_list = TrustListFile(directory / "trust.json", self.clock.wall_s)
        self._level: PrivacyLevel = level
        self._serial = 0
        self._stack = AsyncExitStack()

    def credentials(self, name: str, role: CertifiedRole = "member") -> MemberCredentials:
        return credentials(self.authority, self.directory / name, role, issued_at_s=self.clock.wall_s())

    def endorsement(
        self, name: str, *, key: Ed25519PrivateKey | None = None, at_s: float | None = None, lifetime_s: int = 3600
    ) -> bytes:
        """Of a member's key, by the trusted signer unless `key` is given."""
        self._serial += 1
        now_s = self.clock.wall_s() if at_s is None else at_s
        peer = load_identity(self.directory / name).peer
        return endorse(
            key or self.signer,
            peer,
            name=name,
            now_wall_s=now_s,
            lifetime_s=lifetime_s,
            serial=self._serial.to_bytes(16),
        )

    async def __aenter__(self) -> MaliciousPool:
        save_trust_list(
            self.trust_list.path, TrustList(signers=(Signer(key_text(public_bytes(self.signer.public_key()))),))
        )
        broker = self.credentials("broker", "broker")
        journal = Journal.open(self.directory / "broker" / "journal.sqlite", "pool")
        self._stack.callback(journal.close)
        self.service = LyingService(
            rules=BrokerRules(pool="pool", broker=broker.identity.peer),
            journal=journal,
            authority=self.authority,
            clock=self.clock,
        )
        server = BrokerServer(self.service, self.clock)
        listener = await TcpTransport(broker).listen(server.accept, host="127.0.0.1", port=0, strangers=True)
        self._stack.push_async_callback(listener.close)
        self.addresses = listener.addresses
        owner = self.credentials("owner")
        self.enrol(owner.identity.peer, "owner")
        self.trust = JobTrust(
            level=self._level,
            me=owner.identity.peer,
            seal=Seal(owner.identity.key, self._level),
            trust_list=self.trust_list,
        )
        self.membership = Membership("pool", "owner", BrokerAddresses(self.addresses), owner)
        self.session = await self._stack.enter_async_context(PoolSession(self.membership, trust=self.trust))
        return self

    def enrol(self, peer: PeerId, purpose: str) -> None:
        """Its own doing: no invitation is asked for."""
        from fusionai.coordination.broker.requests import Enrol, Invite

        self.service._decide(Invite(self.service.state.rules.broker, f"digest of {peer}", 1, 60.0))
        self.service._decide(Enrol(f"digest of {peer}", peer, "owner" if purpose == "owner" else "provider"))

    async def lend(self, name: str, *endorsements: bytes, memory_bytes: int = 10**9) -> Lender:
        """Let a machine in, listening on loopback."""
        credentials = self.credentials(name)
        self.enrol(credentials.identity.peer, "provider")
        profile = PeerProfile(
            peer=credentials.identity.peer,
            name=name,
            flops_per_s=1e9,
            memory_bytes=memory_bytes,
            fingerprint="f",
            endorsements=endorsements,
        )
        transport = PeerTransport(credentials, BrokerAddresses(self.addresses))
        self._stack.push_async_callback(transport.close)

        async def accept(channel: Channel) -> None:
            self.lenders[name].heard.append(channel.remote.peer)
            await channel.receive()
            await channel.send(wire.Done())
            await channel.receive()

        listener = await transport.listen(accept, host="127.0.0.1", port=0)
        self._stack.push_async_callback(listener.close)
        lender = self.lenders[name] = Lender(name, credentials, profile, listener)
        channel = await transport.dial(self.addresses, expect=None, stream="control")
        conversation = Conversation(channel)
        self._stack.push_async_callback(conversation.close)
        register = wire.Register(
            boot=1, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=listener.addresses
        )
        answer = await conversation.ask(register)
        assert isinstance(answer, wire.Registered)
        return lender

    def view(self, lender: Lender, **changes: object) -> wire.MemberView:
        """How the broker may show a member that it invents."""
        fields: dict[str, object] = {
            "peer": lender.peer,
            "state": "idle",
            "boot": 1,
            "addresses": lender.listener.addresses,
            "profile": msgspec.Raw(msgspec.msgpack.encode(lender.profile)),
        }
        return wire.MemberView(**{**fields, **changes})  # pyright: ignore[reportArgumentType]

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
        await asyncio.sleep(0)
