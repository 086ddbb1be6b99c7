"""The goodput benchmark draws the same faults from the same seed, and judges as it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from fusionai.wire.messages import CommitRecord, Fence

PLACE = Path(__file__).resolve().parents[3] / "benchmarks" / "goodput.py"


@pytest.fixture(scope="module")
def goodput() -> ModuleType:
    sys.path.insert(0, str(PLACE.parent))  # as for a script: it imports its neighbour
    spec = importlib.util.spec_from_file_location("goodput_benchmark", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_faults_follow_from_the_seed_alone_and_every_round_has_each_kind(goodput):
    kinds = goodput.KINDS
    drawn = [goodput.strike(7, number, 30.0, kinds) for number in range(40)]
    assert drawn == [goodput.strike(7, number, 30.0, kinds) for number in range(40)]
    assert drawn != [goodput.strike(8, number, 30.0, kinds) for number in range(40)]
    for start in range(0, 40, len(kinds)):
        assert {one.kind for one in drawn[start : start + len(kinds)]} == set(kinds)
    assert all(10.0 <= one.offset_s <= 20.0 and 0 <= one.pick < 1 for one in drawn)
    assert len({one.offset_s for one in drawn}) == 40


def test_slopes(goodput):
    assert goodput.slope_per_hour([(0.0, 5.0), (10.0, 5.0), (20.0, 5.0)]) == 0
    assert goodput.slope_per_hour([(x, 2 + x / 360) for x in (0.0, 10.0, 30.0)]) == pytest.approx(10.0)
    assert goodput.slope_per_hour([(0.0, 1.0), (1.0, 2.0)]) is None


def samples(goodput, pid: int, seconds: int, grown_bytes_per_s: int = 0):
    return [
        goodput.Sample(float(at), "tower", pid, 2**20 + at * grown_bytes_per_s, 20, 2, 1.0)
        for at in range(0, seconds, 10)
    ]


def test_only_processes_that_lived_long_enough_have_a_slope_and_their_beginning_is_left_out(goodput):
    found = goodput.flatness([*samples(goodput, 1, 200), *samples(goodput, 2, 400, 1000)])
    assert [life["pid"] for life in found] == [2]
    assert found[0]["rss_mib_per_hour"] == pytest.approx(1000 * 3600 / 2**20)
    assert found[0]["seconds"] == 330
    assert found[0]["descriptors_per_hour"] == 0


RECORD = CommitRecord(
    step=3,
    scale=1.0,
    learning_rate=0.1,
    total_norm=2.0,
    norms_hash="ab",
    fence=Fence(1, 1, 0),
    loss=1.5,
)


def test_records_differ_in_everything_but_the_plan_they_were_made_under(goodput):
    assert not goodput.different(RECORD, msgspec.structs.replace(RECORD, fence=Fence(9, 2, 3)))
    for change in ({"loss": 1.5000001}, {"scale": 0.9}, {"total_norm": 2.1}, {"norms_hash": "ac"}, {"step": 4}):
        assert goodput.different(RECORD, msgspec.structs.replace(RECORD, **change))


def test_a_fault_costs_what_the_calm_pace_would_not_have_taken(goodput):
    first = goodput.Fault(0, "kill stage", "tower", at_s=2.5, step=3)
    second = goodput.Fault(1, "kill spare", "attic", at_s=10.5, step=7)
    commits = [(0.0, 0), (1.0, 1), (2.0, 2), (7.0, 3), (8.0, 4), (9.0, 5), (10.0, 6), (11.0, 7), (12.0, 8)]
    goodput.price([first, second], commits, 1.0)
    assert first.lost_s == pytest.approx(4.0)
    assert second.lost_s == pytest.approx(0.0)
    never = goodput.Fault(0, "kill stage", "tower", at_s=99.0, step=9)
    goodput.price([never], commits, 1.0)
    assert never.lost_s is None


def test_evenness_compares_steps_with_their_own_window(goodput):
    at_s = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]  # the last step took five seconds instead of one
    leg = goodput.Leg("stormy", list(zip(at_s, range(6), strict=True)))
    assert goodput.evenness([leg], 30.0) == pytest.approx(5 / 9)
    slower = goodput.Leg("stormy", [(100.0 + at, step) for step, at in enumerate((0.0, 2.0, 4.0, 6.0))])
    assert goodput.evenness([slower], 30.0) == 1.0
    assert goodput.evenness([leg, slower], 30.0) == pytest.approx(11 / 15)


@pytest.mark.parametrize(
    "options", [["--minutes", "6", "--calm", "7"], ["--calm", "0"], ["--steps", "9", "--calm", "1"]]
)
def test_a_calm_time_that_cannot_be_is_a_users_mistake(goodput, options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["goodput.py", *options])
    with pytest.raises(SystemExit) as ended:
        goodput.main()
    assert ended.value.code == 2
    assert "--calm" in capsys.readouterr().err


def test_a_report_replaces_the_former_one_whole(goodput, tmp_path):
    bench = SimpleNamespace(samples=samples(goodput, 3, 20), notes=[{"event": "step"}])
    path = tmp_path / "figures.json"
    for steps in (1, 2):
        goodput.write(bench, {"steps": steps}, path)
        found = json.loads(path.read_text(encoding="utf-8"))
        assert found["steps"] == steps
        assert len(found["samples"]) == 2
    with pytest.raises(TypeError):
        goodput.write(bench, {"steps": object()}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == found
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]
