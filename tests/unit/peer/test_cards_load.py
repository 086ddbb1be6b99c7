"""What other programs use of a card, read from a scripted library and from files."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionai.peer import daemon, lending
from fusionai.peer.cards import AmdCard, NvidiaCard, OthersCardLoad, find_cards
from fusionai.peer.lending import CARD_BUSY_AFTER_S, LOOK_AT_CARDS_EVERY_S, QUIET_AFTER_S, Lending
from harness.virtual_clock import VirtualClock

GAME = 4711


class Refused(Exception):
    """The library's error."""


class Missing(Refused):
    """Nothing was found."""


@dataclass
class Library:
    """Stands for `pynvml`: samples of (process, percent), and the whole card's percent."""

    samples: list[tuple[int, int]] | None = None
    percent: int = 0
    names: list[str] = field(default_factory=list[str])
    asked_us: list[int] = field(default_factory=list[int])
    NVMLError = Refused
    NVMLError_NotFound = Missing

    def nvmlInit(self) -> None:
        if not self.names:
            raise Refused("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in self.names:
            raise Refused(name)
        return name

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[Any]:
        self.asked_us.append(since_us)
        if self.samples is None:
            raise Refused("not supported")
        if not self.samples:
            raise Missing
        return [
            SimpleNamespace(pid=pid, smUtil=used, timeStamp=1000 + at) for at, (pid, used) in enumerate(self.samples)
        ]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self.percent)


def load_of(card: Any, own_s: list[float]) -> OthersCardLoad:
    return OthersCardLoad([card], lambda: own_s[0])


def test_own_processes_are_not_others() -> None:
    library = Library([(os.getpid(), 90), (GAME, 30), (GAME, 45), (GAME + 1, 10)])
    load = load_of(NvidiaCard(library, "card"), [0.0])
    assert load.measured(0.0) == 0.55
    library.samples = [(os.getpid(), 99)]
    assert load.measured(0.5) == 0.0
    library.samples = []
    assert load.measured(1.0) == 0.0
    assert library.asked_us == [0, 1003, 1003], "a sample counts once"


def test_where_single_processes_are_unknown_own_work_is_taken_from_the_whole() -> None:
    library, own_s = Library(None, percent=80), [0.0]
    load = load_of(NvidiaCard(library, "card"), own_s)
    assert load.measured(0.0) == 0.8
    own_s[0] = 0.3
    assert load.measured(0.5) == pytest.approx(0.2)
    own_s[0] = 9.0
    assert load.measured(1.0) == 0.0


def test_amds_cards_are_read_from_files(tmp_path: Path) -> None:
    device = tmp_path / "card1" / "device"
    device.mkdir(parents=True)
    (device / "gpu_busy_percent").write_text("37\n", encoding="ascii")
    (card,) = find_cards([""], tmp_path)
    assert isinstance(card, AmdCard)
    assert load_of(card, [0.0]).measured(0.0) == 0.37
    (device / "gpu_busy_percent").unlink()
    assert load_of(card, [0.0]).measured(0.0) == 0.0


def test_nvidias_cards_are_found_by_name_and_without_a_driver_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = Library([], names=["GPU-a", "GPU-b"])
    monkeypatch.setitem(sys.modules, "pynvml", library)  # pyright: ignore
    found = find_cards(["b", "GPU-a"], tmp_path)
    assert [card.handle for card in found if isinstance(card, NvidiaCard)] == ["GPU-b", "GPU-a"]
    assert find_cards(["c"], tmp_path) == ()
    library.names = []
    assert find_cards(["a"], tmp_path) == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # pyright: ignore
    assert find_cards(["a"], tmp_path) == ()


def test_a_game_pauses_the_lending_within_two_seconds_and_its_end_resumes_it_later() -> None:
    clock, used = VirtualClock(), [0.05]
    times = Lending(None, pause_when_busy=True, clock=clock, load=lambda _: 0.0, card_load=lambda _: used[0])
    assert times.why_not() is None
    used[0] = 0.6
    waited_s = 0.0
    while times.why_not() is None:
        clock.advance(LOOK_AT_CARDS_EVERY_S)
        waited_s += LOOK_AT_CARDS_EVERY_S
    assert CARD_BUSY_AFTER_S <= waited_s < 2.0
    assert times.why_not() == "another program uses the graphics card"
    used[0] = 0.05
    assert times.why_not() is not None
    clock.advance(QUIET_AFTER_S)
    assert times.why_not() is None


def test_a_moment_on_the_card_is_no_game() -> None:
    clock, used = VirtualClock(), [0.9]
    times = Lending(None, pause_when_busy=True, clock=clock, load=lambda _: 0.0, card_load=lambda _: used[0])
    for share in (0.9, 0.9, 0.1, 0.9, 0.2):
        used[0] = share
        assert times.why_not() is None
        clock.advance(LOOK_AT_CARDS_EVERY_S)


def test_cards_are_looked_at_often_only_if_some_are_lent_and_watched() -> None:
    assert lending.LOOK_AT_CARDS_EVERY_S < lending.LOOK_EVERY_S
    unwatched = Lending(None, pause_when_busy=False, clock=VirtualClock(), card_load=lambda _: 1.0)
    assert unwatched.always
    assert unwatched.why_not() is None


def test_a_lent_card_that_can_t_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def lent(*devices: str) -> list[Any]:
        compute = SimpleNamespace(busy_s=1.0)
        return [
            SimpleNamespace(backend=SimpleNamespace(device=one), report=SimpleNamespace(card=one), compute=compute)
            for one in devices
        ]

    monkeypatch.setattr(daemon, "find_cards", lambda names: ())
    assert daemon._card_load(lent("cpu"), said.append) is None
    assert said == []
    assert daemon._card_load(lent("cpu", "cuda"), said.append) is None
    assert "watches the processor only" in said[0]
    library = Library([(GAME, 50)])
    monkeypatch.setattr(daemon, "find_cards", lambda names: [NvidiaCard(library, name) for name in names])
    load = daemon._card_load(lent("cpu", "cuda"), said.append)
    assert load is not None
    assert load(0.0) == 0.5
