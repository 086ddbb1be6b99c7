"""A command with a lifeline ends when its standard input does; one that would not is broken off some seconds later."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMAND = """
import asyncio, sys
from fusionai.cli import running

running.ORPHAN_S = 0.2

async def service(stop):
    print("up", flush=True)
    await stop.wait()
    print("asked", flush=True)
    if sys.argv[1] == "stubborn":
        await asyncio.Event().wait()
    return "done"

try:
    print(running.run_until_stopped(service, lifeline=sys.argv[2] == "line"))
except KeyboardInterrupt:
    print("given up")
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "said"), [("willing", "asked\ndone\n"), ("stubborn", "asked\ngiven up\n")])
def test_who_started_it_is_gone(kind: str, said: str) -> None:
    with started(kind, "line") as command:
        assert command.stdout is not None
        assert command.stdin is not None
        assert command.stdout.readline() == "up\n"
        command.stdin.write("what comes on the line does not count\n")
        command.stdin.flush()
        command.stdin.close()
        assert command.stdout.read() == said
        assert command.wait(30) == 0


@pytest.mark.slow
def test_without_a_lifeline_the_end_of_input_means_nothing() -> None:
    with started("willing", "none") as command:
        assert command.stdout is not None
        assert command.stdin is not None
        assert command.stdout.readline() == "up\n"
        command.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(0.2)
        command.terminate()
        assert command.stdout.read() == "asked\ndone\n"
        assert command.wait(30) == 0
