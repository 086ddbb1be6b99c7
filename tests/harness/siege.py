"""A training job under attack: `fusion train` in a process of its own on a pool of real peers, and what became of it.

Knows who runs what and who is the standby of what (from the job's journal), what a blow led to (from the driver's
lines), and that no official step ever changed. Starts what was killed again. Decides nothing about whom to strike, and
when: that is for `harness.killer` and the test.

    with Siege(pool, recipe, directory) as siege:
        siege.recover(siege.strike(killer, siege.census()))
        siege.finish()

Neighbours: `harness.live_pool` has the processes, `harness.killer` the blows, `harness.outcomes` what became of them,
`harness.wires` what lies between.
"""

from __future__ import annotations

import bisect
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from fusionai.scheduling.problem.types import Plan
from fusionai.storage.commits import read_commits
from fusionai.storage.rundir import RunDirectory
from fusionai.transport.enrolment import load_membership
from fusionai.wire.messages import CommitRecord
from harness.killer import Killer, Role, Target
from harness.live_pool import LivePool, Process
from harness.outcomes import Outcome
from harness.patience import CEILING_S

RECOVERY_PATIENCE_S: Final = CEILING_S
TAIL_LINES: Final = 40
_COMMIT: Final = re.compile(r"^step (\d+)/\d+  loss ")
_WAITS: Final = "the job waits"


class Siege:
    """As a context: the job runs; at the end nothing of it is left, and every process's words are in `directory`."""

    def __init__(self, pool: LivePool, recipe: Path, run: Path) -> None:
        self.pool = pool
        self.recipe = recipe
        self.run = RunDirectory(run)
        self.figures = recipe.with_suffix(".json")
        self.outcomes: list[Outcome] = []
        self.drivers: list[Process] = []
        self.official: dict[int, CommitRecord] = {}
        """Every commit ever seen in the journal."""
        self.options: dict[str, tuple[object, ...]] = {}
        """Of peers that were started with more than a name."""
        self._fallen: list[tuple[str, Process]] = []
        self._dead: set[str] = set()
        self._names = {load_membership(pool.directory / name).peer: name for name in pool.members}

    def __enter__(self) -> Siege:
        self.start_driver()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for driver in self.drivers:
            driver.end()
        self.write_logs()
        if problem is not None:
            print(self.tails())  # noqa: T201 - what a failure is understood by

    # ------------------------------------------------------------------------------------------------- the job

    @property
    def job(self) -> Process:
        return self.drivers[-1]

    def start_driver(self) -> Process:
        command = ("train", self.recipe, "--home", self.pool.owner, "--threads", 1, "--json", self.figures)
        self.drivers.append(Process(*command))
        return self.job

    def plan(self) -> Plan:
        """The journalled plan in force."""
        with closing(sqlite3.connect(f"{self.run.journal.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (content,) = database.execute("SELECT plan FROM driver").fetchone()
        return msgspec.json.decode(content, type=Plan)

    def remember(self) -> int:
        """Read the journal: what was official once is there, unchanged. The number of official steps."""
        now = {record.step: record for record in read_commits(self.run.journal)}
        lost = [step for step, record in self.official.items() if now.get(step) != record]
        assert not lost, f"official steps are missing or different now: {lost}"
        self.official = now
        return len(now)

    def holder(self, stage: int) -> str:
        """Who runs it."""
        return self._names[self.plan().stages[stage].peer]

    def steps_of_this_start(self) -> int:
        return sum(_COMMIT.match(line) is not None for line in self.job.lines)

    def wait_for_steps(self, count: int, patience_s: float = RECOVERY_PATIENCE_S) -> None:
        """Until this start of the driver has made so many official."""

        def enough() -> bool | None:
            return self.steps_of_this_start() >= count or None

        if not self.job.wait_until(enough, patience_s):
            raise AssertionError(f"the driver did not make {count} steps official within {patience_s:g} s")

    def finish(self) -> int:
        """Ask the job to stop, as Ctrl-C does. The number of official steps, all saved."""
        self.job.interrupt()
        assert self.job.ended() == 130, self.job.text[-2000:]
        return self.remember()

    # ------------------------------------------------------------------------------------------ blows and after

    def pids(self) -> dict[str, int]:
        """Of the driver and the peers, as they are now."""
        members = {name: process.process.pid for name, process in list(self.pool.members.items())}
        return {Role.DRIVER.value: self.job.process.pid, **members}

    def census(self, *roles: Role) -> tuple[Target, ...]:
        """Who may be struck now; only these roles, if any are named."""
        plan = self.plan()
        stages = {self._names[stage.peer]: stage.stage for stage in plan.stages if stage.peer in self._names}
        found = [
            Target(role, process.process.pid)
            for role, process in ((Role.DRIVER, self.job), (Role.BROKER, self.pool.broker))
            if process.lives
        ]
        for number, name in enumerate(sorted(self.pool.members)):
            process = self.pool.members[name]
            if name in self._dead or not process.lives or not _is_in(process):
                continue
            works = name in stages and _has_opened_a_job(process)
            role, index = (Role.STAGE, stages[name]) if works else (Role.SPARE, number)
            found.append(Target(role, process.process.pid, index))
        return tuple(target for target in found if not roles or target.role in roles)

    def wait_for_spares(self, count: int) -> None:
        """Until so many stand by."""
        for process in list(self.pool.members.values()):
            if len(self.census(Role.SPARE)) >= count:
                return
            process.wait_for("In pool")

    def strike(self, killer: Killer, targets: Sequence[Target]) -> list[Outcome]:
        """Whom of them, the killer's seed says."""
        at_s = time.time()
        blows = [blow for blow in killer.strike(targets) if blow.hit]
        named = [(blow, self._name_of(blow.target)) for blow in blows]
        self._dead |= {name for blow, name in named if blow.kind == "kill"}
        return [self.expect(str(blow), blow.target.role, name, at_s=at_s) for blow, name in named]

    def expect(self, what: str, role: Role, *names: str, at_s: float | None = None) -> Outcome:
        """Something was done to one of these now; `role`: what it was to the job."""
        committed = self.remember()
        outcome = Outcome(what, role, names, at_s or time.time(), len(self.drivers) - 1, committed)
        self.outcomes.append(outcome)
        return outcome

    def _name_of(self, target: Target) -> str:
        if target.role in (Role.DRIVER, Role.BROKER):
            return target.role.value
        return next(name for name, process in self.pool.members.items() if process.process.pid == target.pid)

    def recover(self, outcomes: Sequence[Outcome], patience_s: float = RECOVERY_PATIENCE_S) -> None:
        """Start the broker and the driver again, wait until the job is past these blows, then start the peers: while a
        takeover runs, nobody takes its cores away. A job that waits for a machine gets them at once."""
        if Role.BROKER.value in self._dead:
            self.pool.broker.end()
            self._fallen.append((Role.BROKER.value, self.pool.broker))
            self._dead.discard(Role.BROKER.value)
            self.pool.open_broker()
        if Role.DRIVER.value in self._dead:
            self.restart_driver()
        self._await(outcomes, patience_s, or_waits=True)
        self.revive()
        self._await(outcomes, patience_s, or_waits=False)

    def restart_driver(self) -> None:
        """The same command again."""
        self.job.end()
        self._dead.discard(Role.DRIVER.value)
        self.start_driver()

    def revive(self) -> None:
        """Start every dead peer again, with the home it had."""
        for name in sorted(self._dead - {Role.BROKER.value, Role.DRIVER.value}):
            former = self.pool.members.pop(name)
            former.end()
            self._fallen.append((name, former))
            self._dead.discard(name)
            for outcome in self.outcomes:
                if name in outcome.names and outcome.recovered_s is not None:
                    outcome.until_s = min(outcome.until_s, time.time())
            self.pool.start(name, *self.options.get(name, ()))

    def _await(self, outcomes: Sequence[Outcome], patience_s: float, *, or_waits: bool) -> None:
        def settled() -> bool | None:
            for outcome in outcomes:
                self._judge(outcome)
                if outcome.recovered_s is None and not (or_waits and outcome.waited):
                    return None
            return True

        if not self.job.wait_until(settled, patience_s):
            open_ = [f"{outcome.names}: {outcome.what}" for outcome in outcomes if outcome.recovered_s is None]
            raise AssertionError(f"the job was not past these within {patience_s:g} s: {open_}")

    def _judge(self, outcome: Outcome) -> None:
        """From the lines of the driver it met since, and of those after it."""
        who = "|".join(re.escape(name) for name in outcome.names)
        about = re.compile(rf"^step \d+: (?:.*\b(?:to|on) )?(?:{who})\b.*(?:lost|broke|failed)")
        for met in self.drivers[outcome.driver :]:
            first = bisect.bisect_left(met.came_at_s, outcome.at_s)
            for line, came_at_s in zip(met.lines[first:], met.came_at_s[first:], strict=False):
                after_s = came_at_s - outcome.at_s
                if came_at_s > outcome.until_s:
                    break
                if outcome.recovered_s is None:
                    outcome.waited |= _WAITS in line
                noticed = about.match(line) or (outcome.role is Role.BROKER and "broker can't be reached" in line)
                if noticed and outcome.detected_s is None:
                    outcome.detected_s = after_s
                    if ", warm standby of " in line:
                        outcome.role = Role.SPARE  # its stage had moved between the census and the blow
                # Where a stage stood still, the driver says when it was past that; if it was killed itself, the next.
                stood_still = outcome.role is Role.STAGE and met is self.drivers[outcome.driver]
                past = (noticed and "recovered after" in line) if stood_still else _COMMIT.match(line)
                if past and outcome.recovered_s is None:
                    outcome.recovered_s = after_s
                    outcome.bereaved = outcome.role is not Role.DRIVER and met is not self.drivers[outcome.driver]

    def judge_all(self) -> None:
        """Once more at the end: the loss of a standby is told while the job goes on."""
        for outcome in self.outcomes:
            self._judge(outcome)

    # ----------------------------------------------------------------------------------------------- the words

    def processes(self) -> list[tuple[str, Process]]:
        """Everybody who has spoken, oldest first within each name."""
        drivers = [(f"driver-{number}", driver) for number, driver in enumerate(self.drivers)]
        return [*drivers, *self._fallen, ("broker", self.pool.broker), *self.pool.members.items()]

    def write_logs(self) -> None:
        logs = self.pool.directory / "logs"
        logs.mkdir(exist_ok=True)
        for path in logs.iterdir():
            path.unlink()
        for name, process in self.processes():
            with (logs / f"{name}.log").open("a", encoding="utf-8") as log:
                for line, came_at_s in zip(process.lines, process.came_at_s, strict=False):
                    log.write(f"{came_at_s:.3f} {line}")
                log.write(f"--- pid {process.process.pid} ended with {process.process.poll()}\n")

    def tails(self) -> str:
        """The last lines of everybody's, and where all of them are."""
        told = [f"all lines: {self.pool.directory / 'logs'}"]
        for name, process in self.processes():
            lines = [line for line in process.lines if not _COMMIT.match(line)]
            told += [f"----- {name} (pid {process.process.pid})", *(line.rstrip() for line in lines[-TAIL_LINES:])]
        return "\n".join(told)

    def complaints(self, is_complaint: Callable[[str], bool] = lambda line: "Traceback" in line) -> list[str]:
        """Lines that nobody should ever have to say."""
        return [
            f"{name}: {''.join(process.lines[number : number + 30])}"
            for name, process in self.processes()
            for number, line in enumerate(process.lines)
            if is_complaint(line)
        ]


def _is_in(process: Process) -> bool:
    return any(line.startswith("In pool") for line in process.lines)


def _has_opened_a_job(process: Process) -> bool:
    """Whether a job was opened at this process. A member that was started again has its old place in the plan until
    the next plan, but no part in the job, so the driver tells nothing of its loss."""
    return any(line.rstrip().endswith(" opened") for line in process.lines)
