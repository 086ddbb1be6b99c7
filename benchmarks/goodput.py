"""How much of a pool's work survives a fault every half minute: the same steps, calm and stormy, in turn.

    python benchmarks/goodput.py [--minutes 60 [--calm 12] | --steps N] [--every 30] [--seed S] [--turns 1]
        [--json FILE]

The demo's model on the demo's pool (4 stages, spares, all on loopback, one thread each) trains twice from the same
beginning: once undisturbed, once with a fault every `--every` seconds. The calm job goes in `--turns` + 1 pieces, the
stormy one in `--turns` pieces between them, so that whatever else the machine does falls on both. `--calm` is the calm
job's whole time: an hour of faults does not need an hour without. Only steps that both have taken are compared.

Faults, drawn from a printed seed: SIGKILL of a stage, of a spare, of the broker; SIGSTOP of a stage for 8 s; the
connections between two neighbouring stages broken (Linux, by `ss -K`; left out where that does not work). Whoever was
killed is started again after `--away` seconds, the broker at once. Each job's driver is a process
as `fusion train` is one; between its pieces it waits, with the captured model kept.

Goodput is the stormy job's committed steps per second over the calm one's. Where others use the machine meanwhile, look
at the evenness too: the part of the time that steps would have taken at the median pace of their own half minute, of
the stormy job over the calm one's. Besides: every loss, norm and scale compared
bit by bit, commits that went missing, memory and descriptors of every process each 10 s with their slopes, journals'
bytes per step, and for every fault how long it took. A picture is written beside the JSON.

Where all peers share the machine, the start of a killed process (an interpreter, its imports) takes cores from the
others, as no machine of its own would. `restart_cpu_s` is what such processes had used when they were in the pool
again, of one fault and in sum, and `restart_share` the part of all cores' time of the storm that this was.

The JSON is written every 5 minutes, whole, so that an interruption leaves the figures so far. Ctrl-C and SIGTERM end
the run after the step under way, with a judgement of what there is; a second one does not wait for that step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from fusionai.client.pool.local_pool import BROKER, LocalPool
from fusionai.client.training.demo import DemoOptions, demo_peers, demo_recipe
from fusionai.client.training.train import TrainOptions
from fusionai.corpus.recipe import Recipe
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.commits import read_commits
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.wire.messages import CommitRecord, Fence
from goodput_driver import DriverProcess, Event

MANY_STEPS: Final = 1_000_000
"""The recipe's; both jobs are asked to stop long before."""
STAGES: Final = 4
FREEZE_S: Final = 8.0
SAMPLE_S: Final = 10.0
REPORT_S: Final = 300.0
SETTLING_S: Final = 60.0
"""Left out of slopes: caches fill."""
SHORTEST_LIFE_S: Final = 180.0
"""Of a process whose slope says anything."""
DRIVER: Final = "driver"
Kind = Literal["kill stage", "kill spare", "freeze stage", "kill broker", "cut link"]
KINDS: Final[tuple[Kind, ...]] = ("kill stage", "kill spare", "freeze stage", "kill broker", "cut link")


@dataclass(frozen=True)
class Strike:
    """Number `number`, `offset_s` into its slot. `pick` in [0, 1) chooses the victim among those there then."""

    number: int
    kind: Kind
    offset_s: float
    pick: float


def strike(seed: int, number: int, every_s: float, kinds: Sequence[Kind]) -> Strike:
    """Pure. The kinds come in shuffled rounds, so that a short run has all of them; the moment is within the middle
    third of the slot."""
    lap, place = divmod(number, len(kinds))
    order = random.Random(f"{seed} lap {lap}").sample(list(kinds), len(kinds))
    draw = random.Random(f"{seed} strike {number}")
    return Strike(number, order[place], every_s * draw.uniform(1 / 3, 2 / 3), draw.random())


@dataclass
class Fault:
    """What a strike did. Seconds count from it; None: it never came to that."""

    number: int
    kind: Kind
    victim: str
    at_s: float
    step: int
    """Official steps then."""
    detected_s: float | None = None
    planned_s: float | None = None
    """Until a plan without the victim was in force."""
    recovered_s: float | None = None
    """Until the first commit after it was noticed."""
    plans: int = 0
    """New plans before the next fault, voluntary ones too."""
    rounds: int = 0
    """Rounds that came to a commit before the next fault."""
    lost_s: float | None = None
    """Time beyond what the calm job takes for the steps up to the next fault."""
    restart_cpu_s: float | None = None
    """What the killed process had used, started again, when it was in the pool again. None: nobody was started."""


@dataclass(frozen=True)
class Sample:
    at_s: float
    name: str
    pid: int
    rss_bytes: int
    descriptors: int
    threads: int
    cpu_s: float


@dataclass
class Leg:
    """A piece of one job, from its first commit to its last."""

    name: Literal["calm", "stormy"]
    commits: list[tuple[float, int]] = field(default_factory=list)
    """(when, step)"""

    @property
    def steps(self) -> int:
        return max(0, len(self.commits) - 1)

    @property
    def seconds(self) -> float:
        return self.commits[-1][0] - self.commits[0][0] if self.commits else 0.0

    @property
    def median_step_s(self) -> float | None:
        """What a step takes that nothing disturbs: it tells a slow machine, or a slow plan, from recoveries."""
        if not self.steps:
            return None
        return statistics.median(after[0] - before[0] for before, after in itertools.pairwise(self.commits))


class Job:
    """One of the two trainings: its recipe, and what was seen of it."""

    def __init__(self, name: Literal["calm", "stormy"], directory: Path, spares: int) -> None:
        self.name: Literal["calm", "stormy"] = name
        options = DemoOptions(directory=directory / name, steps=MANY_STEPS, peers=STAGES, spares=spares)
        self.recipe: Recipe = demo_recipe(options)
        self.legs: list[Leg] = []
        self.official: dict[int, CommitRecord] = {}
        """As they were told."""
        self.driver: DriverProcess | None = None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(self.recipe.directory))

    @property
    def steps(self) -> int:
        return len(self.official)

    @property
    def steps_per_s(self) -> float:
        return sum(leg.steps for leg in self.legs) / sum(leg.seconds for leg in self.legs)


class Bench:
    """The pool, the two jobs, and everything noted on the way. `say` prints a line."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, kinds: Sequence[Kind]) -> None:
        self.arguments = arguments
        self.directory = directory
        self.kinds = kinds
        self.began_s = time.monotonic()
        self.peers = demo_peers(STAGES + arguments.spares, "cpu")
        self.pool = LocalPool(directory / "pool", self.peers)
        self.calm, self.stormy = (Job(name, directory, arguments.spares) for name in ("calm", "stormy"))
        self.faults: list[Fault] = []
        self.samples: list[Sample] = []
        self.notes: list[dict[str, Any]] = []
        self.plan: Plan | None = None
        self.driver: DriverProcess | None = None
        self.over = asyncio.Event()
        """Somebody wants the judgement now."""
        self._running: asyncio.Task[None] | None = None
        self._fence: Fence | None = None
        self._returning: set[asyncio.Task[None]] = set()

    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def say(self, text: str) -> None:
        print(f"{self.now_s():8.1f} s  {text}", flush=True)

    async def run(self) -> None:
        (self.directory / "pool").mkdir(parents=True)
        self._running = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
        async with self.pool:
            background = [asyncio.create_task(self._sample()), asyncio.create_task(self._report())]
            try:
                await self._turns()
                await self._level()
            finally:
                for job in (self.calm, self.stormy):
                    if job.driver is not None:
                        await asyncio.to_thread(job.driver.close)
                for task in background:
                    task.cancel()
                for found in await asyncio.gather(*background, return_exceptions=True):
                    if isinstance(found, Exception):
                        self.say(f"failed on the way: {type(found).__name__}: {found}")

    def _interrupt(self, number: int) -> None:
        self.say(f"{signal.Signals(number).name}: the judgement so far follows")
        if self.over.is_set() and self._running is not None:
            self._running.cancel()
        self.over.set()

    async def _turns(self) -> None:
        turns, steps = self.arguments.turns, self.arguments.steps
        for turn in range(turns + 1):
            if steps:
                reach = steps if turn == turns else steps * (turn + 1) // (turns + 1)
                await self._leg(self.calm, reach, None)
            else:
                await self._leg(self.calm, None, self.arguments.calm * 60 / (turns + 1))
            if turn < turns:
                if self.arguments.calm < self.arguments.minutes:
                    await self._leg(self.stormy, None, self.arguments.minutes * 60 / turns)
                else:
                    # The pieces of the stormy job are longer: there is one less of them.
                    await self._leg(self.stormy, round(self.calm.steps * (turns + 1) / turns), None)

    async def _level(self) -> None:
        """Both jobs to the same number of steps, where both are to have the same time."""
        if self.calm.steps < self.stormy.steps and self.arguments.calm >= self.arguments.minutes:
            await self._leg(self.calm, self.stormy.steps, None)

    async def _report(self) -> None:
        """Leaves the figures so far, as soon as there are any of both jobs."""
        while self.arguments.json is not None:
            await asyncio.sleep(REPORT_S)
            if self.judgeable:
                # On the loop: nothing changes meanwhile.
                write(self, judged(self), self.arguments.json)

    @property
    def judgeable(self) -> bool:
        return all(any(leg.steps for leg in job.legs) for job in (self.calm, self.stormy))

    async def _leg(self, job: Job, reach: int | None, seconds: float | None) -> None:
        """Until `reach` steps are official, or for `seconds`."""
        if self.over.is_set():
            return
        leg = Leg(job.name)
        job.legs.append(leg)
        started = asyncio.Event()

        def see(at_s: float, event: Event) -> None:
            at_s -= self.began_s
            self._note(job, at_s, event)
            match event:
                case Plan() as plan:
                    self.plan = plan
                case progress.PlanChanged(plan=plan):
                    self.plan = plan
                case progress.StepDone(record=record, replayed=False):
                    leg.commits.append((at_s, record.step))
                    job.official[record.step] = record
                    started.set()
                    over = seconds is not None and at_s - leg.commits[0][0] >= seconds
                    if over or (reach is not None and record.step + 1 >= reach):
                        driver.stop()
                case _:
                    pass

        async def interrupted() -> None:
            await self.over.wait()
            driver.stop()

        if job.driver is None:
            home, invitation = self.directory / "owner", self.pool.invitation
            options = TrainOptions(home=home, invitation=invitation, device="cpu", threads=1, save_base=False)
            job.driver = DriverProcess(job.recipe, options)
        driver = self.driver = job.driver
        interruption = asyncio.create_task(interrupted())
        storm = asyncio.create_task(self._storm(started)) if job is self.stormy else None
        try:
            await driver.run(see)
        finally:
            self.driver = None
            for task in [interruption, *([] if storm is None else [storm])]:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            for task in list(self._returning):
                await task
        self.say(f"{job.name}: {leg.steps} steps in {leg.seconds:.1f} s, {leg.steps / max(leg.seconds, 1e-9):.3f} a s")

    # ------------------------------------------------------------------------------------------------- what is seen

    def _note(self, job: Job, now_s: float, event: Event) -> None:
        match event:
            case progress.StepDone(record=record, replayed=False, step_s=step_s):
                self.notes.append({"at_s": now_s, "event": "step", "step": record.step, "step_s": step_s})
            case progress.FaultSeen() | progress.Restored() | progress.JobReady() | progress.JobWaiting():
                self.notes.append({"at_s": now_s, "event": type(event).__name__, **asdict(event)})
            case progress.PlanChanged(reason=reason):
                self.notes.append({"at_s": now_s, "event": "PlanChanged", "reason": reason})
            case progress.Recovered() | progress.BrokerAway() | progress.BrokerBack() | progress.Warned():
                self.notes.append({"at_s": now_s, "event": type(event).__name__, **asdict(event)})
            case _:
                return
        if job is not self.stormy:
            return
        if not self.faults:
            self._fence = event.record.fence if isinstance(event, progress.StepDone) else self._fence
            return
        fault = self.faults[-1]
        after_s = now_s - fault.at_s
        match event:
            case progress.FaultSeen() | progress.BrokerAway():
                fault.detected_s = after_s if fault.detected_s is None else fault.detected_s
            case progress.PlanChanged():
                fault.plans += 1
                fault.planned_s = after_s if fault.planned_s is None else fault.planned_s
            case progress.StepDone(record=record, replayed=False):
                fault.rounds += record.fence != self._fence
                self._fence = record.fence
                if fault.detected_s is not None and fault.recovered_s is None:
                    fault.recovered_s = after_s
            case _:
                pass

    async def _sample(self) -> None:
        while True:
            await asyncio.to_thread(self._sample_once)
            await asyncio.sleep(SAMPLE_S)

    def _sample_once(self) -> None:
        now_s = self.now_s()
        names = [BROKER, *(peer.name for peer in self.peers)]
        driver = None if self.driver is None else self.driver.pid
        driving = [] if driver is None else [(DRIVER, driver)]
        for name, pid in [*driving, *((name, self.pool.pid(name)) for name in names)]:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                with process.oneshot():
                    self.samples.append(
                        Sample(
                            at_s=now_s,
                            name=name,
                            pid=pid,
                            rss_bytes=process.memory_info().rss,
                            descriptors=process.num_fds(),
                            threads=process.num_threads(),
                            cpu_s=used_s(process),
                        )
                    )

    # ------------------------------------------------------------------------------------------------- what is done

    async def _storm(self, started: asyncio.Event) -> None:
        """A strike in each slot of `every` seconds from the first commit on."""
        await started.wait()
        began_s = time.monotonic()
        every_s = self.arguments.every
        first = len(self.faults)
        slot = 0
        while True:
            next_ = strike(self.arguments.seed, first + slot, every_s, self.kinds)
            await asyncio.sleep(max(0.0, began_s + slot * every_s + next_.offset_s - time.monotonic()))
            try:
                await self._strike(next_)
            except Exception as error:  # a strike that missed must not end the storm unnoticed
                self.say(f"strike {next_.number} ({next_.kind}) failed: {type(error).__name__}: {error}")
                raise
            slot += 1

    async def _strike(self, this: Strike) -> None:
        assert self.plan is not None
        placed = [self.pool.names[stage.peer] for stage in self.plan.stages if stage.peer in self.pool.names]
        living = [name for name in placed if self.pool.lives(name)]
        spares = [peer.name for peer in self.peers if peer.name not in placed and self.pool.lives(peer.name)]

        def one(of: Sequence[str]) -> str:
            return of[int(this.pick * len(of))]

        match this.kind:
            case "kill stage":
                victim = one(living)
                fault = self._began(this, victim)
                await self.pool.kill(victim)
                self._start(self._return(fault, victim, self.arguments.away))
            case "kill spare":
                victim = one(spares or living)
                fault = self._began(this, victim)
                await self.pool.kill(victim)
                self._start(self._return(fault, victim, self.arguments.away))
            case "kill broker":
                fault = self._began(this, BROKER)
                await self.pool.kill(BROKER)
                self._start(self._return(fault, BROKER, 0.0))
            case "freeze stage":
                victim = one(living)
                self._began(this, victim)
                self._start(self._freeze(self.pool.pid(victim)))
            case "cut link":
                pairs = list(itertools.pairwise(placed))
                pair = pairs[int(this.pick * len(pairs))]
                self._began(this, " - ".join(pair))
                cut = await asyncio.to_thread(cut_connections, *(self.pool.pid(name) for name in pair))
                self.say(f"  {cut} connections cut")

    def _began(self, this: Strike, victim: str) -> Fault:
        fault = Fault(this.number, this.kind, victim, self.now_s(), self.stormy.steps)
        self.faults.append(fault)
        self.say(f"strike {this.number} at step {self.stormy.steps}: {this.kind}, {victim}")
        return fault

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, fault: Fault, name: str, away_s: float) -> None:
        await asyncio.sleep(away_s)
        await self.pool.start_again(name)
        with contextlib.suppress(psutil.Error):  # the next fault may have been quicker
            fault.restart_cpu_s = used_s(psutil.Process(self.pool.pid(name)))

    async def _freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(FREEZE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def used_s(process: psutil.Process) -> float:
    """CPU time since the process began, with that of children it has waited for."""
    used = process.cpu_times()
    return used.user + used.system + used.children_user + used.children_system


def cut_connections(first: int, second: int) -> int:
    """End every TCP connection between two processes; how many there were."""
    ends = [
        {(c.laddr.port, c.raddr.port) for c in psutil.Process(pid).net_connections("tcp") if c.raddr}
        for pid in (first, second)
    ]
    shared = [(here, there) for here, there in ends[0] if (there, here) in ends[1]]
    for here, there in shared:
        subprocess.run(
            ["ss", "-K", "-tn", "sport", "=", f":{here}", "dport", "=", f":{there}"], check=True, capture_output=True
        )
    return len(shared)


def can_cut() -> bool:
    """Whether this user on this system may break other processes' connections: tried on one of our own."""
    if shutil.which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            port = server.getsockname()[1]
            command = ["ss", "-K", "-tn", "dst", "127.0.0.1", "dport", "=", f":{port}"]
            if subprocess.run(command, check=False, capture_output=True).returncode != 0:
                return False
            ours.settimeout(0.5)
            try:
                ours.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True
            return False


# --------------------------------------------------------------------------------------------------------- judgement


def slope_per_hour(points: Sequence[tuple[float, float]]) -> float | None:
    """Least squares over (seconds, value); None for too few points."""
    if len(points) < 3:
        return None
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None


def flatness(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Of each process that lived long enough: growth of memory and descriptors."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.name, sample.pid), []).append(sample)
    found: list[dict[str, Any]] = []
    for (name, pid), life in lives.items():
        settled = [sample for sample in life if sample.at_s >= life[0].at_s + SETTLING_S]
        if not settled or settled[-1].at_s - settled[0].at_s < SHORTEST_LIFE_S:
            continue
        rss = slope_per_hour([(sample.at_s, sample.rss_bytes / 2**20) for sample in settled])
        descriptors = slope_per_hour([(sample.at_s, sample.descriptors) for sample in settled])
        found.append(
            {
                "name": name,
                "pid": pid,
                "seconds": settled[-1].at_s - settled[0].at_s,
                "rss_mib": [settled[0].rss_bytes / 2**20, settled[-1].rss_bytes / 2**20],
                "rss_mib_per_hour": rss,
                "descriptors": [settled[0].descriptors, settled[-1].descriptors],
                "descriptors_per_hour": descriptors,
                "threads": [settled[0].threads, settled[-1].threads],
            }
        )
    return found


def evenness(legs: Sequence[Leg], window_s: float) -> float:
    """Part of the time that all steps take at the median pace of their own window."""
    ideal_s = 0.0
    for leg in legs:
        windows: dict[int, list[float]] = {}
        for (before_s, _), (at_s, _) in itertools.pairwise(leg.commits):
            windows.setdefault(int((at_s - leg.commits[0][0]) // window_s), []).append(at_s - before_s)
        ideal_s += sum(len(steps_s) * statistics.median(steps_s) for steps_s in windows.values())
    return ideal_s / sum(leg.seconds for leg in legs)


def different(one: CommitRecord, other: CommitRecord) -> bool:
    """In anything but the plan it was made under."""
    fields = ("step", "scale", "learning_rate", "total_norm", "norms_hash", "loss")
    return any(getattr(one, name) != getattr(other, name) for name in fields)


def price(faults: Sequence[Fault], commits: Sequence[tuple[float, int]], calm_step_s: float) -> None:
    """Fill in `lost_s` for the faults of one piece: the time up to the next one, less its steps at the calm pace."""
    for fault, following in zip(faults, [*faults[1:], None], strict=True):
        until_s = math.inf if following is None else following.at_s
        within = [at_s for at_s, _ in commits if fault.at_s <= at_s < until_s]
        before = [at_s for at_s, _ in commits if at_s < fault.at_s]
        if within and before:
            fault.lost_s = within[-1] - before[-1] - calm_step_s * len(within)


def bytes_of(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def judged(bench: Bench) -> dict[str, Any]:
    """Of what there is by now; of both jobs there must be steps."""
    calm, stormy = bench.calm, bench.stormy
    commits = {
        job.name: {record.step: record for record in read_commits(job.directory.journal)} for job in (calm, stormy)
    }
    compared = sorted(commits["calm"].keys() & commits["stormy"].keys())
    unequal = [step for step in compared if different(commits["calm"][step], commits["stormy"][step])]
    lost = [step for step, record in stormy.official.items() if commits["stormy"].get(step) != record]
    calm_step_s = 1 / calm.steps_per_s
    for leg in stormy.legs:
        price(bench.faults, leg.commits, calm_step_s)
    by_kind = {
        kind: {
            "count": len(those),
            **{
                name: summary([value for fault in those if (value := getattr(fault, name)) is not None])
                for name in (
                    *("detected_s", "planned_s", "recovered_s", "lost_s", "restart_cpu_s"),
                    *("plans", "rounds"),
                )
            },
        }
        for kind in bench.kinds
        if (those := [fault for fault in bench.faults if fault.kind == kind])
    }
    even = {job.name: evenness(job.legs, bench.arguments.every) for job in (calm, stormy)}
    broker = sorted(path for path in bench.pool.broker_home.rglob("*") if path.is_file())
    steps = len(commits["stormy"])
    restart_cpu_s = sum(fault.restart_cpu_s or 0.0 for fault in bench.faults)
    cores_s = (os.cpu_count() or 1) * sum(leg.seconds for leg in stormy.legs)
    return {
        "schema": "fusionai.goodput/2",
        "seed": bench.arguments.seed,
        "every_s": bench.arguments.every,
        "away_s": bench.arguments.away,
        "spares": bench.arguments.spares,
        "cores": os.cpu_count(),
        "goodput": stormy.steps_per_s / calm.steps_per_s,
        "goodput_by_evenness": even["stormy"] / even["calm"],
        "calm": {"steps": len(commits["calm"]), "steps_per_s": calm.steps_per_s, "evenness": even["calm"]},
        "stormy": {"steps": steps, "steps_per_s": stormy.steps_per_s, "evenness": even["stormy"]},
        "legs": [
            {"job": leg.name, "steps": leg.steps, "seconds": leg.seconds, "median_step_s": leg.median_step_s}
            for job in (calm, stormy)
            for leg in job.legs
        ],
        "restart_cpu_s": restart_cpu_s,
        "restart_share": restart_cpu_s / cores_s,
        "losses_compared": len(compared),
        "losses_not_compared": len(commits["calm"].keys() ^ commits["stormy"].keys()),
        "losses_unequal": unequal[:20],
        "lost_steps": len(lost),
        "faults": [asdict(fault) for fault in bench.faults],
        "by_kind": by_kind,
        "flatness": flatness(bench.samples),
        "journals": {
            "commit_rows": steps,
            "commit_bytes_per_step": bytes_of(stormy.directory.journal) / max(1, steps),
            "broker_bytes": {path.name: path.stat().st_size for path in broker},
            "telemetry_bytes_per_step": bytes_of(stormy.directory.telemetry) / max(1, steps),
        },
    }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "mean": statistics.fmean(values), "worst": max(values)}


def write(bench: Bench, result: dict[str, Any], path: Path) -> None:
    """All at once: whoever reads finds the former figures or these."""
    whole = {**result, "samples": [asdict(sample) for sample in bench.samples], "notes": bench.notes}
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    unfinished.replace(path)


def draw(bench: Bench, path: Path) -> None:
    """Steps per second over time with the faults; memory and descriptors below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (pace, memory, files) = pyplot.subplots(3, 1, figsize=(11, 9), sharex=True, constrained_layout=True)
    window_s = bench.arguments.every
    for job, colour in ((bench.calm, "tab:green"), (bench.stormy, "tab:blue")):
        for leg in job.legs:
            if not leg.commits:
                continue
            first_s = leg.commits[0][0]
            slots: dict[int, int] = {}
            for at_s, _ in leg.commits:
                slots[int((at_s - first_s) // window_s)] = slots.get(int((at_s - first_s) // window_s), 0) + 1
            whole = [slot for slot in sorted(slots) if first_s + (slot + 1) * window_s <= leg.commits[-1][0]]
            pace.plot(
                [(first_s + (slot + 0.5) * window_s) / 60 for slot in whole],
                [slots[slot] / window_s for slot in whole],
                ".-",
                color=colour,
            )
    for fault in bench.faults:
        pace.axvline(fault.at_s / 60, color="tab:red", alpha=0.25, linewidth=0.8)
    pace.set_ylabel(f"steps/s over {window_s:g} s")
    pace.set_ylim(bottom=0)
    pace.set_title("green: undisturbed, blue: with faults (red)")
    for name in [DRIVER, BROKER, *(peer.name for peer in bench.peers)]:
        mine = [sample for sample in bench.samples if sample.name == name]
        memory.plot([s.at_s / 60 for s in mine], [s.rss_bytes / 2**20 for s in mine], label=name, linewidth=1)
        files.plot([s.at_s / 60 for s in mine], [s.descriptors for s in mine], linewidth=1)
    memory.set_ylabel("resident MiB")
    memory.legend(fontsize=7, ncols=4)
    files.set_ylabel("descriptors")
    files.set_xlabel("minutes")
    figure.savefig(path)


def show(result: dict[str, Any], say: Callable[[str], None]) -> None:
    say(
        f"goodput {result['goodput']:.2%} (by evenness {result['goodput_by_evenness']:.2%}): "
        f"{result['stormy']['steps_per_s']:.3f} steps/s with faults, {result['calm']['steps_per_s']:.3f} without; "
        f"{result['losses_compared']} of {result['losses_compared'] + result['losses_not_compared']} steps compared, "
        f"{len(result['losses_unequal'])} unequal, {result['lost_steps']} lost"
    )
    say(
        f"processes started again used {result['restart_cpu_s']:.1f} s until they were in the pool: "
        f"{result['restart_share']:.2%} of {result['cores']} cores' time of the storm"
    )
    for kind, found in result["by_kind"].items():
        parts = [
            f"{name} {value['median']:.2f} (worst {value['worst']:.2f})"
            for name in ("detected_s", "planned_s", "recovered_s", "lost_s", "restart_cpu_s", "rounds")
            if (value := found[name]) is not None
        ]
        say(f"{found['count']:3d} x {kind:13s} {', '.join(parts)}")
    for life in result["flatness"]:
        say(
            f"{life['name']:10s} {life['seconds']:6.0f} s: {life['rss_mib'][0]:.0f} to {life['rss_mib'][1]:.0f} MiB "
            f"({life['rss_mib_per_hour']:+.1f} an hour), descriptors {life['descriptors'][0]} to "
            f"{life['descriptors'][1]} ({life['descriptors_per_hour']:+.1f} an hour), threads {life['threads']}"
        )
    say(f"journals: {result['journals']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="of the stormy job")
    parser.add_argument(
        "--calm", type=float, default=None, help="minutes of the calm job, at most --minutes (the default)"
    )
    parser.add_argument("--steps", type=int, default=0, help="of each job, instead of --minutes")
    parser.add_argument("--every", type=float, default=30.0, help="seconds from fault to fault")
    parser.add_argument("--away", type=float, default=5.0, help="seconds until a killed peer is started again")
    parser.add_argument("--spares", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1, help="pieces of the stormy job, between pieces of the calm one")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults to choose from, separated by commas")
    parser.add_argument("--directory", type=Path, default=None, help="keep homes, logs and jobs here")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(2**31)
    if arguments.calm is None:
        arguments.calm = arguments.minutes
    if not 0 < arguments.calm <= arguments.minutes:
        parser.error(f"--calm: expected more than 0 and at most {arguments.minutes:g} minutes, got {arguments.calm:g}")
    if arguments.steps and arguments.calm != arguments.minutes:
        parser.error("--calm goes with --minutes: --steps is for both jobs")
    if unknown := [kind for kind in arguments.kinds.split(",") if kind not in KINDS]:
        parser.error(f"unknown kind {unknown[0]!r}; there are: {', '.join(KINDS)}")
    kinds: list[Kind] = [kind for kind in KINDS if kind in arguments.kinds.split(",")]
    if "cut link" in kinds and not can_cut():
        kinds.remove("cut link")
        print("connections can't be cut here (`ss -K`): that fault is left out")
    print(f"seed {arguments.seed}; {', '.join(kinds)}")
    with tempfile.TemporaryDirectory(prefix="goodput-") as temporary:
        directory = arguments.directory or Path(temporary)
        bench = Bench(arguments, directory, kinds)
        with contextlib.suppress(asyncio.CancelledError):  # asked for twice
            asyncio.run(bench.run())
        if not bench.judgeable:
            print("there is nothing to judge: one of the jobs has taken no step")
            return 130
        result = judged(bench)
        show(result, bench.say)
        if arguments.json is not None:
            write(bench, result, arguments.json)
            draw(bench, arguments.json.with_suffix(".svg"))
    return 0 if not result["losses_unequal"] and not result["lost_steps"] else 1


if __name__ == "__main__":
    sys.exit(main())
