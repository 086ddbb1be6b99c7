from __future__ import annotations

import io

from rich.console import Console

from fusionai.dashboard.live import ReplicasView


def shown(*, terminal: bool, width: int = 160) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
    with ReplicasView("homes", 100, console) as view:
        view.machines(0, "anna, [bold]ben[/]")
        view.machines(1, "carl")
        view.step(0, 7, loss=2.5, tokens_per_s=1234.5, step_s=0.5)
        view.step(1, 6, loss=2.25, tokens_per_s=1000.0, step_s=0.6)
        view.exchanged("round 3: 2 replicas agree (1.2 MB)")
        view.state(1, "waits: carl is gone")
        view.note("replica 1: carl was lost")
    return out.getvalue()


def test_elsewhere_everything_is_one_plain_line() -> None:
    lines = shown(terminal=False, width=40).splitlines()
    assert lines == [
        "replica 0: anna, [bold]ben[/]",
        "replica 1: carl",
        "replica 0  step 7/100  loss 2.5000  1,234 tokens/s  500 ms",
        "replica 1  step 6/100  loss 2.2500  1,000 tokens/s  600 ms",
        "round 3: 2 replicas agree (1.2 MB)",
        "replica 1: carl was lost",
    ]


def test_on_a_terminal_each_replica_has_its_line() -> None:
    picture = shown(terminal=True)
    for words in (
        *("homes", "anna, [bold]ben[/]", "carl", "7/100", "2.5000", "1,234", "500 ms", "waits: carl is gone"),
        *("total 1,234 tokens/s", "last exchange: round 3: 2 replicas agree (1.2 MB)", "replica 1: carl was lost"),
    ):
        assert words in picture, words


def test_on_a_narrow_terminal_nothing_is_lost() -> None:
    assert "7/100" in shown(terminal=True, width=60)
