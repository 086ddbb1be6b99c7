"""A return skips the measuring, never the fingerprint; whatever differs is measured again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from fusionai.backends.interface import DeviceReport, Speeds
from fusionai.execution import measurement
from fusionai.execution.measurement import FILE, LONGEST_AGE_S, measured_device
from harness.null_backend import NullBackend
from harness.virtual_clock import VirtualClock

DAY_S = 86_400.0


@dataclass
class Machine:
    """A device that is slower at each measurement, and its home."""

    home: Path
    clock: VirtualClock
    fingerprint: str = "bits"
    card: str = "a card"
    shared: Path | None = None
    measured: int = 0
    name: str = "null"
    parts: int = 1

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        if speeds is None:
            self.measured += 1
            speeds = Speeds(1e9 / self.measured, 1e10)
        return replace(NullBackend().probe(speeds), fingerprint=self.fingerprint, device_name=self.card)

    def start(self, *, anew: bool = False) -> tuple[DeviceReport, float | None]:
        return measured_device(
            self,  # type: ignore[arg-type]
            self.home,
            anew=anew,
            clock=self.clock,
            shared=self.shared,
            parts=self.parts,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "home", VirtualClock())


def test_the_second_start_uses_the_first_ones_measurement(machine: Machine) -> None:
    first, since = machine.start()
    assert since is None
    measured_at_s = machine.clock.wall_s()
    machine.clock.advance(LONGEST_AGE_S - 1)
    assert machine.start() == (first, measured_at_s)
    assert machine.measured == 1


def test_asked_for_it_measures_anew_and_keeps_that(machine: Machine) -> None:
    machine.start()
    machine.clock.advance(DAY_S)
    again, since = machine.start(anew=True)
    assert since is None
    assert again.flops_per_s == 0.5e9
    assert machine.start() == (again, machine.clock.wall_s())


def test_a_device_without_a_fingerprint_is_known_by_its_name(machine: Machine) -> None:
    """It promises no bits, so that two different ones have equal fingerprints: empty ones."""
    machine.fingerprint = ""
    machine.start()
    machine.start()
    assert machine.measured == 1
    machine.card = "another card"
    machine.start()
    assert machine.measured == 2


def _older(machine: Machine) -> None:
    machine.clock.advance(LONGEST_AGE_S + 1)


def _other_bits(machine: Machine) -> None:
    machine.fingerprint = "other bits"


def _other_backend(machine: Machine) -> None:
    machine.name = "other"


def _divided(machine: Machine) -> None:
    machine.parts = 2


def _clock_set_back(machine: Machine) -> None:
    machine.clock = VirtualClock(wall_offset_s=1_600_000_000.0)


def _torn(machine: Machine) -> None:
    path = machine.home / FILE
    path.write_bytes(path.read_bytes()[:-9])


def _not_text(machine: Machine) -> None:
    (machine.home / FILE).write_bytes(b"\xff\xfe\x00")


def _no_speed(machine: Machine) -> None:
    path = machine.home / FILE
    kept = msgspec.json.decode(path.read_bytes())
    kept["speeds"]["flops_per_s"] = 0.0
    path.write_bytes(msgspec.json.encode(kept))


def _unknown_key(machine: Machine) -> None:
    path = machine.home / FILE
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), "more": 1}))


@pytest.mark.parametrize(
    "changed",
    [
        *(_older, _other_bits, _other_backend, _divided, _clock_set_back),
        *(_torn, _not_text, _no_speed, _unknown_key),
    ],
)
def test_whatever_is_different_is_measured_again(machine: Machine, changed: Callable[[Machine], None]) -> None:
    machine.start()
    changed(machine)
    report, since = machine.start()
    assert since is None
    assert machine.measured == 2
    assert report.fingerprint == machine.fingerprint
    assert machine.start() == (report, machine.clock.wall_s())


def test_another_version_of_this_software_measures_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.start()
    monkeypatch.setattr(measurement, "__version__", "99.0")
    assert machine.start()[1] is None


def test_a_home_that_can_not_be_written_is_no_reason_to_fail(machine: Machine) -> None:
    machine.home.write_text("a file where the directory should be")
    assert machine.start()[1] is None
    assert machine.start()[1] is None
    assert machine.measured == 2


def test_of_processes_beside_each_other_one_measures_and_the_others_wait_for_it(tmp_path: Path) -> None:
    clock, shared = VirtualClock(), tmp_path / "shared"
    second = Machine(tmp_path / "second", clock, shared=shared)

    class First(Machine):
        def probe(self, speeds: Speeds | None = None) -> DeviceReport:
            waiting.start()
            return super().probe(speeds)

    found: list[tuple[DeviceReport, float | None]] = []
    waiting = threading.Thread(target=lambda: found.append(second.start()))
    report, since = First(tmp_path / "first", clock, shared=shared).start()
    waiting.join()
    assert since is None
    assert second.measured == 0
    assert found == [(report, clock.wall_s())]


def test_what_another_machine_measured_does_not_hold_here(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    Machine(tmp_path / "first", VirtualClock(), shared=shared).start()
    other = Machine(tmp_path / "second", VirtualClock(), fingerprint="other bits", shared=shared)
    assert other.start()[1] is None
    assert other.measured == 1
