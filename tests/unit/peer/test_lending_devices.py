"""Which devices of a box are lent, and what each member gets of what the box has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionai.peer import lending
from fusionai.peer.lending import PeerOptions, device_homes, options_of_devices, parse_devices
from fusionai.primitives.errors import UsageError

HOME = Path("home")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("auto", ("auto",)),
        ("all", ("all",)),
        ("CUDA:0, cuda:1", ("cuda:0", "cuda:1")),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cuda:1,cpu", ("cuda:1", "cpu")),
    ],
)
def test_devices_are_read_as_they_are_meant(text: str, names: tuple[str, ...]):
    assert parse_devices(text) == names


@pytest.mark.parametrize("text", ["", "cpu,", "auto,cpu", "cuda:0,all", "cuda:0,cuda:0", "mps,mps"])
def test_what_makes_no_sense_is_refused(text: str):
    with pytest.raises(UsageError, match="expected auto, all, or devices"):
        parse_devices(text)


def test_one_device_keeps_everything():
    options = PeerOptions(home=HOME, device="cuda", name="box", port=7, threads=3)
    assert options_of_devices(options) == [options]


def test_all_is_the_first_until_the_devices_are_known():
    options = PeerOptions(home=HOME, device="all", name="box")
    assert [one.device for one in options_of_devices(options)] == ["auto"]
    assert [one.device for one in options_of_devices(options, ("cuda:0",))] == ["cuda:0"]
    first, second = options_of_devices(options, ("cuda:0", "cuda:1"))
    assert (first.device, first.name, first.home) == ("cuda:0", "box cuda:0", HOME)
    assert (second.device, second.name, second.home) == ("cuda:1", "box cuda:1", HOME / "devices" / "cuda-1")
    assert (first.parts, first.threads) == (1, None)


def test_further_devices_listen_at_the_next_ports():
    options = PeerOptions(
        home=HOME, device="cuda:0,cuda:1", port=4711, advertise=("tcp://home.example:5000", "relay://[::1]:6000")
    )
    first, second = options_of_devices(options)
    assert (first.port, second.port) == (4711, 4712)
    assert first.advertise == options.advertise
    assert second.advertise == ("tcp://home.example:5001", "relay://[::1]:6000")
    assert {one.port for one in options_of_devices(PeerOptions(home=HOME, device="cpu,cpu"))} == {0}


def test_members_of_one_processor_divide_its_threads_and_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lending.psutil, "cpu_count", lambda logical: 6)
    first, second = options_of_devices(PeerOptions(home=HOME, device="cpu,cpu", name="box"))
    assert (first.threads, second.threads, first.parts, second.parts) == (3, 3, 2, 2)
    assert (first.name, second.name, second.home) == ("box cpu 1", "box cpu 2", HOME / "devices" / "cpu-2")
    assert [one.threads for one in options_of_devices(PeerOptions(home=HOME, device="cpu,cpu", threads=2))] == [2, 2]


def test_members_that_work_for_several_jobs_divide_each_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lending.psutil, "cpu_count", lambda logical: 6)
    first, second = options_of_devices(PeerOptions(home=HOME, jobs=2, name="box", port=4711))
    assert (first.device, second.device, first.parts, second.parts) == ("auto", "auto", 2, 2)
    assert (first.name, second.name, second.home) == ("box 1", "box 2", HOME / "devices" / "2")
    assert (first.port, second.port, second.threads) == (4711, 4712, 3)
    cards = options_of_devices(PeerOptions(home=HOME, device="all", jobs=2, name="box"), ("cuda:0", "cuda:1"))
    assert [one.name for one in cards] == ["box cuda:0 1", "box cuda:0 2", "box cuda:1 1", "box cuda:1 2"]
    assert [one.parts for one in cards] == [2] * 4


def test_homes_of_devices_are_those_that_have_joined(tmp_path: Path):
    for name in ("cuda-1", "cuda-2"):
        (tmp_path / "devices" / name).mkdir(parents=True)
    (tmp_path / "devices" / "cuda-2" / "membership.json").touch()
    assert device_homes(tmp_path) == (tmp_path / "devices" / "cuda-2",)
