"""When a TCP channel drops a dead path, on a virtual clock: how late, and how rarely it asks the kernel meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from fusionai.transport.channels import tcp
from fusionai.transport.channels.link import CHECK_EVERY_S, DEAD_AFTER_S
from fusionai.transport.channels.tcp import TcpChannel

STEP_S = 0.05
LATEST_S = DEAD_AFTER_S + CHECK_EVERY_S
"""Documented limit, counted from the last acknowledgement."""


class VirtualLoop:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, callback: Callable[[], None]) -> object:
        self._timers.append((at_s, callback))
        return callback

    def advance(self) -> None:
        self.now_s += STEP_S
        due = [timer for timer in self._timers if timer[0] <= self.now_s]
        self._timers = [timer for timer in self._timers if timer[0] > self.now_s]
        for _, callback in due:
            callback()


class Connection:
    """A channel whose kernel reports the age of the last acknowledgement while unacknowledged data is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = VirtualLoop()
        self.asked = 0
        self.acknowledged_s = self.loop.now_s
        self.owes = False
        self.dropped_s: float | None = None
        self.channel = TcpChannel(cast("Any", None), "member", None)
        self.channel._loop = cast("Any", self.loop)
        self.channel._last_arrival_s = self.loop.now_s
        self.channel._transport = cast("Any", self)
        monkeypatch.setattr(tcp, "unacknowledged_s", self._unacknowledged_s)

    def write(self) -> None:
        self.owes = True
        self.channel._schedule_check()

    def hear(self) -> None:
        """A frame arrives, which acknowledges everything too."""
        self.channel._last_arrival_s = self.loop.now_s
        self.acknowledge()

    def acknowledge(self) -> None:
        self.acknowledged_s, self.owes = self.loop.now_s, False

    def get_extra_info(self, _name: str) -> object:
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.dropped_s = self.loop.now_s
        self.channel._transport = None

    def _unacknowledged_s(self, _sock: object) -> float | None:
        self.asked += 1
        return self.loop.now_s - self.acknowledged_s if self.owes else None


def in_loop(scenario: Callable[[Connection], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scenario(Connection(monkeypatch))

    asyncio.run(run())


@pytest.mark.parametrize("last_arrival_s", [0.0, 0.4, 1.0, 2.9, 3.0, 3.2, 3.45, 3.55, 7.0])
@pytest.mark.parametrize("acknowledged_after_s", [0.0, 0.5, 1.5, 3.1, 10.0])
def test_a_dead_path_is_dropped_within_the_documented_time(
    last_arrival_s: float, acknowledged_after_s: float, monkeypatch: pytest.MonkeyPatch
):
    """The other side writes until `last_arrival_s`, then only its kernel acknowledges, then its machine is gone."""

    def scenario(one: Connection) -> None:
        start_s = one.loop.now_s
        gone_s = start_s + last_arrival_s + acknowledged_after_s
        while one.dropped_s is None and one.loop.now_s < gone_s + 2 * LATEST_S:
            one.write()
            one.loop.advance()
            if one.loop.now_s <= start_s + last_arrival_s:
                one.hear()
            elif one.loop.now_s <= gone_s:
                one.acknowledge()
        assert one.dropped_s is not None
        assert DEAD_AFTER_S < one.dropped_s - one.acknowledged_s <= LATEST_S + 2 * STEP_S

    in_loop(scenario, monkeypatch)


def test_an_idle_connection_is_checked_as_soon_as_something_is_sent(monkeypatch: pytest.MonkeyPatch):
    def scenario(one: Connection) -> None:
        one.loop.now_s += 600.0
        one.acknowledge()  # of a keep-alive probe
        one.write()
        while one.dropped_s is None:
            one.loop.advance()
        assert one.dropped_s - one.acknowledged_s <= LATEST_S + 2 * STEP_S

    in_loop(scenario, monkeypatch)


def test_the_kernel_is_not_asked_while_frames_keep_arriving(monkeypatch: pytest.MonkeyPatch):
    def scenario(one: Connection) -> None:
        for step in range(int(60 / STEP_S)):
            one.write()
            one.loop.advance()
            if step % int(2.5 / STEP_S) == 0:
                one.hear()
        assert (one.asked, one.dropped_s) == (0, None)

    in_loop(scenario, monkeypatch)


def test_a_slow_reader_whose_machine_acknowledges_is_kept(monkeypatch: pytest.MonkeyPatch):
    def scenario(one: Connection) -> None:
        for _ in range(int(60 / STEP_S)):
            one.write()
            one.acknowledged_s = one.loop.now_s
            one.loop.advance()
        assert one.asked > 0
        assert one.dropped_s is None

    in_loop(scenario, monkeypatch)
