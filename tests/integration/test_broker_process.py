"""A real broker process over TCP on loopback: who gets in, what survives `kill -9`, how it starts and ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from fusionai.primitives.environment import inherited
from fusionai.primitives.errors import ChannelClosed, RefusedError, TransportError, TrustError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import Membership, enrol, format_invitation, load_membership, parse_invitation
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import MemberCredentials, StrangerCredentials, load_authority
from fusionai.transport.security.identity import load_identity
from fusionai.wire.messages import (
    Heartbeat,
    HeartbeatAck,
    Invited,
    InviteRequest,
    JobGranted,
    JobList,
    JobQuery,
    JobReport,
    JobRequest,
    JobStop,
    Message,
    PoolQuery,
    PoolView,
    Register,
    Registered,
    StopNotice,
)
from harness.patience import CEILING_S

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, json, signal, sys
from pathlib import Path
from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import run_broker
from fusionai.primitives.errors import FusionError
from fusionai.cli.running import run

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    home, port, uses, lifetime_s = sys.argv[1:]
    options = BrokerOptions(
        home=Path(home), pool="home", host="127.0.0.1", port=int(port), invitation_uses=int(uses),
        invitation_lifetime_s=float(lifetime_s), invites=True,
    )
    announce = lambda a: print(json.dumps({"address": a.addresses[0], "invitation": a.invitation}), flush=True)
    await run_broker(options, announce=announce, stop=stop)

try:
    run(main())
except FusionError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class Announced(msgspec.Struct):
    address: str
    invitation: str


@dataclass
class Broker:
    process: asyncio.subprocess.Process
    announced: Announced

    @property
    def port(self) -> int:
        return int(self.announced.address.rpartition(":")[2])

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


async def spawn(home: Path, *, port: int = 0, uses: int = 10, lifetime_s: float = 600.0) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, str(home), str(port), str(uses), str(lifetime_s)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=inherited(),
    )


@asynccontextmanager
async def broker(home: Path, *, port: int = 0, uses: int = 10, lifetime_s: float = 600.0) -> AsyncIterator[Broker]:
    process = await spawn(home, port=port, uses=uses, lifetime_s=lifetime_s)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = await process.stdout.readline()
        assert line, (await process.stderr.read()).decode()
        yield Broker(process, msgspec.json.decode(line, type=Announced))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def conversation(membership: Membership, notices: list[Message] | None = None) -> AsyncIterator[Conversation]:
    channel = await TcpTransport(membership.credentials).dial(membership.broker.known, expect=None, stream="control")
    heard = [] if notices is None else notices
    talk = Conversation(channel, notices=(StopNotice,), on_notice=heard.append)
    try:
        yield talk
    finally:
        await talk.close()


def registration(membership: Membership, boot: int = 1) -> Register:
    profile = PeerProfile(peer=membership.peer, flops_per_s=1e9, memory_bytes=10**9)
    return Register(boot=boot, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=("tcp://127.0.0.1:9",))


def request(owner: PeerId, *peers: PeerId, job: str = "job-1") -> JobRequest:
    plan = Plan(
        graph_hash="g",
        stages=tuple(StagePlacement(stage=n, peer=peer, blocks=(n, n + 1)) for n, peer in enumerate(peers)),
        feed=owner,
        microbatches=1,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="test", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )
    return JobRequest(job=job, title="t", plan=msgspec.Raw(msgspec.msgpack.encode(plan)), steps=10)


def test_acknowledged_transitions_survive_kill_9(tmp_path: Path):
    async def main() -> None:
        home = tmp_path / "broker"
        async with broker(home) as first:
            port = first.port
            owner = await enrol(first.announced.invitation, tmp_path / "owner", "owner")
            a = await enrol(first.announced.invitation, tmp_path / "a", "provider")
            b = await enrol(first.announced.invitation, tmp_path / "b", "provider")
            async with conversation(a) as talk_a, conversation(b) as talk_b, conversation(owner) as talk_owner:
                assert isinstance(await talk_a.ask(registration(a)), Registered)
                assert isinstance(await talk_b.ask(registration(b)), Registered)
                granted = await talk_owner.ask(request(owner.peer, a.peer))
                assert isinstance(granted, JobGranted)
                await talk_owner.ask(JobReport(job="job-1", state="running", step=2))
                await first.kill()
                with pytest.raises(ChannelClosed):
                    await talk_a.ask(Heartbeat(boot=1))
        async with broker(home, port=port):
            notices: list[Message] = []
            async with conversation(a) as talk_a, conversation(owner, notices) as talk_owner:
                assert isinstance(await talk_a.ask(Heartbeat(boot=1)), HeartbeatAck)
                view = await talk_owner.ask(PoolQuery())
                assert isinstance(view, PoolView)
                assert [(m.peer, m.state, m.job) for m in view.members] == [
                    (a.peer, "active", "job-1"),
                    (b.peer, "silent", ""),
                ]
                jobs = await talk_owner.ask(JobQuery(job="job-1"))
                assert isinstance(jobs, JobList)
                assert [(job.state, job.plan_version) for job in jobs.jobs] == [("running", 1)]
                await talk_owner.ask(JobReport(job="job-1", state="running", step=3))
                boss = load_membership(home)
                async with conversation(boss) as talk_boss:
                    await talk_boss.ask(JobStop(job="job-1"))
                await talk_owner.ask(JobReport(job="job-1", state="failed", step=3))
                assert notices == [StopNotice(job="job-1")]
                again = await talk_owner.ask(request(owner.peer, a.peer))
                assert isinstance(again, JobGranted)
                assert msgspec.msgpack.decode(again.plan, type=Plan).version == 2

    asyncio.run(main())


async def _invite_for_ever(boss: Conversation, acknowledged: list[str]) -> None:
    while True:
        answer = await boss.ask(InviteRequest())
        assert isinstance(answer, Invited)
        acknowledged.append(answer.invitation)


def test_every_acknowledged_fact_is_there_however_the_broker_dies(tmp_path: Path):
    """Killed while facts are being written as fast as they can be; what was acknowledged last must hold."""

    async def main() -> None:
        home = tmp_path / "broker"
        port = 0
        for round_ in range(3):
            acknowledged: list[str] = []
            async with broker(home, port=port) as running:
                port = running.port
                async with conversation(load_membership(home)) as boss:

                    async def invite_for_ever(
                        boss: Conversation = boss, acknowledged: list[str] = acknowledged
                    ) -> None:
                        while True:
                            answer = await boss.ask(InviteRequest())
                            assert isinstance(answer, Invited)
                            acknowledged.append(answer.invitation)

                    inviting = asyncio.create_task(invite_for_ever())
                    async with asyncio.timeout(CEILING_S):
                        while len(acknowledged) < 20 + 7 * round_:
                            await asyncio.wait([inviting], timeout=0.002)
                    await running.kill()
                    with pytest.raises(ChannelClosed):
                        await inviting
            async with broker(home, port=port):
                for number, invitation in enumerate((acknowledged[0], acknowledged[-1])):
                    await enrol(invitation, tmp_path / f"guest-{round_}-{number}", "provider")

    asyncio.run(main())


def test_strangers_get_nothing(tmp_path: Path):
    async def main() -> None:
        async with broker(tmp_path / "broker", uses=1) as running:
            invitation = parse_invitation(running.announced.invitation)
            stranger = TcpTransport(StrangerCredentials(invitation.authority_key))
            for question in (PoolQuery(), JobQuery(), JobStop(job="job-1"), InviteRequest()):
                channel = await stranger.dial(invitation.addresses, expect=None, stream="control")
                talk = Conversation(channel)
                with pytest.raises(RefusedError) as refused:
                    await talk.ask(question)
                assert refused.value.code == "not_authorised"
                await talk.close()

            guess = msgspec.structs.replace(invitation, token=b"guess" * 8)
            with pytest.raises(RefusedError) as refused:
                await enrol(format_invitation(guess), tmp_path / "guesser", "provider")
            assert refused.value.code == "bad_invitation"
            assert not (tmp_path / "guesser" / "membership.json").exists()

            with pytest.raises((TrustError, TransportError)):
                await _ask_as_foreigner(tmp_path, invitation.addresses)

            member = await enrol(running.announced.invitation, tmp_path / "member", "provider")
            with pytest.raises(RefusedError, match="used up"):
                await enrol(running.announced.invitation, tmp_path / "late", "provider")
            async with conversation(member) as talk:
                view = await talk.ask(PoolQuery())
                assert isinstance(view, PoolView)
                assert view.members == ()

    asyncio.run(main())


async def _ask_as_foreigner(directory: Path, addresses: tuple[str, ...]) -> Message:
    """A member certified by another authority of the same pool name, believing in the right broker."""
    foreign = load_authority(directory / "foreign", "home", now_wall_s=time.time())
    identity = load_identity(directory / "foreigner")
    certificate = foreign.issue(identity.public_key, "broker", now_wall_s=time.time())
    own = load_membership(directory / "broker").credentials.authority
    transport = TcpTransport(MemberCredentials(identity, certificate, own))
    talk = Conversation(await transport.dial(addresses, expect=None, stream="control"))
    try:
        return await talk.ask(PoolQuery())
    finally:
        await talk.close()


def test_an_expired_invitation_opens_nothing(tmp_path: Path):
    async def main() -> None:
        async with broker(tmp_path / "broker", lifetime_s=0.001) as running:
            with pytest.raises(RefusedError, match="unknown or expired"):
                await enrol(running.announced.invitation, tmp_path / "late", "provider")

    asyncio.run(main())


def test_a_second_broker_and_a_taken_port_are_clear_errors(tmp_path: Path):
    async def fails(home: Path, port: int) -> str:
        process = await spawn(home, port=port)
        _, said = await process.communicate()
        assert process.returncode == 1
        return said.decode()

    async def main() -> None:
        async with broker(tmp_path / "one") as running:
            said = await fails(tmp_path / "one", 0)
            assert said.startswith("UsageError: another broker is running on")
            said = await fails(tmp_path / "two", running.port)
            assert said.startswith(f"UsageError: port {running.port} on 127.0.0.1 is already in use")
            assert "Traceback" not in said

    asyncio.run(main())


def test_sigterm_ends_the_broker_cleanly(tmp_path: Path):
    async def main() -> None:
        async with broker(tmp_path / "broker") as running:
            member = await enrol(running.announced.invitation, tmp_path / "a", "provider")
            async with conversation(member) as talk:
                await talk.ask(registration(member))
                running.process.send_signal(signal.SIGTERM)
                _, said = await running.process.communicate()
                assert (running.process.returncode, said) == (0, b"")
                with pytest.raises(ChannelClosed):
                    await talk.ask(registration(member))

    asyncio.run(main())
