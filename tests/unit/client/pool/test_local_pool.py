"""Real processes on loopback: killed, started again, the same ones as before; all gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusionai.client.pool import local_pool
from fusionai.client.pool.local_pool import BROKER, LocalPeer, LocalPool
from fusionai.client.pool.session import PoolSession
from fusionai.primitives.errors import FusionError
from fusionai.transport.enrolment import load_membership
from harness.patience import CEILING_S
from harness.zygote import forking

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="asks the system for processes by number"),
]


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def states(pool: LocalPool) -> dict[str, str]:
    async with PoolSession(load_membership(pool.broker_home), trust=None) as session:
        return {member.view.peer: member.view.state for member in await session.pool()}


def test_a_killed_peer_and_a_killed_broker_are_who_they_were(tmp_path: Path) -> None:
    async def story() -> None:
        async with LocalPool(tmp_path, [LocalPeer("laptop")]) as pool:
            (peer,) = pool.names
            invitation, pids = pool.invitation, {name: pool.pid(name) for name in ("laptop", BROKER)}
            with pytest.raises(FusionError, match="still running"):
                await pool.start_again("laptop")
            with pytest.raises(FusionError, match="expected a process of broker, laptop, got 'desktop'"):
                await pool.kill("desktop")

            await pool.kill("laptop")
            assert not runs(pids["laptop"])
            assert not pool.lives("laptop")
            with pytest.raises(FusionError, match="already ended"):
                await pool.kill("laptop")
            await pool.start_again("laptop")
            assert pool.lives("laptop")
            assert pool.names == {peer: "laptop"}
            assert await states(pool) == {peer: "idle"}

            await pool.kill(BROKER)
            assert not runs(pids[BROKER])
            await pool.start_again(BROKER)
            # The membership kept before has the address: the port is the old one.
            assert peer in await states(pool)
            assert pool.invitation == invitation
            now = {name: pool.pid(name) for name in pids}
            assert not set(now.values()) & set(pids.values())
        assert not any(runs(pid) for pid in now.values())

    with forking():
        asyncio.run(story())


def test_a_peer_that_somebody_else_kills_comes_back(tmp_path: Path) -> None:
    said: list[str] = []

    async def story() -> None:
        back = asyncio.Event()

        def say(text: str) -> None:
            said.append(text)
            if text == "laptop is running again":
                back.set()

        async with LocalPool(tmp_path, [LocalPeer("laptop")], say=say) as pool:
            first = pool.pid("laptop")
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(CEILING_S):
                await back.wait()
            assert pool.pid("laptop") != first
            assert list(pool.names.values()) == ["laptop"]
            assert set((await states(pool)).values()) == {"idle"}
            last = pool.pid("laptop")
        assert not runs(last)

    asyncio.run(story())
    assert said == ["laptop was killed (signal 9); it is restarted in 1 s", "laptop is running again"]


def test_a_process_that_could_not_even_log_is_explained_by_the_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "broker.log"
    log.write_text("")
    assert local_pool._last_line(log) == "it printed nothing"
    monkeypatch.setattr("fusionai.client.pool.local_pool.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    assert local_pool._last_line(log) == f"the disk of {tmp_path} is full"
    log.write_text("error: no such model\n")
    assert local_pool._last_line(log) == "error: no such model"
