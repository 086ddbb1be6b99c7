"""`fusion demo` small and whole, and given up half-way: it leaves no process behind. (Its full size is `make demo`.)"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from harness.live_pool import Process, fusion, processes_at

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


@pytest.mark.long
@pytest.mark.timeout(1200)  # a whole demo on a busy machine
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to find processes")
def test_what_is_killed_is_recovered_and_nothing_is_lost(tmp_path: Path):
    figures = tmp_path / "demo.json"
    arguments = ("--steps", 5, "--peers", 2, "--spares", 1, "--kill", "2:1", "--kill", "4:broker")
    done = fusion("demo", *arguments, "--directory", tmp_path / "shown", "--json", figures)
    assert done.code == 0, done.err + done.out
    seen = json.loads(figures.read_text())
    assert (seen["schema"], seen["ok"], seen["lost_steps"], seen["max_abs_loss_diff"]) == (
        "fusionai.demo/1",
        True,
        0,
        0,
    )
    assert seen["losses"] == seen["losses_reference"]
    stage, broker = seen["kills"]
    assert (stage["step"], stage["stage"], stage["exact"]) == (2, 1, True)
    assert 0 < stage["detected_s"] < stage["recovered_s"]
    assert stage["takeover"] not in (None, stage["peer"])
    assert (broker["step"], broker["stage"], broker["recovered_s"] > 0) == (4, "broker", True)
    for words in ("step 2: SIGKILL for", "was killed (stage 1); "):
        assert words in done.out, done.out
    # Whether the snapshot of step 1 was whole when its stage died is the machine's pace.
    assert re.search(r" takes over from its snapshot of step (1;|0, with 1 step recomputed;)", done.out), done.out
    assert "the broker is restarted" in done.out
    assert "was killed" not in done.err
    report = Path(seen["report"]).read_text(encoding="utf-8")
    assert "bit for bit, through 2 faults" in report
    assert not processes_at(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to find processes")
def test_two_pipelines_serve_and_the_answers_of_a_killed_machine_go_on_with_the_same_tokens(tmp_path: Path):
    figures = tmp_path / "demo.json"
    done = fusion("demo", "--serve", "--directory", tmp_path / "shown", "--json", figures)
    assert done.code == 0, done.err + done.out
    seen = json.loads(figures.read_text())
    assert seen["ok"]
    assert seen["moved"] > 0
    assert sorted(map(len, seen["machines"].values())) == [1, 2]
    assert len(seen["answers"]) == 8
    assert all(answer["is_equal"] and len(answer["tokens"]) > 100 for answer in seen["answers"])
    assert "Everything agrees" in done.out
    assert not processes_at(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to find processes")
@pytest.mark.parametrize(
    ("interrupts", "what"), [(1, ("--steps", 5, "--peers", 2, "--spares", 0)), (2, ("--steps", 5)), (1, ("--serve",))]
)
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, interrupts: int, what: tuple[object, ...]):
    # An interpreter of its own, which starts others: those that tests fork are not found by their commands.
    demo = Process("demo", *what, "--directory", tmp_path / "shown", program=("-m", "fusionai"))
    demo.wait_for("starting a broker")
    demo.interrupt()
    demo.wait_for("Stopping")
    if interrupts == 2:
        demo.interrupt()
    # The second may come when everything has ended: then there is nothing left to give up.
    assert demo.ended() in {1: {1}, 2: {1, 130}}[interrupts], demo.text
    assert "Traceback" not in demo.text
    assert not processes_at(tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--peers", "99"), "--peers is 99"),
        (("--peers", "0"), "--peers is 0"),
        (("--spares", "-1"), "--spares is -1"),
        (("--steps", "0"), "--steps is 0"),
        (("--directory", "/dev/null/x"), "can't be created"),
        (("--kill", "7"), "expected STEP:STAGE, such as 7:2 or 7:broker, got '7'"),
        (("--kill", "51:0"), "--kill 51:0: steps are numbered from 1 to 50"),
        (("--kill", "0:0"), "--kill 0:0: steps are numbered from 1 to 50"),
        (("--kill", "7:4"), "--kill 7:4: stages are numbered from 0 to 3"),
        (("--kill", "7:1", "--kill", "none"), "--kill none stands alone"),
        (("--kill", "7:1", "--kill", "7:1"), "given twice"),
    ],
)
def test_what_can_not_be_shown(tmp_path: Path, more: tuple[str, ...], said: str):
    done = fusion("demo", "--directory", tmp_path / "shown", *more)
    assert (done.code, said in done.err) == (2, True), done.err
    assert not (tmp_path / "shown").exists()
