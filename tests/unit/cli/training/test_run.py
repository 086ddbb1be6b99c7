"""What is said of faults before and after there is a view."""

from __future__ import annotations

import pytest

from fusionai.cli.training.run import Watch
from fusionai.client.pool.faults import FaultReport
from fusionai.client.training.kills import PeerReturned
from fusionai.training import progress


def test_without_a_view_each_line_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with Watch("run", 3, FaultReport()) as watch:
        watch(PeerReturned("laptop", "b" * 52), ("laptop is started again",))
        watch(progress.JobWaiting("nobody stands by"), ("the job waits",))
        watch(progress.Recovered(1, 1.0))
        watch(progress.Warned("low"))
    assert capsys.readouterr().out.splitlines() == ["laptop is started again", "the job waits", "warning: low"]


def test_what_a_peer_calls_itself_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Watch("run", 3, FaultReport()) as watch:
        watch(progress.BrokerBack(), ("bad\x1b[2Jname",))
    assert "\x1b" not in capsys.readouterr().out
