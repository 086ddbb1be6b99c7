"""No byte of a card is lent twice by the processes of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from fusionai.backends.interface import DeviceReport
from fusionai.peer.cards import claim_card
from fusionai.peer.profile import lent_memory_bytes
from fusionai.primitives.errors import UsageError

GB = 10**9
CARD = DeviceReport(
    backend="torch",
    backend_version="2",
    device="cuda",
    device_name="a card",
    card="GPU-1",
    flops_per_s=1e13,
    memory_bandwidth_bytes_per_s=1e12,
    memory_bytes=24 * GB,
    free_bytes=20 * GB,
    threads=1,
    fingerprint="f",
)


def lent(report: DeviceReport) -> int:
    return lent_memory_bytes(report, 8 * GB)


def test_a_second_member_on_a_card_has_what_the_first_did_not_promise(tmp_path: Path) -> None:
    first = claim_card(CARD, tmp_path, lent, "first")
    assert first.report.free_bytes == 20 * GB
    second = claim_card(CARD, tmp_path, lent, "second")
    assert second.report.free_bytes == 12 * GB
    assert claim_card(replace(CARD, card="GPU-2"), tmp_path, lent, "other card").report.free_bytes == 20 * GB
    with pytest.raises(UsageError, match=r"a card has 16 GB free, and other processes of this machine have lent 16 GB"):
        claim_card(replace(CARD, free_bytes=16 * GB), tmp_path, lambda _: 8 * GB, "third")
    first.release()
    first.release()
    assert claim_card(CARD, tmp_path, lent, "third").report.free_bytes == 20 * GB - lent(second.report)


def test_members_that_divide_a_card_have_equal_parts_of_what_other_processes_left(tmp_path: Path) -> None:
    def half(report: DeviceReport) -> int:
        return lent_memory_bytes(report, None, parts=2)

    alone = half(CARD)
    for member in ("first", "second", "first"):
        claim = claim_card(CARD, tmp_path, half, member, divided=True)
        assert half(claim.report) == alone
    assert claim.path is not None
    promise = msgspec.json.decode(claim.path.read_bytes())
    other = {"pid": os.getppid(), "started_s": psutil.Process(os.getppid()).create_time(), "lent_bytes": 8 * GB}
    assert promise["lent_bytes"] == alone
    claim.path.with_name(f"{os.getppid()}-x.json").write_bytes(msgspec.json.encode(other))
    assert claim_card(CARD, tmp_path, half, "second", divided=True).report.free_bytes == 12 * GB


def test_a_member_that_starts_again_replaces_its_own_promise(tmp_path: Path) -> None:
    for _ in range(3):
        assert claim_card(CARD, tmp_path, lent, "first").report.free_bytes == 20 * GB


def test_what_ended_processes_promised_is_free(tmp_path: Path) -> None:
    claim = claim_card(CARD, tmp_path, lent, "first")
    assert claim.path is not None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    now_s = psutil.Process().create_time()
    for number, (pid, started_s) in enumerate([(ended.pid, now_s), (os.getpid(), now_s - 100.0)]):
        left = {"pid": pid, "started_s": started_s, "lent_bytes": 9 * GB}
        claim.path.with_name(f"{number}.json").write_bytes(msgspec.json.encode(left))
    claim.path.with_name("torn.json").write_bytes(b"{")
    assert claim_card(CARD, tmp_path, lent, "second").report.free_bytes == 12 * GB
    assert not claim.path.with_name("torn.json").exists()


def test_a_device_that_is_no_card_promises_nothing(tmp_path: Path) -> None:
    processor = replace(CARD, card="", device="cpu")
    claim = claim_card(processor, tmp_path, lent, "first")
    assert claim.report is processor
    claim.release()
    assert list(tmp_path.iterdir()) == []
