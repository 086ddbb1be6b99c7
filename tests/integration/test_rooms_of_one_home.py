"""Rooms of one home, as network namespaces on one bridge, with the real commands and real mDNS."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from fusionai.transport.enrolment import load_membership
from harness.homes import Homes, why_not
from harness.patience import CEILING_S

WHY_NOT = why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def test_a_machine_joins_by_code_and_finds_the_broker_at_its_new_address(tmp_path: Path):
    with Homes({"a": "preserving"}, {"a": 3}) as homes:

        def fusion(machine: str, *arguments: str) -> tuple[int, str]:
            process = homes.run(machine, sys.executable, "-m", "fusionai", *arguments)
            said, _ = process.communicate(timeout=CEILING_S)
            return process.returncode, said

        opened, owner = tmp_path / "broker.json", tmp_path / "owner"
        homes.run("a1", sys.executable, "-m", "fusionai", "broker", "--home", tmp_path / "broker", "--json", opened)
        until_s = time.monotonic() + CEILING_S
        while not opened.exists() and time.monotonic() < until_s:
            time.sleep(0.1)
        code = json.loads(opened.read_text())["code"]
        joining = ("join", "--owner", "--code", code)
        done, said = fusion("a2", *joining, "--home", str(owner))
        assert (done, "is a job owner of pool pool" in said) == (0, True), said
        refused, said = fusion("a3", *joining, "--home", str(tmp_path / "late"))
        assert (refused, "no longer valid" in said) == (1, True), said

        homes.readdress("a1", "192.168.1.77")
        done, said = fusion("a2", "pool", "--home", str(owner))
        while done and time.monotonic() < until_s:
            done, said = fusion("a2", "pool", "--home", str(owner))
        assert done == 0, said
        assert load_membership(owner / "owner").broker.known[0] == "tcp://192.168.1.77:4711"
