"""Breaks the guards of the machines one at a time and asks the tests: do they notice?

    python tests/mutation/guards.py [--module training.stage] [--processes 2] [--json FILE] [--only TEXT] [--list]

A mutant is noticed when a test fails, when its module can't even be imported, or when the tests don't come to an end.
Each runs in a process forked for it, with the mutant in place of the module and the module's tests in this order: its
unit tests, properties, whole jobs in virtual time. The tests must pass without a mutant first. Exit code 1 when a
module's tests notice less than they should.

Neighbours: `mutants` makes them; `test_mutation` runs this in `make test-long`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.machinery
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[2]
for folder in (ROOT / "tests", ROOT / "src"):  # this tree's own, whatever is installed
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from mutation.mutants import Mutant, mutants  # noqa: E402

WANTED: Final = 0.9
MEMORY_BYTES: Final = 4 << 30
"""A broken guard may let a list grow for ever."""
LEAST_LIMIT_S: Final = 20.0
LIMIT_FACTOR: Final = 6.0
"""A mutant's tests may take so many times as long as the whole module's, then it counts as noticed: it hangs. Processor
time, or a busy machine would notice mutants that no test does."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A module and the tests that guard it, fastest first (patterns below `tests`)."""

    name: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        return f"fusionai.coordination.{self.name}"

    @property
    def path(self) -> Path:
        return ROOT / "src" / Path(*self.module.split(".")).with_suffix(".py")

    @property
    def test_files(self) -> list[str]:
        """Raises `SystemExit` when there are none: nothing would be measured."""
        found = [path for pattern in self.tests for path in sorted((ROOT / "tests").glob(pattern))]
        if not found:
            raise SystemExit(f"no tests of {self.name}: nothing matches {', '.join(self.tests)} below {ROOT / 'tests'}")
        return [str(path) for path in dict.fromkeys(found)]


BROKER: Final = "property/test_broker_machine.py"
JOBS: Final = ("property/test_job_machines.py", "property/test_virtual_jobs.py")
SERVING: Final = (
    "unit/coordination/serving/test_driver*.py",
    "unit/coordination/serving/test_standbys.py",
    "property/test_virtual_serving.py",
)
BATCHES: Final = ("unit/coordination/serving/test_batching*.py", "property/test_serving_batches.py")
DRIVER_PARTS: Final = ("driver", "rounds", "steps", "plan_changes", "state")
SERVING_PARTS: Final = ("driver", "rounds", "standbys", "takeovers", "state", "interface")
SUBJECTS: Final = {
    subject.name: subject
    for subject in (
        Subject("training.stage", ("unit/coordination/training/test_stage*.py", *JOBS)),
        Subject("training.step", ("unit/coordination/training/test_st*.py", *JOBS)),
        Subject(
            "training.exchanges",
            ("unit/coordination/training/test_stage*.py", "unit/coordination/training/test_exchanges.py"),
        ),
        *(Subject(f"training.{part}", ("unit/coordination/training/test_driver*.py", *JOBS)) for part in DRIVER_PARTS),
        Subject("round.driver", ("unit/coordination/training/test_driver*.py", *JOBS)),
        Subject(
            "training.restoring",
            ("unit/coordination/training/test_restoring*.py", "unit/coordination/training/test_driver*.py", *JOBS),
        ),
        Subject("round.liveness", ("unit/coordination/round/test_liveness*.py", "property/test_silence*.py")),
        Subject(
            "broker.membership",
            ("unit/coordination/broker/test_membership.py", "unit/coordination/broker/test_dec*.py", BROKER),
        ),
        Subject(
            "broker.job_queue",
            ("unit/coordination/broker/test_turns.py", "unit/coordination/broker/test_job_queue.py"),
        ),
        Subject("broker.turns", ("unit/coordination/broker/test_turns.py",)),
        Subject("machine", ("unit/coordination/test_machine.py",)),
        *(Subject(f"serving.{part}", SERVING) for part in SERVING_PARTS),
        Subject("serving.admission", ("unit/coordination/serving/test_admission_fair_queue.py", *BATCHES, *SERVING)),
        Subject("serving.batching", (*BATCHES, *SERVING)),
        Subject("serving.sessions", (*BATCHES, *SERVING)),
        Subject("serving.pages", ("unit/coordination/serving/test_pages.py", *BATCHES, *SERVING)),
    )
}

ACCEPTED: Final[dict[tuple[str, str], str]] = {
    (
        "training.steps",
        "Feeding.feed: self.fed[0] - 1  ->  self.fed[0] - 2",
    ): "either lies below the step that would be fed next, and nothing else is asked of it",
    (
        "training.plan_changes",
        "PlanChanges._leaves_alone: living.items() <= dict(roles.places).items()"
        "  ->  living.items() < dict(roles.places).items()",
    ): "asked when somebody with a stage is lost: a plan over the same cut has one place more than there are living",
    (
        "training.plan_changes",
        "PlanChanges.without_standby: restoration and peer in restoration.holders.values()"
        "  ->  peer in restoration.holders.values()",
    ): "whoever loads does so by a restoration, so there is one; the type checker wants it said",
    (
        "training.steps",
        "Feeding.change_plan_if_quiet: job.pending is not None and (not busy)"
        " and (job.phase is DriverPhase.RUNNING)  ->  job.pending is not None and (not busy)",
    ): "asked only while the job runs; a decision that ends it just before had its whole step fed, so it is busy",
    (
        "round.liveness",
        "Silence._advance: passed_s <= 0  ->  passed_s < 0",
    ): "when no time has passed there is nothing to add",
    (
        "round.liveness",
        "_Rhythm.heard: self.gaps[-1][1] <= gap_s  ->  self.gaps[-1][1] < gap_s",
    ): "of two equal gaps the earlier is kept too, and forgotten first: the longest is the same at any time",
    (
        "training.exchanges",
        "Exchanges.outstanding: taken >= 0  ->  taken > 0",
    ): "a round of one step has no lag: its update is adopted at once and never outstanding",
    (
        "training.exchanges",
        "Exchanges.outstanding: taken >= 0  ->  taken >= 1",
    ): "a round of one step has no lag: its update is adopted at once and never outstanding",
    (
        "serving.driver",
        "ServingMachine.handle: self.react(TABLE, event) or []  ->  self.react(TABLE, event)",
    ): "an event without a row has returned before; the type checker wants it said",
    (
        "serving.batching",
        "Batcher._composed: decoding[0].turn > reading[0].turn  ->  decoding[0].turn >= reading[0].turn",
    ): "no two sessions have the same turn",
}
"""(module, `Mutant.name`) -> why no test can notice it. Such a mutant changes nothing that anybody could see."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`by`: the test that failed first, or `import`, `time` or `crash`; None: nobody noticed. `took_s`: of processor
    time."""

    by: str | None
    took_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    mutant: Mutant
    verdict: Verdict
    accepted: str | None

    def __str__(self) -> str:
        if self.verdict.by is not None:
            return f"noticed   {self.mutant} ({self.verdict.by}, {self.verdict.took_s:.1f} s)"
        return f"accepted  {self.mutant} ({self.accepted})" if self.accepted else f"SURVIVED  {self.mutant}"


@dataclass(frozen=True, slots=True)
class Measure:
    """Of one module. Accepted mutants count neither way."""

    subject: Subject
    outcomes: tuple[Outcome, ...]
    baseline_s: float

    @property
    def survivors(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.verdict.by is None and o.accepted is None]

    @property
    def noticed(self) -> int:
        return sum(o.verdict.by is not None for o in self.outcomes)

    @property
    def share(self) -> float:
        counted = self.noticed + len(self.survivors)
        return self.noticed / counted if counted else 1.0

    def as_json(self) -> dict[str, object]:
        return {
            "module": self.subject.module,
            "mutants": len(self.outcomes),
            "noticed": self.noticed,
            "accepted": sum(o.accepted is not None and o.verdict.by is None for o in self.outcomes),
            "share": self.share,
            "baseline_s": self.baseline_s,
            "outcomes": [
                {
                    "line": o.mutant.line,
                    "kind": o.mutant.kind,
                    "name": o.mutant.name,
                    "noticed_by": o.verdict.by,
                    "accepted": o.accepted,
                    "took_s": round(o.verdict.took_s, 3),
                }
                for o in self.outcomes
            ],
        }


def measure(subject: Subject, made: Sequence[Mutant], processes: int, tell: Callable[[str], None]) -> Measure:
    """Raises `SystemExit` when the tests fail without a mutant."""
    source = subject.path.read_text(encoding="utf-8")
    baseline = _judge(subject, [(None, ast.unparse(ast.parse(source)))], 1, limit_s=600)
    ((_, whole),) = baseline
    if whole.by is not None:
        raise SystemExit(f"{subject.name}: the tests fail without any mutant: {whole.by}")
    limit_s = math.ceil(max(LEAST_LIMIT_S, LIMIT_FACTOR * whole.took_s))
    outcomes: list[Outcome] = []
    for mutant, verdict in _judge(subject, [(mutant, mutant.source) for mutant in made], processes, limit_s=limit_s):
        assert mutant is not None
        outcome = Outcome(mutant, verdict, ACCEPTED.get((subject.name, mutant.name)))
        outcomes.append(outcome)
        tell(f"{len(outcomes):4}/{len(made)} {subject.name} {outcome}")
    outcomes.sort(key=lambda outcome: (outcome.mutant.line, outcome.mutant.name))
    return Measure(subject, tuple(outcomes), whole.took_s)


# ------------------------------------------------------------------------------------------------------- processes


@dataclass(slots=True)
class _Running:
    mutant: Mutant | None
    pid: int
    answers: IO[bytes]


def _judge(
    subject: Subject, sources: Sequence[tuple[Mutant | None, str]], processes: int, *, limit_s: int
) -> Iterator[tuple[Mutant | None, Verdict]]:
    """So many at a time, each for `limit_s` at most. Yields verdicts as they come; ends every process it started."""
    waiting = list(reversed(sources))
    running: dict[int, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                mutant, source = waiting.pop()
                begun = _fork(subject, mutant, source, limit_s)
                running[begun.pid] = begun
            for one in list(running.values()):
                ended, status, used = os.wait4(one.pid, os.WNOHANG)
                if not ended:
                    continue
                del running[one.pid]
                with one.answers:
                    said = one.answers.read()
                yield one.mutant, Verdict(_noticed_by(said, status), used.ru_utime + used.ru_stime)
            time.sleep(0.005)
    finally:
        for one in running.values():
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
            one.answers.close()


def _noticed_by(said: bytes, status: int) -> str | None:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return "time"
    if os.waitstatus_to_exitcode(status) != 0 or not said:
        return "crash"
    return json.loads(said)


def _fork(subject: Subject, mutant: Mutant | None, source: str, limit_s: int) -> _Running:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
            said = _run_tests(subject, source)
        except BaseException as problem:  # noqa: BLE001
            said = f"crash: {problem!r}"
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    return _Running(mutant, pid, os.fdopen(reading, "rb"))


class _FirstFailure:
    """Remembers which test failed first, or that the tests could not be collected."""

    def __init__(self) -> None:
        self.by: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.by is None:
            self.by = report.nodeid.split("/")[-1]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.by is None:
            self.by = "import"


def _run_tests(subject: Subject, source: str) -> str | None:
    """In the forked process. Who noticed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.meta_path.insert(0, _InPlaceOf(subject.module, subject.path, compile(source, str(subject.path), "exec")))
    first = _FirstFailure()
    options = ["-x", "-m", "not slow and not long", "-p", "no:xdist", "--rootdir", str(ROOT)]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plug-ins are loaded already: that is the point
    code = pytest.main([*options, *subject.test_files], plugins=[first])
    if first.by is None and code != pytest.ExitCode.OK:
        return f"pytest: {code!r}"
    return first.by


class _InPlaceOf(importlib.machinery.SourceFileLoader):
    """Finds and loads one module: this code instead of its file's."""

    def __init__(self, module: str, path: Path, code: CodeType) -> None:
        super().__init__(module, str(path))
        self._code = code

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return self._code


def _preload() -> None:
    """What every forked process needs and no mutant touches: loaded once."""
    for name in (
        "numpy",
        "msgspec",
        "hypothesis.strategies",
        "fusionai.wire.messages",
        "fusionai.scheduling.problem.types",
    ):
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.startswith("fusionai.coordination.")]
    assert not loaded, f"{loaded} came before their mutants"
    settings.register_profile("mutation", database=None, deadline=None, max_examples=20, derandomize=True)
    settings.load_profile("mutation")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", choices=list(SUBJECTS), help="again for more  [default: all]")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="mutants whose description has this text")
    parser.add_argument("--list", action="store_true", help="name the mutants, run nothing")
    parser.add_argument("--quiet", action="store_true", help="only survivors and sums")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the forked processes end with this one
    _preload()
    measures: list[Measure] = []
    for name in options.module or SUBJECTS:
        subject = SUBJECTS[name]
        made = [mutant for mutant in mutants(subject.path.read_text(encoding="utf-8")) if options.only in str(mutant)]
        if options.list:
            for mutant in made:
                _say(f"{name} {mutant}")
            continue
        measured = measure(subject, made, options.processes, (lambda _: None) if options.quiet else _say)
        measures.append(measured)
        for survivor in measured.survivors:
            _say(f"{name} {survivor}")
        accepted = len(made) - measured.noticed - len(measured.survivors)
        _say(
            f"{name}: {len(made)} mutants, {measured.noticed} noticed ({measured.share:.1%}), "
            f"{len(measured.survivors)} survived, {accepted} accepted; the tests take {measured.baseline_s:.1f} s of "
            "processor time"
        )
    if options.json is not None:
        figures = {"schema": "fusionai.mutation/1", "modules": [measured.as_json() for measured in measures]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(any(measured.share < WANTED for measured in measures))


if __name__ == "__main__":
    sys.exit(main())
