"""The recovery benchmark reads what the systems say as it is meant."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PLACE = Path(__file__).resolve().parents[3] / "benchmarks" / "recovery.py"


@pytest.fixture(scope="module")
def recovery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recovery_benchmark", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DEMO = {
    "losses": [3.0, 2.0, 1.0],
    "losses_reference": [3.0, 2.0, 1.0],
    "max_abs_loss_diff": 0.0,
    "lost_steps": 0,
    "ok": True,
    "kills": [
        {"step": 1, "stage": 2, "detected_s": 0.01, "recovered_s": 0.75},
        {"step": 2, "stage": "broker", "detected_s": 0.5, "recovered_s": 2.5},
    ],
}


def test_the_demo_says_when_it_noticed_and_when_it_went_on(recovery: ModuleType):
    read = recovery.read_demo(DEMO)
    (run,) = read["runs"]
    assert (run["step"], run["detected_s"], run["recovered_s"]) == (1, 0.01, 0.75)
    assert run["losses_equal"]
    assert run["first_different_step"] is None
    assert run["losses_compared"] == 3
    assert read["lost_steps"] == 0
    assert [kill["recovered_s"] for kill in read["broker_kills"]] == [2.5]


def test_a_demo_that_differs_is_said_to(recovery: ModuleType):
    (run,) = recovery.read_demo({**DEMO, "losses": [3.0, 2.5, 1.0], "max_abs_loss_diff": 0.5})["runs"]
    assert not run["losses_equal"]
    assert run["first_different_step"] == 1


def test_a_build_that_can_not_kill_leaves_its_column_out_with_the_reason(
    recovery: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Refused:
        returncode = 2

        def __init__(self, command: list[str], **options: object) -> None:
            assert command[-2:] == ["--json", str(tmp_path / "demo.json")]
            assert [command[place + 1] for place, word in enumerate(command) if word == "--kill"] == ["15:1", "30:2"]
            (tmp_path / "demo.log").write_text(
                "Usage: ...\nError: No such option '--kill'.\nRead the help.\n", encoding="utf-8"
            )

        def wait(self, patience_s: float) -> int:
            return self.returncode

    monkeypatch.setattr(recovery.subprocess, "Popen", Refused)
    with pytest.raises(recovery.RivalMissing, match=r"ended with code 2: Error: No such option '--kill'"):
        recovery.fusionai(tmp_path, 2)


def test_torchft_that_is_not_installed_is_left_out_with_the_reason(recovery: ModuleType, tmp_path: Path):
    with pytest.raises(recovery.RivalMissing, match="nowhere"):
        recovery.Torchft(str(tmp_path / "nowhere"), 2).check()


def test_curves_are_compared_bit_for_bit_and_a_missing_step_is_not_equal(recovery: ModuleType):
    plain = {0: 1.0, 1: 0.5, 2: 0.25}
    same = {"losses_compared": 3, "losses_equal": True, "first_different_step": None}
    assert recovery.compare(plain, dict(plain)) == same
    other = recovery.compare(plain, {**plain, 2: 0.25000000000000006})
    assert (other["losses_equal"], other["first_different_step"]) == (False, 2)
    assert not recovery.compare(plain, {0: 1.0, 1: 0.5})["losses_equal"]


def test_losses_are_those_of_what_counted(recovery: ModuleType):
    events = [
        {"event": "attempt", "step": 0, "loss": 3.0, "committed": False},
        {"event": "attempt", "step": 0, "loss": 2.0, "committed": True},
        {"event": "step", "step": 1, "loss": 1.0},
        {"event": "step", "step": 2},
    ]
    assert recovery.losses(events) == {0: 2.0, 1: 1.0}


def test_kills_are_spread_over_the_step(recovery: ModuleType):
    assert recovery.fractions(4) == [0.125, 0.375, 0.625, 0.875]


def test_what_hangs_and_what_ends_is_told(recovery: ModuleType):
    systems = {
        "torch pipelining": {
            "unsupervised": [
                {
                    "victim": 1,
                    "watched_s": 30.0,
                    "others": {
                        "rank 0": {"ended_after_s": 0.1, "error": "gone"},
                        "rank 2": {"ended_after_s": None, "error": None},
                    },
                }
            ]
        },
        "torchft": {"own_wrapper": [{"survived": False, "last_words": ["AssertionError"]}]},
    }
    wrapper, pipeline = recovery.footnotes(systems)
    assert "survivor ended: AssertionError" in wrapper
    assert "rank 1 killed: 1 of 2 ranks ended with an error within 0.10 s, 1 hung for 30 s" in pipeline
