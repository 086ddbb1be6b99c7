"""The desk over a running broker in this process: what it shows, and that its actions are the owner's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fusionai.broker.server import BrokerOptions, BrokerServer, run_broker
from fusionai.cli.page.actions import EvictMachine, MakeCode, MakeInvitation, StopPoolJob
from fusionai.cli.page.desk import BrokerDesk
from fusionai.primitives.errors import RefusedError, UsageError
from fusionai.transport.enrolment import enrol, parse_invitation


@pytest.fixture(autouse=True)
def nothing_to_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)


def with_desk(home: Path, scenario: Callable[[BrokerDesk], Awaitable[None]]) -> None:
    async def main() -> None:
        stop, running = asyncio.Event(), asyncio.get_running_loop().create_future()

        def opened(server: BrokerServer) -> None:
            running.set_result(server)

        options = BrokerOptions(home=home, host="127.0.0.1", port=0, pool="friends")
        broker = asyncio.create_task(run_broker(options, announce=lambda _: None, stop=stop, opened=opened))
        try:
            await scenario(BrokerDesk(await running, home, lambda: 1000.0))
        finally:
            stop.set()
            await broker

    asyncio.run(main())


def test_its_actions_are_the_owners(tmp_path: Path):
    async def scenario(desk: BrokerDesk) -> None:
        made = await desk.act(MakeInvitation(uses=2))
        invitation = parse_invitation(made.command.removeprefix("fusion join "))
        assert invitation.pool == "friends"
        assert {character for row in made.qr for character in row} == {"0", "1"}
        joined = await enrol(made.command.removeprefix("fusion join "), tmp_path / "member", "provider")
        code = await desk.act(MakeCode())
        assert len(code.code) == 6
        assert "no machine can find it" in code.text  # loopback is not announced
        evicted = await desk.act(EvictMachine(peer=joined.peer))
        assert evicted.text.startswith("Evicted: ")

    with_desk(tmp_path / "broker", scenario)


def test_what_the_broker_refuses_is_an_error(tmp_path: Path):
    async def scenario(desk: BrokerDesk) -> None:
        with pytest.raises(RefusedError):
            await desk.act(StopPoolJob(job="none"))
        with pytest.raises(UsageError, match=r"no job 'none'"):
            desk.log("none")

    with_desk(tmp_path / "broker", scenario)


def test_an_empty_pool_is_shown_with_what_was_said(tmp_path: Path):
    async def scenario(desk: BrokerDesk) -> None:
        desk.notice("attic has left; 0 machines are here.")
        shown = desk.overview()
        assert (shown.pool, shown.machines, shown.jobs, shown.links) == ("friends", (), (), ())
        assert [(one.at_s, one.text) for one in shown.notices] == [(1000.0, "attic has left; 0 machines are here.")]

    with_desk(tmp_path / "broker", scenario)
