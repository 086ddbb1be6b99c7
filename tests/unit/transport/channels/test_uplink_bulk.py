"""Large frames of one connection take the machine's line in turns, by what the kernel says of them."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from fusionai.transport.channels import uplink as module
from fusionai.transport.channels.uplink import Bulk, KernelView, UplinkScheduler
from harness.in_a_loop import in_a_loop
from harness.patience import CEILING_S

LINE = 1e6
PIECE = 100_000
FAR = KernelView(
    rtt_s=0.05, jitter_s=0.0, least_rtt_s=0.05, delivered_bytes_per_s=LINE, limited_here=False
)  # fmt: skip


@dataclass
class Sent:
    """A transport, and what the kernel would say of it."""

    socket: socket.socket
    view: KernelView | None = FAR
    buffered: int = 0
    taken: list[bytes] = field(default_factory=list[bytes])

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self.socket

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def left(self, nbytes: int) -> None:
        assert self.view is not None
        self.view = dataclasses.replace(self.view, unsent_bytes=nbytes)


class House:
    """Connections of one machine with a measured line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uplink = UplinkScheduler()
        self.uplink.measured(LINE)
        self.sockets: dict[int, Sent] = {}
        monkeypatch.setattr(module, "kernel_view", lambda sock: self.sockets[id(sock)].view)
        monkeypatch.setattr(module, "set_pacing_rate", lambda sock, bytes_per_s: None)

    def connection(self, view: KernelView | None = FAR) -> tuple[Sent, Bulk]:
        sent = Sent(socket.socket(), view)
        self.sockets[id(sent.socket)] = sent
        return sent, Bulk(cast("Any", sent), self.uplink)

    def close(self) -> None:
        for sent in self.sockets.values():
            sent.socket.close()


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch):
    made = House(monkeypatch)
    yield made
    made.close()


async def frame(sent: Sent, bulk: Bulk, pieces: int = 1) -> None:
    for _ in range(pieces):
        await bulk.slice(PIECE)
    sent.left(pieces * PIECE)
    bulk.written()


async def pending(task: asyncio.Task[None], seconds: float = 0.06) -> bool:
    done, _ = await asyncio.wait({task}, timeout=seconds)
    return not done


@in_a_loop
async def test_the_second_begins_when_the_line_has_the_first(house: House):
    (one, first), (other, second) = house.connection(), house.connection()
    await frame(one, first)
    later = asyncio.create_task(frame(other, second))
    assert await pending(later)
    one.left(int(LINE * module.LEFT_S))
    await asyncio.wait_for(later, CEILING_S)
    first.end()
    second.end()


@in_a_loop
async def test_what_stands_in_a_routers_queue_is_still_to_be_sent(house: House):
    (one, first), (other, second) = house.connection(), house.connection()
    await frame(one, first)
    assert one.view is not None
    one.view = dataclasses.replace(one.view, unsent_bytes=0, in_flight_bytes=int(LINE * one.view.least_rtt_s) + PIECE)
    later = asyncio.create_task(frame(other, second))
    assert await pending(later)
    one.view = dataclasses.replace(one.view, in_flight_bytes=int(LINE * one.view.least_rtt_s))
    await asyncio.wait_for(later, CEILING_S)
    first.end()
    second.end()


@in_a_loop
async def test_a_connection_that_goes_gives_its_turn_back_and_one_that_waits_is_let_go(house: House):
    (one, first), (other, second) = house.connection(), house.connection()
    await frame(one, first)
    later = asyncio.create_task(frame(other, second))
    assert await pending(later)
    first.end()
    await asyncio.wait_for(later, CEILING_S)
    third = asyncio.create_task(frame(*house.connection()))
    assert await pending(third)
    second.end()
    await asyncio.wait_for(third, CEILING_S)


@in_a_loop
async def test_who_waits_and_goes_is_let_go_at_once_and_holds_nothing(house: House):
    (one, first), (_, second), (other, third) = house.connection(), house.connection(), house.connection()
    await frame(one, first)
    waiting = asyncio.create_task(second.slice(PIECE))
    last = asyncio.create_task(frame(other, third))
    assert await pending(waiting, 0.01)
    second.end()
    await asyncio.wait_for(waiting, CEILING_S)
    assert await pending(last, 0.01), "the first still has its turn"
    first.end()
    await asyncio.wait_for(last, CEILING_S)
    third.end()


@in_a_loop
async def test_who_gets_nowhere_holds_nobody_up_for_long(house: House, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_TOO_LONG_S", 0.01)
    monkeypatch.setattr(module, "TOO_LONG", 0.1)
    (one, first), (other, second) = house.connection(), house.connection()
    await frame(one, first)
    await asyncio.wait_for(frame(other, second), 5)
    assert one.view is not None
    assert one.view.unsent_bytes == PIECE
    first.end()
    second.end()


@in_a_loop
async def test_who_sends_a_whole_state_lets_others_in_between(house: House):
    (one, first), (other, second) = house.connection(), house.connection()
    await first.slice(PIECE)
    later = asyncio.create_task(second.slice(PIECE))
    assert await pending(later, 0.01)
    parts = 0

    async def state() -> None:
        nonlocal parts
        for _ in range(20):
            await first.slice(PIECE)
            parts += 1

    whole = asyncio.create_task(state())
    await asyncio.wait_for(later, CEILING_S)
    assert parts * PIECE <= module.LEAST_GRANT_BYTES
    assert not whole.done()
    second.written()
    await asyncio.wait_for(whole, CEILING_S)
    first.end()
    second.end()
    assert (one.buffered, other.buffered) == (0, 0)


@pytest.mark.parametrize("view", [dataclasses.replace(FAR, least_rtt_s=0.0005, rtt_s=0.0005), None])
@in_a_loop
async def test_what_goes_next_door_takes_no_turn_nor_where_the_kernel_says_nothing(
    house: House, view: KernelView | None
):
    await frame(*house.connection())
    sent, near = house.connection(view)
    await asyncio.wait_for(near.slice(PIECE), 5)
    near.written()
    near.end()
    assert sent.buffered == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the way is Linux's")
@in_a_loop
async def test_a_path_that_loses_packets_goes_by_bbr_from_then_on(house: House, monkeypatch: pytest.MonkeyPatch):
    ways: list[str] = []
    monkeypatch.setattr(module, "use_for_bulk", lambda sock, way: ways.append(way) or True)
    monkeypatch.setattr(module, "SAMPLE_EVERY_S", 0.0)
    sent, bulk = house.connection()
    assert ways == [module.CLEAN_PATHS]
    await frame(sent, bulk)
    for resent in range(1, 4):
        assert sent.view is not None
        sent.view = dataclasses.replace(sent.view, resent_segments=resent)
        bulk.written()
    assert ways == [module.CLEAN_PATHS, module.LOSSY_PATHS]
    bulk.end()


@in_a_loop
async def test_an_unmeasured_line_is_left_to_bbr(house: House, monkeypatch: pytest.MonkeyPatch):
    ways: list[str] = []
    monkeypatch.setattr(module, "use_for_bulk", lambda sock, way: ways.append(way) or True)
    house.uplink.uplink_bytes_per_s = None
    house.connection()
    assert ways == [module.LOSSY_PATHS]
