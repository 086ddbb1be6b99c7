"""How members of a pool read: what they do, what they keep for others, how long they rest."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from fusionai.backends.worker.confinement import Measure
from fusionai.cli.pool import members as pool
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.wire.messages import LinkView, MemberView

PROFILE = PeerProfile(peer="a" * 52, name="attic", flops_per_s=1e9, memory_bytes=2**30)


def member(**changes: object) -> MemberView:
    view = MemberView(
        peer="a" * 52, state="active", boot=1, addresses=(), profile=msgspec.Raw(msgspec.msgpack.encode(PROFILE))
    )
    return msgspec.structs.replace(view, **changes)


@pytest.mark.parametrize(
    ("view", "state", "part"),
    [
        (member(stages=(0, 2), job="job-1"), "working", "runs 0 2"),
        (member(standbys=(1, 3), job="job-1"), "working", "standby of 1 3"),
        (member(stages=(0,), standbys=(1,), job="job-1"), "working", "runs 0, standby of 1"),
        (member(state="idle"), "standing by", ""),
        (member(state="resting", rests_s=240.0), "resting 4 min 0 s", ""),
        (member(state="draining", stages=(1,), job="job-1"), "leaving", "runs 1"),
    ],
)
def test_a_row_says_what_a_member_does(view: MemberView, state: str, part: str):
    row = pool._row(view, PROFILE)
    assert (row[1], row[6], row[7], row[8], row[9]) == ("attic", "no", state, view.job, part)


@pytest.mark.parametrize(
    ("measures", "column"),
    [
        ((), "no"),
        (("files",), "files"),
        (get_args(Measure), "yes"),
    ],
)
def test_a_row_says_what_a_job_is_kept_from(measures: tuple[Measure, ...], column: str):
    assert pool._row(member(), msgspec.structs.replace(PROFILE, isolation=measures))[6] == column


def test_figures_have_standbys_and_rest():
    figures = pool._figures(member(standbys=(1,), rests_s=3.0), PROFILE)
    assert (figures["standby_of"], figures["guards"], figures["rests_s"]) == ([1], [1], 3.0)


def test_each_link_counts_by_its_best_route():
    links = (
        LinkView("b" * 52, "relay", 2, 0.0),
        LinkView("b" * 52, "lan", 1, 0.0),
        LinkView("c" * 52, "relay", 1, 0.0),
    )
    view = member(links=links)
    assert "1 lan, 1 relay" in pool._row(view, PROFILE)
    written = pool._figures(view, PROFILE)["links"]
    unknown = {"round_trip_s": None, "bandwidth_bytes_per_s": None, "probed_bytes_per_s": None, "loss": 0.0}
    assert written == [
        {"peer": link.peer, "route": link.route, "way": link.route, "channels": link.channels, **unknown}
        for link in links
    ]
