"""A peer's place in the pool over in-process channels: heartbeats, a broker that was away, a lease that ran out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import msgspec
import pytest

from fusionai.peer import registration
from fusionai.peer.registration import Registration
from fusionai.primitives.errors import FusionError, RefusedError, StorageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S, until

PEER, BROKER = PeerId("a" * 52), PeerId("y" * 52)
REGISTERED = wire.Registered(heartbeat_s=0.0, pool="home")
ACK = wire.HeartbeatAck()
STALE = wire.Refused(code="stale_fence", reason="clear your stages and register again.")


class Script:
    """A broker that answers as told, and what it and the peer's callbacks saw, in order. `"break"` ends a connection,
    `"hang"` leaves it open without an answer; after the last answer nothing more is said. `finds`: where the peer finds
    itself when it looks; `moves`: whether it moved, each time it wonders; `carries`: its endorsements after each
    heartbeat, the last for ever."""

    def __init__(
        self,
        *answers: wire.Message | str,
        finds: tuple[str, ...] | None = None,
        moves: tuple[bool, ...] = (),
        carries: tuple[tuple[bytes, ...] | FusionError, ...] = (),
    ) -> None:
        self.answers = list(answers)
        self.finds = finds
        self.moves = list(moves)
        self.carries = list(carries)
        self.seen: list[str] = []
        self.over = asyncio.Event()

    async def accept(self, channel: Channel) -> None:
        while True:
            message = (await channel.receive()).message
            self.seen.append(type(message).__name__)
            if isinstance(message, wire.Register) and (
                shown := msgspec.msgpack.decode(message.profile, type=PeerProfile).endorsements
            ):
                self.seen.append(f"shows {len(shown)}")
            if isinstance(message, wire.Register) and message.addresses:
                self.seen.append(message.addresses[0])
            if not self.answers:
                self.over.set()
                await asyncio.Event().wait()
            answer = self.answers.pop(0)
            if answer == "hang":
                await asyncio.Event().wait()
            if isinstance(answer, str):
                return
            await channel.send(answer)
            if self.answers and isinstance(self.answers[0], wire.MeetNotice):
                await channel.send(self.answers.pop(0))

    def heard(self, answer: wire.Registered | wire.HeartbeatAck) -> None:
        if answer.wall_s:
            self.seen.append(f"the broker's clock: {answer.wall_s:g}")

    def carried(self) -> tuple[bytes, ...]:
        now = self.carries.pop(0) if len(self.carries) > 1 else self.carries[0]
        if isinstance(now, FusionError):
            raise now
        return now

    async def look(self) -> tuple[str, ...]:
        self.seen.append("looks")
        return self.finds or ()

    def moved(self) -> bool:
        return bool(self.moves) and self.moves.pop(0)


def registration_for(script: Script, network: MemoryNetwork) -> Registration:
    return Registration(
        network.transport(PEER, "member"),
        BrokerAddresses(("memory://broker:1",)),
        boot=1,
        profile=PeerProfile(peer=PEER, flops_per_s=1e9, memory_bytes=1),
        addresses=(),
        jobs=lambda: ("job-1",),
        on_registered=lambda _: script.seen.append("on_registered"),
        on_leave=lambda _: None,
        on_lost=lambda: script.seen.append("on_lost"),
        on_meet=lambda notice, broker: script.seen.append(f"{notice.peer[:1]} wants to meet, says {broker.role}"),
        addresses_now=None if script.finds is None else script.look,
        moved=script.moved,
        endorsements=script.carried if script.carries else None,
        on_answer=script.heard,
    )


@asynccontextmanager
async def registering(script: Script) -> AsyncIterator[tuple[Registration, asyncio.Task[None]]]:
    network = MemoryNetwork()
    listener = await network.transport(BROKER, "broker").listen(script.accept, host="broker", port=1)
    peer = registration_for(script, network)
    running = asyncio.create_task(peer.run())
    try:
        yield peer, running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, RefusedError):
            await running
        await listener.close()


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Script]], list[str]]:
    monkeypatch.setattr(registration, "FIRST_RETRY_S", 0.0)

    def run(make: Callable[[], Script]) -> list[str]:
        async def main() -> list[str]:
            script = make()
            async with asyncio.timeout(CEILING_S), registering(script) as (_, running):
                over = asyncio.create_task(script.over.wait())
                await asyncio.wait({over, running}, return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
                if running.done():
                    await running
            return script.seen

        return asyncio.run(main())

    return run


def test_a_broker_that_hangs_is_left(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registration, "ANSWER_S", 0.05)
    seen = play(lambda: Script(REGISTERED, ACK, "hang", ACK, ACK))
    assert seen == ["Register", "on_registered", *["Heartbeat"] * 3, "on_registered", *["Heartbeat"] * 2]


def test_a_peer_leaves_also_when_the_broker_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registration, "ANSWER_S", 0.05)

    async def main() -> list[str]:
        script = Script(wire.Registered(heartbeat_s=3600.0, pool="home"), "hang")
        async with asyncio.timeout(CEILING_S), registering(script) as (peer, _):
            await until(lambda: "on_registered" in script.seen)
            await peer.leave()
        return script.seen

    assert asyncio.run(main()) == ["Register", "on_registered", "Leave"]


def test_a_broker_that_was_reached_is_tried_again_at_each_heartbeat(play, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a member could come back later than its lease ends."""
    pauses: list[float] = []

    async def slept(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(registration, "FIRST_RETRY_S", 0.5)
    monkeypatch.setattr(registration.asyncio, "sleep", slept)
    registered = wire.Registered(heartbeat_s=3.0, pool="home")
    play(lambda: Script(registered, *["break"] * 8))
    assert pauses[0] == 3.0
    assert pauses[1:4] == sorted(pauses[1:4])
    assert 1.5 <= max(pauses[1:]) <= 3.0


def test_peers_that_lose_their_broker_at_the_same_moment_come_back_at_different_ones():
    factors = sorted(registration._factor(f"peer {number}") for number in range(2000))
    assert 0.5 <= factors[0] < 0.51
    assert 0.99 < factors[-1] < 1.0
    assert max(later - earlier for earlier, later in pairwise(factors)) < 0.01


def test_a_peer_registers_once_and_then_beats(play):
    seen = play(lambda: Script(REGISTERED, ACK, ACK))
    assert seen == ["Register", "on_registered", "Heartbeat", "Heartbeat", "Heartbeat"]


def test_a_peer_whose_lease_ran_out_forgets_first_and_registers_again_at_once_on_the_same_connection(
    play, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registration, "FIRST_RETRY_S", 1000.0)
    seen = play(lambda: Script(REGISTERED, ACK, STALE, REGISTERED))
    assert seen[2:] == ["Heartbeat", "Heartbeat", "on_lost", "Register", "on_registered", "Heartbeat"]


def test_a_broker_that_was_away_makes_nobody_forget_anything(play):
    seen = play(lambda: Script(REGISTERED, "break", ACK, ACK))
    assert seen == ["Register", "on_registered", "Heartbeat", "Heartbeat", "on_registered", "Heartbeat", "Heartbeat"]


def test_a_lease_that_ran_out_while_the_connection_was_broken_is_noticed_before_anything_else(play):
    seen = play(lambda: Script(REGISTERED, "break", STALE, REGISTERED))
    assert seen[2:] == ["Heartbeat", "Heartbeat", "on_lost", "Register", "on_registered", "Heartbeat"]


def test_a_broker_set_back_to_before_this_peer_registered_hears_from_it_again(play):
    unknown = wire.Refused(code="unknown_peer", reason="it is joining, not in the pool.")
    seen = play(lambda: Script(REGISTERED, "break", unknown, REGISTERED))
    assert seen[2:] == ["Heartbeat", "Heartbeat", "Register", "on_registered", "Heartbeat"]


@pytest.mark.parametrize("code", ["unknown_peer", "not_authorised", "untrusted", "bad_message"])
def test_what_cannot_mend_itself_ends_it(play, code):
    with pytest.raises(RefusedError):
        play(lambda: Script(REGISTERED, wire.Refused(code=code, reason="no.")))


def test_a_busy_broker_is_asked_again(play):
    seen = play(lambda: Script(wire.Refused(code="failed", reason="disk full"), REGISTERED, ACK))
    assert seen == ["Register", "Register", "on_registered", "Heartbeat", "Heartbeat"]


def test_a_broker_that_can_not_serve_is_passed_over(play, monkeypatch: pytest.MonkeyPatch):
    passed: list[object] = []
    monkeypatch.setattr(BrokerAddresses, "pass_over", lambda self: passed.append(self))
    play(lambda: Script(REGISTERED, wire.Refused(code="failed", reason="its lease has ended"), ACK))
    assert len(passed) == 1


def test_a_machine_that_moved_while_the_broker_was_away_says_where_it_is_and_keeps_its_place(play):
    there = "tcp://10.0.0.9:1"
    seen = play(lambda: Script(REGISTERED, "break", ACK, REGISTERED, ACK, finds=(there,)))
    assert seen[2:] == ["Heartbeat", "Heartbeat", "looks", "Register", there, "on_registered", "Heartbeat", "Heartbeat"]


def test_a_machine_that_is_where_it_was_says_nothing(play):
    seen = play(lambda: Script(REGISTERED, "break", ACK, ACK, finds=()))
    assert seen[2:] == ["Heartbeat", "Heartbeat", "looks", "on_registered", "Heartbeat", "Heartbeat"]


def test_a_move_that_broke_no_connection_is_said_after_the_next_heartbeat(play):
    there = "quic://b@203.0.113.7:1"
    seen = play(lambda: Script(REGISTERED, ACK, ACK, REGISTERED, finds=(there,), moves=(False, True)))
    assert seen[2:] == ["Heartbeat", "Heartbeat", "looks", "Register", there, "Heartbeat"]


def test_an_endorsement_that_came_meanwhile_is_shown_after_the_next_heartbeat(play):
    torn = StorageError("torn")
    carries = ((), torn, (b"one", b"two"), torn, (b"one", b"two"))
    seen = play(lambda: Script(REGISTERED, ACK, ACK, ACK, REGISTERED, ACK, ACK, carries=carries))
    assert seen[2:] == [*["Heartbeat"] * 3, "Register", "shows 2", *["Heartbeat"] * 3]


def test_the_brokers_clock_is_learnt_at_registering_and_from_each_heartbeat(play):
    registered, ack = (msgspec.structs.replace(one, wall_s=s) for one, s in ((REGISTERED, 7.0), (ACK, 8.0)))
    seen = play(lambda: Script(registered, ack, ACK))
    assert [one for one in seen if "clock" in one] == ["the broker's clock: 7", "the broker's clock: 8"]


def test_who_wants_to_meet_is_told_together_with_the_broker_that_says_so(play):
    notice = wire.MeetNotice(peer="b" * 52, token=b"")
    seen = play(lambda: Script(REGISTERED, notice, ACK, ACK))
    assert "b wants to meet, says broker" in seen
    assert "on_lost" not in seen
