"""What `fusion doctor` makes of machines this test does not run on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fusionai.backends.interface import DeviceReport
from fusionai.backends.survey import Seen, Survey
from fusionai.cli import doctor
from fusionai.cli.reach import Reach
from fusionai.primitives.ids import PeerId
from fusionai.wire.messages import LinkView, Observed

REPORT = DeviceReport(
    backend="torch",
    backend_version="2.13.0",
    device="cpu",
    device_name="a processor",
    flops_per_s=5e10,
    memory_bandwidth_bytes_per_s=2e10,
    memory_bytes=8 * 10**9,
    free_bytes=8 * 10**9,
    threads=1,
    fingerprint="f",
)


def survey(*, devices: tuple[str, ...] = ("cpu",), cuda: str | None = None, report: DeviceReport | None = REPORT):
    return Survey(
        seen=Seen(version="2.13.0", devices=devices, cuda_build=cuda),
        report=report,
        problem="driver fell over",
    )


def cards(monkeypatch: pytest.MonkeyPatch, looked: Survey) -> list[doctor.Finding]:
    monkeypatch.setattr(doctor, "_nvidia_card", lambda: "NVIDIA RTX 3080 (driver 550.1)")
    return [finding for finding in doctor._of_torch(looked, alone=True) if finding.area == "NVIDIA card"]


def test_a_card_with_a_build_without_cuda_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    (finding,) = cards(monkeypatch, survey())
    assert finding.state == "bad"
    assert "without CUDA" in finding.what
    assert "Install a build of torch with CUDA" in finding.remedy


def test_a_card_with_too_old_a_driver_says_update(monkeypatch: pytest.MonkeyPatch):
    (finding,) = cards(monkeypatch, survey(cuda="12.9"))
    assert "Update the NVIDIA driver" in finding.remedy


def test_a_card_that_torch_sees_needs_nothing(monkeypatch: pytest.MonkeyPatch):
    assert cards(monkeypatch, survey(devices=("cpu", "cuda:0 NVIDIA RTX 3080"), cuda="12.9")) == []


def test_a_device_that_fails_to_measure_is_bad():
    last = list(doctor._of_torch(survey(report=None), alone=True))[-1]
    assert (last.area, last.state) == ("speed", "bad")
    assert "driver fell over" in last.what


def test_a_crash_of_the_process_that_imports_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    killed = subprocess.CompletedProcess([], -11, b"", b"noise\nIllegal something\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: killed)
    looked = doctor._look_at("torch", "auto", None)
    assert isinstance(looked, str)
    assert "killed by signal 11: Illegal something" in looked
    (finding,) = doctor._of_torch(looked, alone=True)
    assert finding.state == "bad"
    (finding,) = doctor._of_torch(looked, alone=False)
    assert finding.state == "note", "another framework trains here"


def test_other_frameworks_are_listed_with_their_speed_or_what_installs_them():
    (missing,) = doctor._of_another("onnxruntime", None)
    assert (missing.state, "could serve" in missing.what) == ("note", True)
    assert "pip install 'fusionai[onnxruntime]'" in missing.remedy
    (measured,) = doctor._of_another("jax", survey())
    assert (measured.area, measured.state) == ("jax", "good")
    assert "50 GFLOP/s" in measured.what
    for broken in (survey(report=None), "the process that imported jax was killed"):
        (finding,) = doctor._of_another("jax", broken)
        assert finding.state == "note"
        assert "pip install 'fusionai[jax]'" in finding.remedy


@pytest.mark.parametrize(
    ("addresses", "state", "said"),
    [
        (("192.168.1.7",), "note", "all of them private"),
        (("192.168.1.7", "93.184.215.14"), "good", "93.184.215.14 is reachable"),
        ((), "note", "no network but loopback"),
    ],
)
def test_addresses_decide_what_to_do_about_the_router(addresses: tuple[str, ...], state: str, said: str):
    finding = next(iter(doctor._of_network(addresses)))
    assert finding.state == state
    assert said in finding.what


def test_a_kernel_without_bbr_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    (without,), (having,) = doctor._of_bulk(False), doctor._of_bulk(True)
    assert (without.state, having.state) == ("note", "good")
    assert "modprobe tcp_bbr" in without.remedy
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    assert list(doctor._of_bulk(False)) == []


def test_a_clock_that_is_not_synchronised_is_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_output", lambda command: "no\n")
    (finding,) = doctor._of_clock()
    assert finding.state == "note"
    assert "timedatectl" in finding.remedy


def test_disk_is_measured_where_the_home_will_be(tmp_path: Path):
    (finding,) = doctor._of_disk(tmp_path / "not" / "there" / "yet")
    assert "free for" in finding.what


SEEN = "203.0.113.7"


def way_in(observed: Observed | None, monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...] = ()) -> doctor.Finding:
    monkeypatch.setattr(doctor, "_addresses", lambda: iter(own))
    (finding,) = doctor._of_reach(Reach(0.1, 4712, observed, {}))
    assert finding.area == "inbound"
    return finding


def test_a_port_that_can_be_dialled_needs_nothing(monkeypatch: pytest.MonkeyPatch):
    finding = way_in(Observed(host=SEEN, port=50_000, reachable=True), monkeypatch)
    assert (finding.state, finding.remedy) == ("good", "")
    assert f"{SEEN}, port 4712" in finding.what


def test_behind_a_router_a_port_is_to_be_forwarded_or_the_relay_serves(monkeypatch: pytest.MonkeyPatch):
    finding = way_in(Observed(host=SEEN, port=50_000), monkeypatch, own=("192.168.1.2",))
    assert finding.state == "note"
    assert "router" in finding.what
    for words in ("relay", "forward a TCP port", "fusion doctor --port", "fusion join --port"):
        assert words in finding.remedy


def test_with_a_public_address_it_is_the_firewall(monkeypatch: pytest.MonkeyPatch):
    finding = way_in(Observed(host=SEEN, port=50_000), monkeypatch, own=(SEEN,))
    assert "firewall" in finding.what
    assert "firewall" in finding.remedy


def test_a_broker_that_cannot_say(monkeypatch: pytest.MonkeyPatch):
    assert way_in(None, monkeypatch).state == "note"


def test_doctor_says_which_way_each_link_goes():
    links = {
        PeerId("b" * 52): LinkView("b" * 52, "relay", 1, 0.0),
        PeerId("a" * 52): LinkView("a" * 52, "lan", 1, 0.002, 5e6, 0.005),
    }
    reach = Reach(0.1, 4712, None, links)
    finding = list(doctor._of_reach(reach))[-1]
    figures = "round trip 2 ms; up to 5 MB/s so far; 0.50% retransmitted"
    assert (finding.area, finding.what) == ("links", f"now: aaaaaaaa lan ({figures}), bbbbbbbb relay")
