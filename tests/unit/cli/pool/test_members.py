"""How members of a pool read: what they do, what they keep for others, how long they rest."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import cast, get_args

import msgspec
import pytest

from fusionai.backends.worker.confinement import Measure
from fusionai.cli.pool import members as pool
from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.wire.messages import JobView, LinkView, MemberView

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


class _Session:
    """Answers as the broker does: all jobs without their stories, or the one of a name with it."""

    def __init__(self, *known: JobView) -> None:
        self.known = known

    async def jobs(self, name: str = "") -> tuple[JobView, ...]:
        return tuple(
            msgspec.structs.replace(one, story=("began",)) if name else one
            for one in self.known
            if name in ("", one.job)
        )


def job(name: str, title: str, state: str = "running") -> JobView:
    return JobView(
        job=name, title=title, owner="a" * 52, state=state, step=3, steps=9, plan_version=1, started_at_s=0.0
    )


JOBS = (
    job("llama-x1", "llama", "done"),
    job("llama-x2", "llama"),
    job("mistral-x3", "mistral"),
    job("gemma-a", "gemma"),
    job("gemma-b", "gemma"),
)


@pytest.mark.parametrize(
    ("text", "found"),
    [("llama-x1", "llama-x1"), ("llama", "llama-x2"), ("mis", "mistral-x3"), ("mistral", "mistral-x3")],
)
def test_a_job_is_named_by_id_by_title_or_by_how_one_begins(text: str, found: str):
    view = asyncio.run(pool._one(cast(PoolSession, _Session(*JOBS)), text))
    assert (view.job, view.story) == (found, ("began",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gemma", "2 jobs fit 'gemma': gemma-a, gemma-b"),
        ("llama-x", "2 jobs fit"),
        ("qwen", "there is no job 'qwen'"),
        ("", "there is no job ''"),
    ],
)
def test_a_job_that_is_not_clear_is_refused(text: str, problem: str):
    with pytest.raises(UsageError, match=re.escape(problem)):
        asyncio.run(pool._one(cast(PoolSession, _Session(*JOBS)), text))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--csv", "l.csv"], "expected --ledger beside --csv and --verify"),
        (["--verify", "l.json"], "expected --ledger beside --csv and --verify"),
        (["--ledger", "--verify", "l.json", "--csv", "l.csv"], "expected --verify alone"),
        (["--ledger", "--verify", "l.json", "--json", "out.json"], "expected --verify alone"),
    ],
)
def test_options_of_the_ledger_that_do_not_fit_are_refused(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=problem):
        pool.pool.main([*arguments, "--home", str(tmp_path)], standalone_mode=False)
