"""The job owner's own machine: measured at the first job, not at each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fusionai.backends.interface import DeviceReport, Speeds
from fusionai.client.pool import job_process
from fusionai.client.pool.job_process import own_machine, owner_profile
from harness.in_a_loop import in_a_loop
from harness.null_backend import NullBackend
from harness.pool import peer_id


@dataclass(frozen=True)
class Device(NullBackend):
    """`probes`: whether each probe measured."""

    probes: list[bool] = field(default_factory=list[bool])

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        self.probes.append(speeds is None)
        return NullBackend.probe(self, speeds)


@in_a_loop
async def test_the_owners_machine_is_measured_at_the_first_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(job_process, "open_backend", lambda name, device, threads, opened=device: opened)
    reports: list[DeviceReport] = []
    said: list[str] = []
    for _ in range(2):
        async with own_machine("cpu", 1, tmp_path, said.append) as machine:
            reports.append(machine.report)
    assert device.probes == [True, False]
    assert reports[0] == reports[1]
    (kept,) = said
    assert f"delete {tmp_path / 'owner' / 'measurement.json'} to measure it again" in kept


def test_a_jobs_owner_plans_with_what_its_card_has_free() -> None:
    report = replace(NullBackend().probe(), memory_bytes=24, free_bytes=20)
    assert owner_profile(peer_id(1), report).memory_bytes == 24
    assert owner_profile(peer_id(1), replace(report, card="GPU-1")).memory_bytes == 20
    assert owner_profile(peer_id(1), report, 7).memory_bytes == 7
