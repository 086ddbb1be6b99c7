"""A shell completes commands, their flags, and commands of groups."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fusionai.cli.main import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_are_ones_that_the_shell_reads(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    captured = capsys.readouterr()
    assert f"_FUSION_COMPLETE={shell}_complete" in captured.out
    assert f"fusion completion {shell} >" in captured.err
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=captured.out, text=True, check=True)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("fusion ser", {"serve", "service"}),
        ("fusion join --max", {"--max-memory"}),
        ("fusion service st", {"start", "status", "stop"}),
        ("fusion join --backend t", {"torch"}),
    ],
)
def test_what_was_begun_is_completed(
    typed: str, found: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FUSION_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert main([]) == 0
    assert {line.partition(",")[2] for line in capsys.readouterr().out.splitlines()} == found


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
