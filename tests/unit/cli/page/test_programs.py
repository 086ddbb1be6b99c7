"""Commands started from the page: their state, logs and end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from fusionai.cli.page import programs as module
from fusionai.cli.page.programs import MOST_RUNNING, PagePrograms, tail
from fusionai.cli.service.supervisor import Service
from fusionai.primitives.errors import UsageError
from harness.gateway_stand import until

LASTS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
print("begun", flush=True)
signal.pause()
print("checkpoint")
sys.exit(130)
"""


def played(monkeypatch: pytest.MonkeyPatch, script: str) -> list[tuple[str, ...]]:
    """Replace `fusion` by a script; return the arguments it got."""
    asked: list[tuple[str, ...]] = []

    async def start(service: Service) -> asyncio.subprocess.Process:
        asked.append(service.arguments)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    monkeypatch.setattr(module, "start_command", start)
    return asked


def test_a_program_lasts_until_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = played(monkeypatch, LASTS)

    async def scenario() -> None:
        programs = PagePrograms(tmp_path)
        program = programs.start("train", "poems", ("train", "recipe.toml"))
        await until(lambda: programs.rows()[0].last == "begun")
        assert programs.running("train", "poems")
        assert programs.rows()[0].state == "running"
        with pytest.raises(UsageError, match=r"runs already"):
            programs.start("train", "poems", ("train", "recipe.toml"))
        programs.end(program.number)
        await until(lambda: programs.rows()[0].state == "ended")
        row = programs.rows()[0]
        assert (row.exit_code, row.command) == (130, "fusion train recipe.toml")
        assert [line[20:] for line in programs.lines(program.number)][1:3] == ["begun", "checkpoint"]
        with pytest.raises(UsageError, match=r"does not run"):
            programs.end(program.number)
        with pytest.raises(UsageError, match=r"no program 9"):
            programs.lines(9)

    asyncio.run(scenario())
    assert asked == [("train", "recipe.toml")]


def test_all_programs_end_with_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    played(monkeypatch, LASTS)

    async def scenario() -> None:
        programs = PagePrograms(tmp_path)
        for number in range(MOST_RUNNING):
            programs.start("train", f"job-{number}", ("train",))
        with pytest.raises(UsageError, match=r"limit of the page"):
            programs.start("train", "one-more", ("train",))
        await until(lambda: all(row.last == "begun" for row in programs.rows()))
        await programs.close()
        assert {row.exit_code for row in programs.rows()} == {130}

    asyncio.run(scenario())


def test_a_served_model_has_an_address_once_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = played(monkeypatch, LASTS)

    def ready() -> None:
        figures = '{"schema": "fusionai.serve/1", "url": "http://127.0.0.1:8123", "model": "chatty"}'
        Path(asked[0][-1]).write_text(figures)

    async def scenario() -> None:
        programs = PagePrograms(tmp_path)
        programs.start("serve", "chatty", ("serve", "owner/chatty"))
        await until(lambda: bool(asked))
        assert asked[0][-2] == "--json"
        assert programs.rows()[0].url == ""
        ready()
        assert programs.rows()[0].url == "http://127.0.0.1:8123"
        await programs.close()
        assert programs.rows()[0].url == ""

    asyncio.run(scenario())


def test_a_command_that_only_answers(tmp_path: Path):
    async def scenario() -> None:
        programs = PagePrograms(tmp_path / "page")
        assert "complete" in await programs.once(("completion", "bash"))
        with pytest.raises(UsageError, match=r"No such command"):
            await programs.once(("nothing",))

    asyncio.run(scenario())


def test_the_end_of_a_log(tmp_path: Path):
    assert tail(tmp_path / "none", 3) == ()
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(1000)))
    assert tail(tmp_path / "log", 2) == ("line 998", "line 999")
