"""A machine is lent by one process: a second one with the same home is refused before it touches the first place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fusionai.peer.daemon import LOCK, run_peer
from fusionai.peer.lending import PeerOptions
from fusionai.primitives.errors import UsageError
from fusionai.storage.atomic import JobLock


def test_a_second_process_with_the_home_is_refused(tmp_path: Path) -> None:
    async def second() -> None:
        await run_peer(PeerOptions(home=tmp_path), announce=lambda _: None, stop=asyncio.Event())

    with (
        JobLock(tmp_path / LOCK),
        pytest.raises(UsageError, match=rf"lent already: process {os.getpid()} runs `fusion join` with the home"),
    ):
        asyncio.run(second())
    with pytest.raises(UsageError, match="has not joined a pool"):
        asyncio.run(second())
