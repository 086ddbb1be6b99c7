"""The shipped broker, killed at random while members and owners talk to it: nothing acknowledged is ever missing.

Each client keeps what it was told in its own model; after each restart the broker must agree with all of them. Some
kills hit the broker while it is starting. A run is replayed by its seed: FUSION_CHAOS_SEED=... pytest ...
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from fusionai.primitives.environment import inherited
from fusionai.primitives.errors import FusionError, RefusedError
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement, Standby
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import Membership, enrol, load_membership
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire import messages as wire
from harness.patience import CEILING_S

pytestmark = pytest.mark.slow

LOG = logging.getLogger(__name__)
PATIENCE_S = CEILING_S
COMPARED_NOTES = 50
"""A job's story is bounded: only its newest lines are."""


class Broker:
    """`fusion broker` on one home and port."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = 0
        self.said: list[str] = []
        self.process: asyncio.subprocess.Process | None = None

    async def spawn(self) -> asyncio.subprocess.Process:
        options = ("--pool", "home", "--host", "127.0.0.1", "--port", str(self.port), "--rest-after", "0")
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fusionai", "broker", "--home", str(self.home), *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=inherited(),
        )
        return self.process

    async def start(self) -> str:
        """The invitation, when the pool is open; empty unless it is new."""
        process = await self.spawn()
        assert process.stdout is not None
        said: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while not (said and "Press Ctrl-C" in said[-1]):
                line = (await process.stdout.readline()).decode()
                assert line, f"the broker ended: {said}"
                said.append(line)
        assert not any("Repaired" in line for line in said), f"a kill damaged the journal: {said}"
        reachable = next(line for line in said if line.startswith("Reachable at"))
        self.port = int(reachable.split(",")[0].rpartition(":")[2])
        return next((line.split("fusion join ")[1].strip() for line in said if "fusion join " in line), "")

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.communicate()

    async def die_while_starting(self, after_s: float) -> None:
        await self.spawn()
        await asyncio.sleep(after_s)
        await self.kill()


@asynccontextmanager
async def talking(membership: Membership) -> AsyncIterator[Conversation]:
    transport = TcpTransport(membership.credentials)
    channel = await transport.dial(membership.broker.known, expect=None, stream="control")
    talk = Conversation(channel, notices=(wire.LeaveNotice, wire.StopNotice))
    try:
        yield talk
    finally:
        await talk.close()


@dataclass
class Provider:
    """What one lent machine was told: the newest boot the broker has answered for."""

    membership: Membership
    boot: int = 0
    known_boot: int = 0

    async def live(self, talk: Conversation, dice: random.Random) -> None:
        while True:
            if self.known_boot == 0 or dice.random() < 0.3:
                self.boot += 1
                profile = PeerProfile(peer=self.membership.peer, flops_per_s=1e9, memory_bytes=10**9)
                message = wire.Register(
                    boot=self.boot,
                    profile=msgspec.Raw(msgspec.msgpack.encode(profile)),
                    addresses=("tcp://127.0.0.1:9",),
                )
                assert isinstance(await talk.ask(message), wire.Registered)
                self.known_boot = self.boot
            else:
                with suppress(RefusedError):
                    await talk.ask(wire.Heartbeat(boot=self.boot))
            await asyncio.sleep(dice.random() * 0.01)


@dataclass
class Owner:
    """What one job's owner was told. `unsure`: the answer to its last message never came."""

    membership: Membership
    job: str
    providers: list[Provider]
    version: int = 0
    state: str = ""
    notes: list[str] = field(default_factory=list)
    unsure: bool = False
    count: int = 0

    async def live(self, talk: Conversation, dice: random.Random) -> None:
        while True:
            if self.state in ("", "done") or dice.random() < 0.2:
                await self._request(talk, dice)
            elif dice.random() < 0.05:
                await self._report(talk, "done", "")
            else:
                self.count += 1
                await self._report(talk, "running", f"note {self.count} of {self.job}")
            await asyncio.sleep(dice.random() * 0.01)

    async def _request(self, talk: Conversation, dice: random.Random) -> None:
        runs, standbys = dice.sample([one.membership.peer for one in self.providers], 2)
        plan = Plan(
            graph_hash=str(dice.random()),
            stages=(StagePlacement(stage=0, peer=runs, blocks=(0, 1)),),
            feed=self.membership.peer,
            standbys=(Standby(stage=0, peer=standbys),),
            snapshot_every=2,
            microbatches=1,
            step_time_s=1.0,
            tokens_per_s=1.0,
            certificate=Certificate(method="test", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
        )
        message = wire.JobRequest(job=self.job, title="t", plan=msgspec.Raw(msgspec.msgpack.encode(plan)), steps=10)
        self.unsure = True
        try:
            granted = await talk.ask(message)
        except RefusedError:
            self.unsure = False
            return
        self.unsure = False
        assert isinstance(granted, wire.JobGranted)
        version = msgspec.msgpack.decode(granted.plan, type=Plan).version
        assert version > self.version, "a plan version was given out twice"
        self.version = version
        self.state = "running" if self.state == "running" else "requested"

    async def _report(self, talk: Conversation, state: str, note: str) -> None:
        self.unsure = True
        await talk.ask(
            msgspec.convert({"m": "job_report", "job": self.job, "state": state, "detail": note}, wire.JobReport)
        )
        self.unsure = False
        self.state = state
        if note:
            self.notes.append(note)

    def check(self, views: tuple[wire.JobView, ...]) -> None:
        if not views:
            assert self.version == 0, f"{self.job} is gone"
            return
        [view] = views
        told = iter(line.partition("Z ")[2] for line in view.story)
        missing = [note for note in self.notes[-COMPARED_NOTES:] if note not in told]
        assert not missing, f"{self.job}: {missing} were acknowledged and are gone"
        assert view.plan_version >= self.version
        if not self.unsure:
            assert (view.plan_version, view.state) == (self.version, self.state)
        self.version, self.state, self.unsure = view.plan_version, view.state, False


@dataclass
class Inviter:
    """The broker's owner hands out invitations; some are used at once."""

    home: Path
    directory: Path
    invitations: list[str] = field(default_factory=list)
    newcomers: list[Membership] = field(default_factory=list)
    count: int = 0

    async def live(self, talk: Conversation, dice: random.Random) -> None:
        while True:
            answer = await talk.ask(wire.InviteRequest(uses=1, lifetime_s=3600.0))
            assert isinstance(answer, wire.Invited)
            if dice.random() < 0.1:
                await self.use(answer.invitation)
            else:
                self.invitations.append(answer.invitation)
            await asyncio.sleep(dice.random() * 0.05)

    async def use(self, invitation: str) -> None:
        self.count += 1
        self.newcomers.append(await enrol(invitation, self.directory / f"newcomer-{self.count}", "provider"))


async def until_cut_off(client: Provider | Owner | Inviter, membership: Membership, dice: random.Random) -> None:
    """A client's life until its broker is gone; whatever else goes wrong is a failure of the test."""
    try:
        async with talking(membership) as talk:
            await client.live(talk, dice)
    except RefusedError:
        raise
    except FusionError:
        return


class Chaos:
    def __init__(self, directory: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.directory = directory
        self.broker = Broker(directory / "broker")
        self.restarts_s: list[float] = []

    async def run(self, kills: int) -> None:
        invitation = await self.broker.start()
        names = [f"provider-{number}" for number in range(5)]
        self.providers = [Provider(await enrol(invitation, self.directory / name, "provider")) for name in names]
        self.owners = [
            Owner(await enrol(invitation, self.directory / f"owner-{n}", "owner"), f"job-{n}", self.providers)
            for n in range(2)
        ]
        self.inviter = Inviter(self.broker.home, self.directory)
        try:
            for _ in range(kills):
                await self._live_and_kill()
                while self.dice.random() < 0.2:
                    await self.broker.die_while_starting(self.dice.random() * 1.2)
                started_s = time.monotonic()
                await self.broker.start()
                await self._check()
                self.restarts_s.append(time.monotonic() - started_s)
            for unused in self.dice.sample(self.inviter.invitations, min(3, len(self.inviter.invitations))):
                await self.inviter.use(unused)
        finally:
            await self.broker.kill()

    async def _live_and_kill(self) -> None:
        boss = load_membership(self.broker.home)
        clients: list[tuple[Provider | Owner | Inviter, Membership]] = [
            *((provider, provider.membership) for provider in self.providers),
            *((owner, owner.membership) for owner in self.owners),
            (self.inviter, boss),
        ]
        tasks = [
            asyncio.create_task(until_cut_off(client, membership, random.Random(self.dice.random())))
            for client, membership in clients
        ]
        await asyncio.sleep(self.dice.random() * 0.6)
        await self.broker.kill()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*tasks)

    async def _check(self) -> None:
        async with talking(load_membership(self.broker.home)) as boss:
            view = await boss.ask(wire.PoolQuery())
            assert isinstance(view, wire.PoolView)
            boots = {member.peer: member.boot for member in view.members}
            for provider in self.providers:
                if provider.known_boot:
                    assert provider.known_boot <= boots[provider.membership.peer] <= provider.boot
            for owner in self.owners:
                jobs = await boss.ask(wire.JobQuery(job=owner.job))
                assert isinstance(jobs, wire.JobList)
                owner.check(jobs.jobs)
        for newcomer in self.inviter.newcomers[-3:]:
            async with talking(newcomer) as talk:
                assert isinstance(await talk.ask(wire.PoolQuery()), wire.PoolView)


def play(tmp_path: Path, kills: int, seed: int) -> None:
    seed = int(os.environ.get("FUSION_CHAOS_SEED", seed))
    LOG.warning("replay with FUSION_CHAOS_SEED=%d", seed)
    chaos = Chaos(tmp_path, seed)
    asyncio.run(chaos.run(kills))
    told = sum(len(owner.notes) for owner in chaos.owners)
    plans = max(owner.version for owner in chaos.owners)
    restarts = chaos.restarts_s
    LOG.warning(
        "%d kills: %d notes, %d plans, %d invitations, %d newcomers; restart to serving %.2f s, at most %.2f s",
        *(kills, told, plans, len(chaos.inviter.invitations), len(chaos.inviter.newcomers)),
        *(statistics.median(restarts), max(restarts)),
    )
    assert told
    assert plans


def test_nothing_acknowledged_is_missing_after_a_few_kills(tmp_path: Path):
    play(tmp_path, kills=5, seed=1)


@pytest.mark.long
def test_nothing_acknowledged_is_missing_after_a_hundred_kills(tmp_path: Path):
    play(tmp_path, kills=100, seed=random.SystemRandom().randrange(2**32))
