from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from fusionai.dashboard.live import FaultLine, TrainingView
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import Problem
from fusionai.wire.messages import CommitRecord, Fence, Span


def show_step(shown: TrainingView, step: int, loss: float) -> None:
    """A step of two seconds, of which the stages computed 1.75, 1 and 0."""
    record = CommitRecord(
        step=step - 1, scale=1.0, learning_rate=3e-4, total_norm=0.75, norms_hash="h", fence=Fence(1, 1, 1), loss=loss
    )
    spans = {0: (Span("forward", 0, 5.0, 6.0), Span("backward", 0, 6.5, 7.25)), 1: (Span("forward", 0, 5.0, 6.0),)}
    shown.step(record, step_s=2.0, tokens_per_s=1234.5, spans=spans)


def view(problem: Problem, *, terminal: bool, width: int = 120) -> tuple[TrainingView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
    return TrainingView("run-00000000", 10, plan(problem), pool=problem.peers, console=console), out


def test_elsewhere_each_step_is_one_plain_line(problem: Problem) -> None:
    shown, out = view(problem, terminal=False, width=40)
    before = out.getvalue().count("\n")
    with shown:
        show_step(shown, 1, 3.0)
        shown.note("[bold]a spare[/] took over")
    first, second = out.getvalue().splitlines()[before:]
    assert first.startswith("step 1/10  loss 3.000000  1,234 tokens/s  lr 0.0003  grad norm 0.75  2 s per step")
    assert first.endswith("ETA 18 s")
    assert second == "[bold]a spare[/] took over"
    assert out.getvalue().isascii()


def test_plain_lines_begin_with_the_plan(problem: Problem) -> None:
    _, out = view(problem, terminal=False)
    head, *stages = out.getvalue().splitlines()
    assert "2 peers, 1 spare" in head
    assert len(stages) == 3
    assert "machine" in stages[0]
    assert "(loss)" in stages[2]


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_shows_stages_progress_and_loss(problem: Problem, width: int) -> None:
    shown, out = view(problem, terminal=True, width=width)
    show_step(shown, 1, 3.0)
    show_step(shown, 5, 2.5)
    shown.note("a spare took over")
    shown.close()
    shown.close()
    last = out.getvalue()[out.getvalue().rindex("╭") :]
    for expected in (
        "run-00000000",
        "machine",
        "88%",
        "50%",
        "step 5/10",
        "2.5000",
        "ETA 10 s",
    ):
        assert expected in last
    assert "a spare took over" in last
    assert max(len(line) for line in last.splitlines() if line.startswith("│")) <= width


def test_names_are_not_markup(problem: Problem) -> None:
    named = tuple(msgspec.structs.replace(p, name="[red]x[/]") for p in problem.peers)
    shown, out = view(msgspec.structs.replace(problem, peers=named), terminal=True)
    shown.close()
    assert "[red]x[/]" in out.getvalue()


def test_a_new_plan_is_shown(problem: Problem) -> None:
    shown, out = view(problem, terminal=False)
    shown.plan_changed(msgspec.structs.replace(plan(problem), version=2), "a better one")
    assert "new plan (a better one): plan 2, " in out.getvalue()


def test_a_log_has_what_is_new_of_a_fault_and_each_step_done_again(problem: Problem) -> None:
    shown, out = view(problem, terminal=False)
    before = out.getvalue().count("\n")
    shown.faults([FaultLine(text="a is lost", over=False)], ["a is lost"])
    shown.replayed(3)
    shown.faults([FaultLine(text="a is lost; b takes over", over=True)], ["a is lost; b takes over"])
    said = out.getvalue().splitlines()[before:]
    assert said == ["a is lost", "step 3/10  recomputed from the journal", "a is lost; b takes over"]


def test_a_terminal_shows_the_time_line_of_faults(problem: Problem) -> None:
    shown, out = view(problem, terminal=True)
    show_step(shown, 4, 3.0)
    shown.replayed(3)
    many = [FaultLine(text=f"fault {number}", over=number != 9) for number in range(1, 10)]
    shown.faults(many, ["fault 9"])
    shown.close()
    last = out.getvalue()[out.getvalue().rindex("╭") :]
    assert "✗ fault 9" in last
    assert "✓ fault 8" in last
    assert "fault 3" not in last
    assert "recomputing step 3" in last


def test_the_next_step_ends_a_replay(problem: Problem) -> None:
    shown, out = view(problem, terminal=True)
    show_step(shown, 4, 3.0)
    shown.replayed(3)
    show_step(shown, 5, 3.0)
    shown.close()
    assert "recomputing" not in out.getvalue()[out.getvalue().rindex("╭") :]
