"""The desk over a running broker in this process: what it shows, and that its actions are the owner's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import msgspec
import pytest

from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import BrokerServer, run_broker
from fusionai.cli.main import main
from fusionai.cli.page.actions import (
    ApproveMachine,
    EvictMachine,
    MakeCode,
    MakeInvitation,
    PlanTraining,
    ServeModel,
    ServeTrained,
    StartTraining,
    StopPoolJob,
)
from fusionai.cli.page.desk import BrokerDesk
from fusionai.cli.page.programs import PagePrograms
from fusionai.cli.page.training import TrainingForm
from fusionai.primitives.errors import RefusedError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.enrolment import enrol, parse_invitation
from fusionai.transport.interface import Remote
from fusionai.transport.security.trust import TRUST_FILE
from fusionai.wire import messages as wire


@pytest.fixture(autouse=True)
def nothing_to_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusionai.broker.server.set_aside_what_stays", lambda: None)


def with_desk(
    home: Path,
    scenario: Callable[[BrokerDesk], Awaitable[None]],
    *,
    trust_file: Path | None = None,
    seen: Callable[[BrokerServer], None] = lambda _: None,
) -> None:
    async def run() -> None:
        stop, running = asyncio.Event(), asyncio.get_running_loop().create_future()

        def opened(server: BrokerServer) -> None:
            running.set_result(server)
            seen(server)

        options = BrokerOptions(home=home, host="127.0.0.1", port=0, pool="friends", trust_file=trust_file)
        broker = asyncio.create_task(run_broker(options, announce=lambda _: None, stop=stop, opened=opened))
        try:
            programs = PagePrograms(home / "page")
            approves = trust_file == home / TRUST_FILE
            await scenario(BrokerDesk(await running, home, programs, approves=approves, wall_s=lambda: 1000.0))
        finally:
            stop.set()
            await broker

    asyncio.run(run())


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


def registers(server: BrokerServer, peer: PeerId) -> wire.Message | None:
    """The broker's answer to a machine without endorsements that asks to lend itself."""
    profile = PeerProfile(peer=peer, name="newcomer", flops_per_s=1e9, memory_bytes=10**9)
    message = wire.Register(boot=1, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=())
    return server.service.receive(Remote(peer, "member"), 99, message).answer


@pytest.mark.parametrize("own", [True, False])
def test_a_refused_machine_is_shown_and_can_be_approved(own: bool, tmp_path: Path):
    home = tmp_path / "broker"
    assert main(["trust", "key", "--home", str(home if own else tmp_path / "other")]) == 0
    servers: list[BrokerServer] = []

    async def scenario(desk: BrokerDesk) -> None:
        made = await desk.act(MakeInvitation())
        joined = (await enrol(made.command.removeprefix("fusion join "), tmp_path / "member", "provider")).peer
        answer = registers(servers[0], joined)
        assert isinstance(answer, wire.Refused)
        shown = desk.overview()
        assert [(one.peer, one.name) for one in shown.refused] == [(joined, "newcomer")]
        assert shown.approves is own
        if not own:
            with pytest.raises(UsageError, match=r"waits for approval"):
                await desk.act(ApproveMachine(peer=joined))
            return
        with pytest.raises(UsageError, match=r"waits for approval"):
            await desk.act(ApproveMachine(peer="a" * 52))
        assert "Approved: newcomer" in (await desk.act(ApproveMachine(peer=joined))).text
        assert isinstance(registers(servers[0], joined), wire.Registered)
        assert desk.overview().refused == ()
        assert [one.name for one in desk.overview().machines] == ["newcomer"]

    trust_file = (home if own else tmp_path / "other") / TRUST_FILE
    with_desk(home, scenario, trust_file=trust_file, seen=servers.append)


FIGURES: Final = {
    "task": "train",
    "stages": [
        {
            "peer": "attic",
            "replica": 0,
            "blocks": [0, 4],
            "roles": ["stage"],
            "compute_s": 0.1,
            "send_s": 0.0,
            "memory_bytes": 5,
            "memory_limit_bytes": 9,
        }
    ],
    "tokens_per_s": 256.0,
    "step_time_s": 1.0,
    "bottleneck": "compute of stage 0",
    "spares": [],
    "standbys": [],
}


def test_what_is_planned_is_what_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "text.txt"
    text.write_text("words\n")
    home = tmp_path / "broker"
    asked: list[tuple[str, ...]] = []

    def planned(arguments: tuple[str, ...]) -> None:
        asked.append(arguments)
        Path(arguments[-1]).write_text(json.dumps(FIGURES))

    async def once(programs: PagePrograms, arguments: tuple[str, ...]) -> str:
        planned(arguments)
        return "Fits: 1 machine can train it.\n\nmore"

    def start(programs: PagePrograms, kind: str, title: str, arguments: tuple[str, ...]) -> SimpleNamespace:
        asked.append(arguments)
        return SimpleNamespace(title=title)

    monkeypatch.setattr(PagePrograms, "once", once)
    monkeypatch.setattr(PagePrograms, "start", start)

    async def scenario(desk: BrokerDesk) -> None:
        form = TrainingForm(name="poems", model="new-small", files=str(text), steps=20)
        shown = await desk.act(PlanTraining(form=form))
        assert shown.verdict == ("Fits: 1 machine can train it.",)
        assert shown.plan is not None
        assert [stage.name for stage in shown.plan.stages] == ["attic"]
        recipe = home / "page" / "poems" / "recipe.toml"
        assert recipe.read_text() == shown.recipe
        await desk.act(StartTraining(name="poems"))
        (recipe.parent / "run" / "checkpoints" / "step-20").mkdir(parents=True)
        assert [(row.name, row.has_checkpoint) for row in desk.overview().recipes] == [("poems", True)]
        await desk.act(ServeTrained(name="poems"))
        await desk.act(ServeModel(model="owner/name"))
        assert [words[0] for words in asked] == ["plan", "train", "serve", "serve"]
        assert asked[1] == ("train", str(recipe), "--home", str(home))
        assert asked[2][:4] == ("serve", str(recipe.parent / "run"), "--name", "poems")
        with pytest.raises(UsageError, match=r"no recipe"):
            await desk.act(StartTraining(name="unknown"))
        with pytest.raises(UsageError, match=r"no name of a job"):
            await desk.act(StartTraining(name="../../etc"))
        with pytest.raises(UsageError, match=r"is no model"):
            await desk.act(ServeModel(model="--home"))

    with_desk(home, scenario)
    assert len(asked) == 4


def test_an_empty_pool_is_shown_with_what_was_said(tmp_path: Path):
    async def scenario(desk: BrokerDesk) -> None:
        desk.notice("attic has left; 0 machines are here.")
        shown = desk.overview()
        assert (shown.pool, shown.machines, shown.jobs, shown.links) == ("friends", (), (), ())
        assert [(one.at_s, one.text) for one in shown.notices] == [(1000.0, "attic has left; 0 machines are here.")]

    with_desk(tmp_path / "broker", scenario)
