"""Tables for people and for pipes."""

from __future__ import annotations

import click
import pytest

from fusionai.cli import console


def test_a_piped_table_is_aligned_and_whole(capsys: pytest.CaptureFixture[str]):
    console.table(("name", "steps"), [("a" * 60, "7"), ("b", "12345")], title="jobs", right=(1,))
    assert capsys.readouterr().out.splitlines() == [
        "jobs",
        "name" + " " * 56 + "  steps",
        "a" * 60 + "      7",
        "b" + " " * 59 + "  12345",
    ]


def test_cells_from_other_machines_are_made_harmless(capsys: pytest.CaptureFixture[str]):
    console.table(("name",), [("\x1b]0;title\x07[bold]x[/bold]\n",)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]x[/bold]" in out


def test_a_framed_table_shows_markup_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    console.table(("name",), [("[red]x[/red]",)])
    assert "[red]x[/red]" in capsys.readouterr().out


@pytest.mark.parametrize(("width", "left_out"), [(160, ""), (80, "links, speed"), (50, "device, links, speed")])
def test_a_narrow_terminal_leaves_columns_out_and_breaks_no_word(
    width: int, left_out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    headers = ("peer", "name", "device", "links", "speed", "state")
    row = ("wabunrbr", "gaming-tower", "NVIDIA GeForce RTX 3080", "2 direct, 1 relay", "29800 GFLOP/s", "standing by")
    console.table(headers, [row], title="Pool", spare=("speed", "links", "device"))
    out = click.unstyle(capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= width
    gone = {name for name in left_out.split(", ") if name}
    assert all(cell in out for header, cell in zip(headers, row, strict=True) if header not in gone)
    assert (f"A wider terminal also shows: {left_out}." in out) == bool(left_out)


def test_a_terminal_too_narrow_for_the_words_of_a_table_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "35")
    console.table(
        ("level", "network", "curious peer"), [("split-k", "holds", "reconstructs"), ("open", "holds", "reads")]
    )
    assert capsys.readouterr().out.splitlines()[:5] == [
        "",
        "level: split-k",
        "  network: holds",
        "  curious peer: reconstructs",
        "",
    ]
    monkeypatch.setenv("COLUMNS", "36")
    console.table(("level", "network", "curious peer"), [("split-k", "holds", "reconstructs")])
    out = click.unstyle(capsys.readouterr().out)
    assert "reconstructs" in out
    assert max(map(len, out.splitlines())) <= 36


def test_a_terminal_breaks_lines_between_words_and_commands_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said = "- pool: To join a pool: `fusion join INVITE --name tower`; to open one: `fusion broker`."
    command = "fusion train recipe.toml --home pool --json figures.json"
    console.line(said)
    assert capsys.readouterr().out == said + "\n", "nothing is broken for a pipe"
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    console.line(said)
    console.line(command)
    console.line("serve it: fusion serve /a/directory/of/a/job/checkpoints/step-00000012")
    console.note(said)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "- pool: To join a pool:",
        "  `fusion join INVITE --name tower`; to",
        "  open one: `fusion broker`.",
        command,
        "serve it:",
        "fusion serve /a/directory/of/a/job/checkpoints/step-00000012",
    ]
    assert shown.err.splitlines() == shown.out.splitlines()[:3]
