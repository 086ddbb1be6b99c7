"""The broker over in-process channels: conversations of strangers, members and owners, and what is on disk when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.broker.journal import Journal
from fusionai.broker.reading import MAX_PROFILE_BYTES
from fusionai.broker.server import BrokerServer
from fusionai.broker.service import BrokerService, Replies, remembered
from fusionai.coordination.broker.job_queue import PriorityClass, QueuePolicy
from fusionai.coordination.broker.state import BrokerRules
from fusionai.primitives.errors import ChannelClosed, StorageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import host_tensor
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement, Standby
from fusionai.transport.enrolment import parse_invitation
from fusionai.transport.interface import Channel, Remote
from fusionai.transport.security.certificates import Authority, load_authority, verify_certificate
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.signed import verify_ticket
from fusionai.wire.frame import describe
from fusionai.wire.messages import (
    CodeAnswer,
    CodeOffer,
    Done,
    Evict,
    Evicted,
    Fence,
    Heartbeat,
    HeartbeatAck,
    Introduced,
    Invited,
    InviteRequest,
    JobGranted,
    JobList,
    JobQuery,
    JobReport,
    JobRequest,
    JobStop,
    JoinGranted,
    JoinRequest,
    Leave,
    LeaveNotice,
    LinkView,
    Meet,
    MeetNotice,
    Message,
    Ping,
    Pong,
    PoolQuery,
    PoolView,
    Probe,
    QueuePlace,
    QueueRequest,
    Refused,
    Register,
    Registered,
    StateChunk,
    StopNotice,
)
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S
from harness.virtual_clock import VirtualClock

BROKER_KEY = public_bytes(Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key())
BROKER = peer_of(BROKER_KEY)
RULES = BrokerRules(pool="home", broker=BROKER)


def key_of(number: int) -> bytes:
    return public_bytes(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32).public_key())


OWNER, A, B, C = (peer_of(key_of(number)) for number in (1, 2, 3, 4))


def plan_of(
    *peers: PeerId, owner: PeerId = OWNER, version: int = 0, standbys: tuple[Standby, ...] = (), snapshot_every: int = 4
) -> msgspec.Raw:
    stages = [StagePlacement(stage=n, peer=peer, blocks=(n, n + 1)) for n, peer in enumerate(peers)]
    loss = StagePlacement(stage=len(peers), peer=owner, blocks=(len(peers), len(peers) + 1), roles=("loss",))
    plan = Plan(
        version=version,
        graph_hash="g",
        stages=(*stages, loss),
        feed=owner,
        standbys=standbys,
        snapshot_every=snapshot_every if standbys else 0,
        microbatches=1,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="test", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )
    return msgspec.Raw(msgspec.msgpack.encode(plan))


def registration(peer: PeerId, boot: int = 1) -> Register:
    profile = PeerProfile(peer=peer, flops_per_s=1e9, memory_bytes=10**9)
    return Register(boot=boot, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=("tcp://10.0.0.2:1",))


class Machine:
    """One side of a conversation with the broker."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    async def ask(self, message: Message) -> Message:
        await self.channel.send(message)
        return await self.hear()

    async def hear(self) -> Message:
        return (await self.channel.receive()).message

    async def refused(self, message: Message) -> str:
        answer = await self.ask(message)
        assert isinstance(answer, Refused), answer
        return answer.code


class Bench:
    """A broker on a memory network with a virtual clock and a journal on disk."""

    def __init__(self, directory: Path) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork()
        self.path = directory / "journal.sqlite"
        self.authority: Authority = load_authority(directory, "home", now_wall_s=self.clock.wall_s())
        self.start()

    def start(self, rules: BrokerRules = RULES) -> None:
        self.journal = Journal.open(self.path, "home")
        self.service = BrokerService(rules=rules, journal=self.journal, authority=self.authority, clock=self.clock)
        self.service.addresses = ("memory://broker:1",)
        self.server = BrokerServer(self.service, self.clock)

    async def machine(self, peer: PeerId | None) -> Machine:
        role = "stranger" if peer is None else "broker" if peer == BROKER else "member"
        transport = self.network.transport(peer, role)
        return Machine(await transport.dial(["memory://broker:1"], expect=None, stream="control"))

    async def member(self, number: int) -> Machine:
        """A machine that has joined with an invitation of its own."""
        token = parse_invitation(self.service.invite(uses=1, lifetime_s=60.0)).token
        stranger = await self.machine(None)
        granted = await stranger.ask(JoinRequest(token=token, public_key=key_of(number), purpose="provider"))
        assert isinstance(granted, JoinGranted)
        return await self.machine(PeerId(granted.peer))

    def on_disk(self):
        """The pool as it would be after a crash now."""
        return remembered(self.journal)[1]


@asynccontextmanager
async def open_bench(directory: Path) -> AsyncIterator[Bench]:
    bench = Bench(directory)
    listener = await bench.network.transport(BROKER, "broker").listen(
        lambda channel: bench.server.accept(channel), host="broker", port=1, strangers=True
    )
    try:
        yield bench
    finally:
        await listener.close()
        bench.journal.close()


Scene = Callable[[Bench], Coroutine[None, None, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        async def main() -> None:
            async with asyncio.timeout(CEILING_S), open_bench(tmp_path) as bench:
                await scene(bench)

        asyncio.run(main())

    return run


# -------------------------------------------------------------------------------------------------------- strangers


def test_a_stranger_gets_one_answer_and_only_to_one_question(play):
    async def scene(bench: Bench) -> None:
        await bench.member(1)
        questions: list[Message] = [
            PoolQuery(),
            JobQuery(),
            JobStop(job="job-1"),
            registration(A),
            Leave(),
            InviteRequest(),
            Ping(sequence=1, sent_at_s=0.0),
            JobRequest(job="job-1", title="", plan=plan_of(A)),
            JobReport(job="job-1", state="done"),
            Heartbeat(boot=1),
        ]
        for question in questions:
            stranger = await bench.machine(None)
            assert await stranger.refused(question) == "not_authorised"
            with pytest.raises(ChannelClosed):
                await stranger.hear()
        assert list(bench.on_disk().members) == [OWNER]

    play(scene)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("192.168.1.9", True),
        ("127.0.0.1", True),
        ("fd00::9", True),
        ("8.8.8.8", False),
        ("2001:db8::9", False),
        ("", False),
    ],
)
def test_codes_are_exchanged_with_machines_of_local_networks_only(play, host: str, is_local: bool):
    async def scene(bench: Bench) -> None:
        bench.service.codes.make()
        offer = CodeOffer(share=b"A" + bytes(32))
        answer = bench.service.receive(Remote(None, "stranger", host, 5000), 90, offer).answer
        assert isinstance(answer, CodeAnswer if is_local else Refused)
        if isinstance(answer, Refused):
            assert answer.code == "bad_code"

    play(scene)


def test_joining_needs_the_token_and_gives_a_certificate_of_the_pool(play):
    async def scene(bench: Bench) -> None:
        invitation = parse_invitation(bench.service.invite(uses=1, lifetime_s=60.0))
        assert invitation.addresses == ("memory://broker:1",)
        stranger = await bench.machine(None)
        wrong = JoinRequest(token=b"x" * 32, public_key=key_of(1), purpose="provider")
        assert await stranger.refused(wrong) == "bad_invitation"
        stranger = await bench.machine(None)
        granted = await stranger.ask(JoinRequest(token=invitation.token, public_key=key_of(1), purpose="owner"))
        assert isinstance(granted, JoinGranted)
        certified = verify_certificate(granted.certificate, invitation.authority_key, now_wall_s=bench.clock.wall_s())
        assert (certified.peer, certified.role, certified.pool) == (OWNER, "member", "home")
        stranger = await bench.machine(None)
        second = JoinRequest(token=invitation.token, public_key=key_of(2), purpose="owner")
        assert await stranger.refused(second) == "bad_invitation"

    play(scene)


def test_the_token_is_nowhere_on_disk(play, tmp_path: Path):
    tokens: list[bytes] = []

    async def scene(bench: Bench) -> None:
        tokens.append(parse_invitation(bench.service.invite(uses=1, lifetime_s=60.0)).token)

    play(scene)
    written = [file.read_bytes() for file in tmp_path.rglob("*")]
    assert written
    assert not any(tokens[0] in data for data in written)


# ---------------------------------------------------------------------------------------------------------- members


def test_a_peer_is_told_who_wants_to_meet_it_and_the_pool_sees_which_way_links_go(play):
    async def scene(bench: Bench) -> None:
        peer, owner = await bench.member(2), await bench.member(1)
        register = msgspec.structs.replace(registration(A), addresses=("relay://10.0.0.1:4711",))
        assert isinstance(await peer.ask(register), Registered)
        introduced = await owner.ask(Meet(peer=A, addresses=("quic://10.0.0.9:1",)))
        assert isinstance(introduced, Introduced)
        assert introduced.addresses == ("relay://10.0.0.1:4711",)
        notice = await peer.hear()
        assert isinstance(notice, MeetNotice)
        assert (notice.peer, notice.addresses) == (OWNER, ())  # in memory nobody comes from anywhere
        assert await owner.refused(Meet(peer=B)) == "unknown_peer"
        links = (LinkView(OWNER, "relay", 2, 0.0),)
        assert isinstance(await peer.ask(Heartbeat(boot=1, links=links)), HeartbeatAck)
        view = await owner.ask(PoolQuery())
        assert isinstance(view, PoolView)
        assert view.members[0].links == links

    play(scene)


def test_a_certificate_the_journal_does_not_know_opens_nothing(play):
    async def scene(bench: Bench) -> None:
        unknown = await bench.machine(B)
        for question in (PoolQuery(), registration(B), JobStop(job="job-1")):
            assert await unknown.refused(question) == "unknown_peer"

    play(scene)


def test_addresses_that_mean_something_else_at_another_machine_are_not_passed_on(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        announced = ("tcp://127.0.0.1:22", "tcp://169.254.169.254:80", "tcp://10.0.0.2:1", "relay://127.0.0.1:2")
        await a.ask(msgspec.structs.replace(registration(A), addresses=announced))
        view = await a.ask(PoolQuery())
        assert isinstance(view, PoolView)
        assert [one.addresses for one in view.members] == [("tcp://10.0.0.2:1", "relay://127.0.0.1:2")]

    play(scene)


def test_a_member_registers_beats_and_is_seen(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        registered = await a.ask(registration(A))
        brokers = bench.service.addresses
        assert registered == Registered(heartbeat_s=3.0, pool="home", wall_s=bench.clock.wall_s(), brokers=brokers)
        assert await a.ask(Heartbeat(boot=1)) == HeartbeatAck(wall_s=bench.clock.wall_s(), job="", plan_version=0)
        view = await a.ask(PoolQuery())
        assert isinstance(view, PoolView)
        assert [(m.peer, m.state, m.addresses) for m in view.members] == [(A, "idle", ("tcp://10.0.0.2:1",))]
        assert msgspec.msgpack.decode(view.members[0].profile, type=PeerProfile).peer == A
        assert bench.on_disk().members[A].phase == "idle"

    play(scene)


def test_who_comes_from_the_same_address_is_named_to_who_registers(play):
    async def scene(bench: Bench) -> None:
        for number in (2, 3, 4, 5):
            await bench.member(number)
        home, elsewhere = "203.0.113.7", "198.51.100.3"

        def near(number: int, host: str) -> list[str]:
            peer = peer_of(key_of(number))
            remote = Remote(peer, "member", host, 5000 + number)
            answer = bench.service.receive(remote, 50 + number, registration(peer)).answer
            assert isinstance(answer, Registered)
            assert all(one.addresses == ("tcp://10.0.0.2:1",) for one in answer.near)
            return [one.peer for one in answer.near]

        assert near(2, home) == []
        assert near(3, home) == [A]
        assert near(4, elsewhere) == []
        assert near(2, home) == [B], "not oneself"
        assert near(3, elsewhere) == [C], "who moved has other neighbours"
        assert near(2, home) == []
        assert near(5, "127.0.0.1") == []
        assert near(4, "127.0.0.1") == [], "who comes over loopback is on this machine"

    play(scene)


def test_profiles_that_do_not_fit_are_refused(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        assert await a.refused(registration(B)) == "not_authorised"
        bad = replace_profile(msgspec.Raw(msgspec.msgpack.encode({"peer": A, "speed": 1})))
        assert await a.refused(bad) == "bad_message"
        big = PeerProfile(peer=A, flops_per_s=1e9, memory_bytes=1, name="x" * MAX_PROFILE_BYTES)
        assert await a.refused(replace_profile(msgspec.Raw(msgspec.msgpack.encode(big)))) == "bad_message"
        assert bench.on_disk().members[A].phase == "joining"

    play(scene)


def replace_profile(profile: msgspec.Raw) -> Register:
    return msgspec.structs.replace(registration(A), profile=profile)


def test_messages_of_a_job_and_tensors_have_no_business_here(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        assert await a.refused(Done()) == "bad_message"
        assert await a.refused(StopNotice(job="job-1")) == "bad_message"
        assert await a.ask(Ping(sequence=4, sent_at_s=1.0)) == Pong(sequence=4, sent_at_s=1.0)
        tensor = host_tensor("uint8", (4,), b"abcd")
        probe = Probe(sequence=5, sent_at_s=1.0, tensors=(describe("probe", tensor),))
        await a.channel.send(probe, (tensor,))
        assert await a.hear() == Pong(sequence=5, sent_at_s=1.0)
        chunk = StateChunk(fence=Fence(1, 1, 1), stage=0, step=0, last=True, tensors=(describe("model/w", tensor),))
        await a.channel.send(chunk, (tensor,))
        refused = await a.hear()
        assert isinstance(refused, Refused)
        assert "No tensor passes" in refused.reason
        with pytest.raises(ChannelClosed):
            await a.hear()

    play(scene)


def test_a_member_has_a_second_key_of_its_machine_certified(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        granted = await a.ask(JoinRequest(token=b"", public_key=key_of(1), purpose="owner"))
        assert isinstance(granted, JoinGranted)
        assert granted.peer == OWNER
        assert bench.on_disk().members[OWNER].sponsor == A
        stranger = await bench.machine(None)
        assert await stranger.refused(JoinRequest(token=b"", public_key=key_of(3), purpose="owner")) == "bad_invitation"

    play(scene)


def test_other_streams_are_refused(play):
    async def scene(bench: Bench) -> None:
        await bench.member(2)
        transport = bench.network.transport(A, "member")
        channel = await transport.dial(["memory://broker:1"], expect=None, stream="tensors")
        assert await Machine(channel).refused(PoolQuery()) == "bad_message"

    play(scene)


def test_another_program_of_the_machine_can_make_its_peer_leave(play):
    async def scene(bench: Bench) -> None:
        daemon = await bench.member(2)
        await daemon.ask(registration(A))
        command = await bench.machine(A)
        assert await command.ask(Leave(drain=True)) == Done()
        assert await daemon.hear() == LeaveNotice(drain=True)
        assert bench.on_disk().members[A].phase == "left"

    play(scene)


# ------------------------------------------------------------------------------------------------------------- jobs


def test_a_job_from_request_to_end(play):
    async def scene(bench: Bench) -> None:
        owner = await bench.member(1)
        for number, peer in ((2, A), (3, B)):
            await (await bench.member(number)).ask(registration(peer))
        granted = await owner.ask(JobRequest(job="job-1", title="t", plan=plan_of(A, B), steps=10))
        assert isinstance(granted, JobGranted)
        plan = msgspec.msgpack.decode(granted.plan, type=Plan)
        assert plan.version == 1
        assert [member.peer for member in granted.members] == [A, B]
        tickets = [
            verify_ticket(t.ticket, bench.authority.public_key, now_wall_s=bench.clock.wall_s(), peer=PeerId(t.peer))
            for t in granted.tickets
        ]
        assert [(t.peer, t.stage, t.role, t.plan_version) for t in tickets] == [
            (A, 0, "stage", 1),
            (B, 1, "stage", 1),
            (OWNER, 2, "stage", 1),
            (OWNER, -1, "driver", 1),
        ]
        assert bench.on_disk().members[A].phase == "active"
        renewed = await owner.ask(JobRequest(job="job-1", title="t", plan=granted.plan, steps=10))
        assert isinstance(renewed, JobGranted)
        assert renewed.plan == granted.plan
        assert await owner.ask(JobReport(job="job-1", state="running", step=3)) == Done()
        listed = await owner.ask(JobQuery(job="job-1"))
        assert isinstance(listed, JobList)
        assert [(j.state, j.step, j.steps, j.plan_version, len(j.story)) for j in listed.jobs] == [
            ("running", 3, 10, 1, 3)
        ]
        assert await owner.ask(JobReport(job="job-1", state="done", step=9)) == Done()
        assert {member.phase for member in bench.on_disk().members.values()} == {"joining", "idle"}

    play(scene)


def test_standbys_are_reserved_shown_and_get_tickets(play):
    async def scene(bench: Bench) -> None:
        owner = await bench.member(1)
        for number, peer in ((2, A), (3, B), (4, C)):
            await (await bench.member(number)).ask(registration(peer))
        standbys = (Standby(stage=1, peer=C), Standby(stage=0, peer=C))
        granted = await owner.ask(JobRequest(job="job-1", title="t", plan=plan_of(A, B, standbys=standbys)))
        assert isinstance(granted, JobGranted)
        assert [(member.peer, member.state, member.stages, member.standbys) for member in granted.members] == [
            (A, "active", (0,), ()),
            (B, "active", (1,), ()),
            (C, "active", (), (0, 1)),
        ]
        tickets = [
            verify_ticket(t.ticket, bench.authority.public_key, now_wall_s=bench.clock.wall_s(), peer=PeerId(t.peer))
            for t in granted.tickets
        ]
        assert [(t.peer, t.stage, t.role) for t in tickets] == [
            (A, 0, "stage"),
            (B, 1, "stage"),
            (OWNER, 2, "stage"),
            (C, 0, "standby"),
            (OWNER, -1, "driver"),
        ]
        assert await owner.refused(JobRequest(job="job-2", title="t", plan=plan_of(C))) == "busy"
        promoted = await owner.ask(JobRequest(job="job-1", title="t", plan=plan_of(C, B)))
        assert isinstance(promoted, JobGranted)
        assert {peer: member.phase for peer, member in bench.on_disk().members.items()} == {
            OWNER: "joining",
            A: "idle",
            B: "active",
            C: "active",
        }

    play(scene)


@pytest.mark.parametrize(
    ("standbys", "every"),
    [
        ((Standby(stage=0, peer=C), Standby(stage=0, peer=B)), 4),
        ((Standby(stage=0, peer=A),), 4),
        ((Standby(stage=7, peer=C),), 4),
        ((Standby(stage=0, peer=C),), 0),
        ((Standby(stage=0, peer=C),), -1),
    ],
    ids=["twice", "of itself", "no such stage", "never", "negative"],
)
def test_standbys_that_standby_nothing_are_refused(play, standbys: tuple[Standby, ...], every: int):
    async def scene(bench: Bench) -> None:
        owner = await bench.member(1)
        for number, peer in ((2, A), (3, B), (4, C)):
            await (await bench.member(number)).ask(registration(peer))
        plan = plan_of(A, B, standbys=standbys, snapshot_every=every)
        assert await owner.refused(JobRequest(job="job-1", title="t", plan=plan)) == "bad_message"
        assert bench.on_disk().jobs == {}

    play(scene)


def test_a_serving_plan_keeps_both_ends_with_its_owner_and_needs_no_snapshots(play):
    async def scene(bench: Bench) -> None:
        owner = await bench.member(1)
        for number, peer in ((2, A), (3, B), (4, C)):
            await (await bench.member(number)).ask(registration(peer))
        training = msgspec.msgpack.decode(plan_of(A, B), type=Plan)
        ends = [
            StagePlacement(stage=stage, peer=OWNER, blocks=(stage, stage + 1), roles=(role,))
            for stage, role in ((0, "feed"), (3, "loss"))
        ]
        layers = [StagePlacement(stage=n, peer=peer, blocks=(n, n + 1)) for n, peer in ((1, A), (2, B))]
        standbys = (Standby(stage=1, peer=C), Standby(stage=2, peer=C))
        serving = msgspec.structs.replace(
            training, task="serve", stages=(ends[0], *layers, ends[1]), standbys=standbys, snapshot_every=0
        )
        plan = msgspec.Raw(msgspec.msgpack.encode(serving))
        granted = await owner.ask(JobRequest(job="job-1", title="t", plan=plan))
        assert isinstance(granted, JobGranted)
        assert [(member.peer, member.stages, member.standbys) for member in granted.members] == [
            (A, (1,), ()),
            (B, (2,), ()),
            (C, (), (1, 2)),
        ]
        assert msgspec.msgpack.decode(granted.plan, type=Plan).stages == serving.stages

    play(scene)


def test_what_a_heartbeat_says_it_holds_reaches_the_desk(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        await a.ask(registration(A))
        assert isinstance(await a.ask(Heartbeat(boot=1, jobs=("job-old",))), HeartbeatAck)
        assert bench.service.state.leftovers[A].job == "job-old"

    play(scene)


def test_plans_that_do_not_fit_are_refused(play):
    async def scene(bench: Bench) -> None:
        owner = await bench.member(1)
        decoded = msgspec.msgpack.decode(plan_of(A, B), type=Plan)
        twice = msgspec.structs.replace(decoded, stages=(decoded.stages[0], decoded.stages[0]))
        nothing = msgspec.structs.replace(decoded, stages=())
        alone = msgspec.structs.replace(decoded, stages=decoded.stages[-1:])
        negative = msgspec.structs.replace(decoded, version=-1)
        plans = [msgspec.Raw(msgspec.msgpack.encode(plan)) for plan in ({"a": 1}, twice, nothing, alone, negative)]
        for plan in plans:
            assert await owner.refused(JobRequest(job="job-1", title="", plan=plan)) == "bad_message"
        assert await owner.refused(JobRequest(job="job-1", title="", plan=plan_of(A))) == "unknown_peer"
        assert bench.on_disk().jobs == {}

    play(scene)


def test_a_stop_reaches_the_driver(play):
    async def scene(bench: Bench) -> None:
        owner, a = await bench.member(1), await bench.member(2)
        await a.ask(registration(A))
        await owner.ask(JobRequest(job="job-1", title="", plan=plan_of(A)))
        assert await a.refused(JobStop(job="job-1")) == "not_authorised"
        boss = await bench.machine(BROKER)
        assert await boss.ask(JobStop(job="job-1")) == Done()
        assert await owner.hear() == StopNotice(job="job-1")
        assert await boss.refused(JobStop(job="none")) == "unknown_job"

    play(scene)


def test_only_the_owner_of_the_broker_invites(play):
    async def scene(bench: Bench) -> None:
        a, boss = await bench.member(2), await bench.machine(BROKER)
        assert await a.refused(InviteRequest()) == "not_authorised"
        invited = await boss.ask(InviteRequest(uses=2, lifetime_s=60.0))
        assert isinstance(invited, Invited)
        token = parse_invitation(invited.invitation).token
        stranger = await bench.machine(None)
        assert isinstance(
            await stranger.ask(JoinRequest(token=token, public_key=key_of(3), purpose="owner")), JoinGranted
        )

    play(scene)


def test_the_owner_of_another_broker_of_the_pool_does_what_this_ones_owner_does(play):
    async def scene(bench: Bench) -> None:
        other = peer_of(key_of(9))
        remote = Remote(other, "broker")
        assert isinstance(bench.service.receive(remote, 9, InviteRequest()).answer, Invited)
        evicted = bench.service.receive(Remote(BROKER, "broker"), 1, Evict(peer=other)).answer
        assert isinstance(evicted, Evicted)
        refused = bench.service.receive(remote, 9, InviteRequest()).answer
        assert isinstance(refused, Refused)
        assert refused.code == "evicted"

    play(scene)


def test_a_policy_that_is_adopted_orders_the_queue_at_once(play):
    async def scene(bench: Bench) -> None:
        owner, second = await bench.member(1), await bench.member(2)
        urgent = QueueRequest(job="job-2", title="t", priority="urgent")
        assert isinstance(await owner.ask(QueueRequest(job="job-1", title="t")), QueuePlace)
        assert await second.refused(urgent) == "bad_message"
        classes = (PriorityClass("urgent"), PriorityClass("normal"))
        bench.server.adopt_policy(QueuePolicy(classes=classes))
        placed = await second.ask(urgent)
        assert isinstance(placed, QueuePlace)
        assert (placed.place, placed.waiting) == (1, 2)
        bench.server.adopt_policy(QueuePolicy(classes=tuple(reversed(classes))))
        assert bench.service.state.line.jobs == ("job-1", "job-2")

    play(scene)


# ---------------------------------------------------------------------------------------------- loss, disk, restart


def test_the_first_heartbeat_of_a_connection_is_told_where_the_brokers_are(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        await a.ask(registration(A))
        again = await bench.member(2)
        heard = [await again.ask(Heartbeat(boot=1)) for _ in range(2)]
        assert [one.brokers for one in heard if isinstance(one, HeartbeatAck)] == [bench.service.addresses, ()]

    play(scene)


def test_a_broken_connection_loses_nobody_before_the_lease_ends(play):
    async def scene(bench: Bench) -> None:
        a, boss = await bench.member(2), await bench.machine(BROKER)
        await a.ask(registration(A))
        await a.channel.close()
        view = await boss.ask(PoolQuery())
        assert isinstance(view, PoolView)
        assert [member.state for member in view.members] == ["silent"]
        bench.clock.advance(11.9)
        bench.service.tick()
        assert bench.on_disk().members[A].phase == "idle"
        bench.clock.advance(0.1)
        bench.service.tick()
        assert bench.on_disk().members[A].phase == "lost"

    play(scene)


def test_nothing_is_acknowledged_that_could_not_be_written(play, monkeypatch: pytest.MonkeyPatch):
    async def scene(bench: Bench) -> None:
        owner, a = await bench.member(1), await bench.member(2)
        await a.ask(registration(A))
        before = bench.service.state.pool

        def full(*_: object) -> int:
            raise StorageError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(bench.journal, "append", full)
            assert await owner.refused(JobRequest(job="job-1", title="", plan=plan_of(A))) == "failed"
            assert await a.refused(Leave()) == "failed"
            assert isinstance(await a.ask(Heartbeat(boot=1)), HeartbeatAck)
        assert bench.service.state.pool == before == bench.on_disk()
        assert isinstance(await owner.ask(JobRequest(job="job-1", title="", plan=plan_of(A))), JobGranted)

    play(scene)


def test_a_restart_keeps_everything_acknowledged_and_grants_grace(play):
    async def scene(bench: Bench) -> None:
        owner, a = await bench.member(1), await bench.member(2)
        await a.ask(registration(A))
        await owner.ask(JobRequest(job="job-1", title="", plan=plan_of(A)))
        live = bench.service.state.pool
        bench.journal.close()
        bench.clock.advance(1000.0)
        bench.start()
        assert bench.service.state.pool == live
        assert bench.service.next_deadline_s == bench.clock.now_s() + 12.0
        back = await bench.machine(A)
        assert isinstance(await back.ask(Heartbeat(boot=1)), HeartbeatAck)
        driver = await bench.machine(OWNER)
        assert await driver.ask(JobReport(job="job-1", state="running", step=5)) == Done()
        bench.clock.advance(11.0)
        bench.service.tick()
        assert bench.service.state.pool.members[A].phase == "active"

    play(scene)


def test_a_broker_replaced_by_another_stops(play):
    async def scene(bench: Bench) -> None:
        a = await bench.member(2)
        keeping = asyncio.create_task(bench.server.keep(asyncio.Event()))
        bench.journal._table.connection.execute("UPDATE head SET term = term + 1")
        assert await a.refused(registration(A)) == "failed"
        with pytest.raises(StorageError, match="another broker has written"):
            await keeping

    play(scene)


@pytest.mark.parametrize(("late_s", "phase"), [(0.0, "lost"), (5.9, "lost"), (6.1, "idle")])
def test_the_timer_acts_when_a_lease_ends_unless_the_broker_itself_stood_still(
    play, monkeypatch: pytest.MonkeyPatch, late_s: float, phase: str
):
    async def scene(bench: Bench) -> None:
        await (await bench.member(2)).ask(registration(A))
        bench.clock.advance(12.0 + late_s)
        acted, stop = asyncio.Event(), asyncio.Event()
        for name in ("tick", "stalled"):
            monkeypatch.setattr(bench.service, name, _then(getattr(bench.service, name), acted.set))
        keeping = asyncio.create_task(bench.server.keep(stop))
        await acted.wait()
        stop.set()
        await keeping
        assert bench.on_disk().members[A].phase == phase

    play(scene)


def _then(action: Callable[[], Replies], afterwards: Callable[[], None]) -> Callable[[], Replies]:
    def both() -> Replies:
        outcome = action()
        afterwards()
        return outcome

    return both


def test_the_timer_is_set_anew_when_an_earlier_lease_comes(play):
    async def scene(bench: Bench) -> None:
        stop = asyncio.Event()
        keeping = asyncio.create_task(bench.server.keep(stop))
        a = await bench.member(2)
        assert bench.server._waiting_for_s is None
        await a.ask(registration(A))
        await a.ask(Ping(sequence=1, sent_at_s=0.0))
        assert bench.server._waiting_for_s == 12.0
        stop.set()
        await keeping

    play(scene)


def test_the_brokers_owner_hears_who_comes_and_goes(play):
    async def scene(bench: Bench) -> None:
        heard: list[str] = []
        bench.service.notice = heard.append
        first, second = await bench.member(2), await bench.member(3)
        await first.ask(registration(A))
        await first.ask(registration(A))
        await second.ask(registration(B))
        await second.ask(Leave(drain=False))
        await first.channel.close()
        bench.clock.advance(3600.0)
        bench.service.tick()
        assert heard == [
            f"{short(A)} lends cpu with 1 GB; 1 machine is here.",
            f"{short(B)} lends cpu with 1 GB; 2 machines are here.",
            f"{short(B)} has left; 1 machine is here.",
            f"{short(A)} is lost (not heard for 12 s); 0 machines are here.",
        ]

    play(scene)
