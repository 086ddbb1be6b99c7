"""Processes of several models: started by requests, ended when others need room, and what is said if they can't start.

The processes here are small programs in place of `fusion serve`; `integration/test_cli_several` has the real ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fusionai.client.serving.hosts import ModelHosts, ModelProgram, ModelUnavailable
from harness.gateway_stand import until

PROGRAM = """
import json, os, sys
from pathlib import Path
flags = dict(zip(sys.argv[2::1], sys.argv[3::1]))
name, room = flags["--name"], Path(sys.argv[1])
if name == "wrong":
    print("error: its file is torn.", file=sys.stderr)
    sys.exit(2)
if name != "guest" and room.exists() and room.read_text() != name:
    print("error: no peer is free.", file=sys.stderr)
    sys.exit(1)
if name != "guest":
    room.write_text(name)
print("capturing")
part = Path(flags["--json"] + ".part")
part.write_text(json.dumps({"url": f"http://{name}", "pid": os.getpid()}))
part.rename(flags["--json"])
sys.stdin.read()
room.unlink(missing_ok=True)
"""
"""All but `guest` need the same room; `wrong` can never start."""


@asynccontextmanager
async def hosted(
    directory: Path, *names: str, idle_s: float | None = None
) -> AsyncIterator[tuple[ModelHosts, list[tuple[str, str]]]]:
    said: list[tuple[str, str]] = []
    program = directory / "program.py"
    program.write_text(PROGRAM)
    programs = [ModelProgram(name, (), (str(directory / "room"),)) for name in names]
    command = (sys.executable, str(program))
    say = lambda name, text: said.append((name, text))  # noqa: E731
    async with ModelHosts(programs, directory, say, idle_s=idle_s, command=command) as hosts:
        yield hosts, said


async def used(hosts: ModelHosts, name: str) -> str:
    async with hosts.use(name) as url:
        return url


def test_a_request_starts_its_model_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path, "one", "guest") as (hosts, said):
            assert await asyncio.gather(*(used(hosts, "one") for _ in range(3))) == ["http://one"] * 3
            assert await used(hosts, "guest") == "http://guest"
            assert [*hosts.urls] == ["guest", "one"]
            assert [text for name, text in said if name == "one"] == ["loading", "capturing", "loaded"]
        assert not (tmp_path / "room").exists(), "the processes ended cleanly"

    asyncio.run(scenario())


def test_a_model_makes_room_after_its_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path, "one", "two") as (hosts, said):
            async with hosts.use("one"):
                other = asyncio.create_task(used(hosts, "two"))
                await until(lambda: ("two", "is tried again once there is room") in said)
                late = asyncio.create_task(used(hosts, "one"))
                await asyncio.sleep(0)
                assert hosts.phases == {"one": "ready", "two": "cold"}
            assert await other == "http://two"
            assert await late == "http://one"

    asyncio.run(scenario())


def test_a_model_that_cannot_start_says_why_and_others_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path, "one", "wrong") as (hosts, _):
            await used(hosts, "one")
            with pytest.raises(ModelUnavailable, match=r"'wrong' can't be loaded: its file is torn\."):
                await used(hosts, "wrong")
            assert hosts.phases == {"one": "ready", "wrong": "cold"}

    asyncio.run(scenario())


def test_a_pool_without_room_refuses_the_request(tmp_path: Path) -> None:
    (tmp_path / "room").write_text("a job of somebody else's")

    async def scenario() -> None:
        async with hosted(tmp_path, "one") as (hosts, _):
            with pytest.raises(ModelUnavailable, match=r"no peer is free\."):
                await used(hosts, "one")

    asyncio.run(scenario())


def test_a_process_that_dies_is_started_again_by_the_next_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path, "guest") as (hosts, said):
            await used(hosts, "guest")
            (child,) = hosts._children.values()
            os.kill(child.process.pid, signal.SIGKILL)
            await until(lambda: hosts.phases == {"guest": "cold"})
            assert any("its process has ended" in text for _, text in said)
            assert await used(hosts, "guest") == "http://guest"

    asyncio.run(scenario())


def test_a_request_that_leaves_while_its_model_loads_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path, "guest", idle_s=0.0) as (hosts, said):
            waiting = asyncio.create_task(used(hosts, "guest"))
            await until(lambda: hosts.phases == {"guest": "starting"})
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: ("guest", "unloaded: it was idle") in said)
            await until(lambda: hosts.phases == {"guest": "cold"})

    asyncio.run(scenario())


def test_at_the_end_waiting_requests_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosted(tmp_path, "guest") as (hosts, _):
            waiting = asyncio.create_task(used(hosts, "guest"))
            await until(lambda: hosts.phases == {"guest": "starting"})
        with pytest.raises(ModelUnavailable, match="the gateway stops"):
            await waiting

    asyncio.run(scenario())
