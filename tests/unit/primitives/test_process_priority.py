"""Sessions yield and are ordinary again, where the system has that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusionai.primitives.process import ORDINARY, YIELDING, weigh_session


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this system does not group by session")
def test_a_session_yields_and_is_ordinary_again() -> None:
    own = Path("/proc/self/autogroup").read_text()
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    group = Path(f"/proc/{sleeper.pid}/autogroup")
    try:
        assert weigh_session(sleeper.pid, YIELDING)
        assert group.read_text().split()[-1] == str(YIELDING)
        while not weigh_session(sleeper.pid, ORDINARY):  # ten wishes a second, of all programs together
            os.sched_yield()
        assert group.read_text().split()[-1] == str(ORDINARY)
    finally:
        sleeper.communicate(b"\n")
    assert Path("/proc/self/autogroup").read_text() == own


def test_a_process_that_is_gone_is_told() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not weigh_session(gone.pid, YIELDING)
