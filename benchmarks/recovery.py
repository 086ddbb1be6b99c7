"""One process is killed with SIGKILL in mid-training: what FusionAI, torchft and torch's pipelining make of it.

    python benchmarks/recovery.py [--kills 3] [--json FILE] [--only NAMES] [--torchft-python PYTHON]

The same small Llama-type model (the demo's sizes), 8 rows of 128 tokens a step, one thread per process, all on
loopback. Each rival does what it is made for:

- FusionAI: `fusion demo --kill`, 4 stages and spares, a stage killed every 15 steps; figures are its JSON's. "All back"
  is the same moment as "next step": a spare has taken the stage.
- torchft: 2 replicas of the whole model (data parallel over gloo), lighthouse with default timeouts; one replica is
  killed, and started again once the survivor has committed.
- torch.distributed.pipelining: 4 stages, 1F1B over gloo; one stage is killed. It has no recovery of its own, so a
  supervisor ends the other ranks as soon as one is gone, and starts all of them from the last checkpoint (every 10
  steps). Once more without a supervisor, to see what the other ranks notice.

Every rival also runs undisturbed, and its losses and final state are compared with those, bit for bit. A rival that is
not installed is left out, with the reason. `pip install torchft` into an environment of its own and name its
interpreter with --torchft-python.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
RANKS: Final = 4
REPLICAS: Final = 2
CHECKPOINT_EVERY: Final = 10
STEPS: Final = {"torchft": 80, "pipelining": 40}
PATIENCE_S: Final = 180.0
BETWEEN_KILLS: Final = 15
DEMO_S: Final = 900.0
WRAPPED_S: Final = 60.0
UNSUPERVISED_S: Final = 30.0
"""How long the other ranks are watched when nobody ends them."""
Event = dict[str, Any]


class ChildSilent(Exception):
    """A process ended, or took too long, without saying what was awaited."""


class RivalMissing(Exception):
    """The rival can't run here; the text says why."""


@dataclass(frozen=True)
class Recovery:
    """Of one kill. Seconds count from the SIGKILL; None: it did not happen within the run."""

    step: int
    detected_s: float | None
    """Until somebody noticed."""
    recovered_s: float | None
    """Until the next training step was committed."""
    whole_s: float | None
    """Until the step after the killed one was done with every worker there again."""
    steps_redone: int
    """Steps that were committed and had to be computed again."""
    attempts_discarded: int
    samples_missing: int
    """Rows that went into no update, of those the undisturbed run used."""
    losses_compared: int
    losses_equal: bool
    """Every loss has the undisturbed run's bits."""
    first_different_step: int | None
    detail: str = ""


@dataclass
class Child:
    """A process and the events it said, as they come."""

    name: str
    process: subprocess.Popen[str]
    events: list[Event] = field(default_factory=list)
    said: threading.Condition = field(default_factory=threading.Condition)
    ended_at_s: float | None = None

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                with self.said:
                    self.events.append(json.loads(line))
                    self.said.notify_all()
        self.process.wait()
        with self.said:
            self.ended_at_s = time.monotonic()
            self.said.notify_all()

    def wait_for(self, wanted: Callable[[Event], bool], what: str, patience_s: float = PATIENCE_S) -> Event:
        deadline_s = time.monotonic() + patience_s
        with self.said:
            while (found := self.first(wanted)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.ended_at_s is not None:
                    last = self.events[-1] if self.events else "nothing"
                    raise ChildSilent(f"{self.name} never said {what}; its last words: {last}")
                self.said.wait(left_s)
        return found

    def first(self, wanted: Callable[[Event], bool]) -> Event | None:
        return next((event for event in self.events if wanted(event)), None)

    def ended_within(self, patience_s: float) -> float | None:
        """When it ended; None if it has not."""
        deadline_s = time.monotonic() + patience_s
        with self.said:
            while self.ended_at_s is None and (left_s := deadline_s - time.monotonic()) > 0:
                self.said.wait(left_s)
        return self.ended_at_s

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> float:
        """SIGKILL; the moment."""
        at_s = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        return at_s

    def end(self) -> None:
        self.process.kill()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Children(contextlib.ExitStack):
    """Every process started here has ended when the block has."""

    def start(self, name: str, command: Sequence[str], log: Path, **environment: str) -> Child:
        with log.open("ab") as errors:
            process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        child = Child(name, process)
        self.callback(child.end)
        return child


# ------------------------------------------------------------------------------------------------------------ torchft


@dataclass(frozen=True)
class Torchft:
    python: str
    layers: int

    def check(self) -> dict[str, str]:
        """Versions. Raises `RivalMissing`."""
        code = "import torch, torchft, importlib.metadata as m; print(torch.__version__, m.version('torchft'))"
        try:
            found = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        except OSError as problem:
            raise RivalMissing(f"{self.python}: {problem}") from None
        if found.returncode != 0:
            last = (found.stderr.strip().splitlines() or ["no message"])[-1]
            raise RivalMissing(f"torchft is not installed for {self.python}: {last}")
        torch, torchft = found.stdout.split()[-2:]
        return {"torch": torch, "torchft": torchft}

    def undisturbed(self, directory: Path) -> list[Child]:
        with self._replicas(directory) as (_, replicas):
            for replica in replicas:
                replica.wait_for(is_("done"), "done")
            return replicas

    def killed(self, directory: Path, at_step: int, into_step_s: float, plain: list[Child]) -> Recovery:
        with self._replicas(directory) as (start, replicas):
            survivor, victim = replicas
            survivor.wait_for(lambda e: e["event"] == "attempt" and e["step"] == at_step - 1, f"step {at_step - 1}")
            time.sleep(into_step_s)
            killed_s = victim.kill()
            after = survivor.wait_for(lambda e: commits(e) and e["at_s"] > killed_s and e["replicas"] == 1, "a commit")
            restarted_s = time.monotonic()
            returned = start(1)
            returned.wait_for(is_("loaded"), "loaded")
            returned.go()
            survivor.wait_for(is_("done"), "done")
            healed = survivor.first(lambda e: commits(e) and e["at_s"] > restarted_s and e["replicas"] == REPLICAS)
            returned.ended_within(PATIENCE_S)
            attempts = [event for event in survivor.events if event["event"] == "attempt" and event["at_s"] > killed_s]
            discarded = [event for event in attempts if not event["committed"]]
            alone = [event for event in attempts if event["committed"] and event["replicas"] == 1]
            begun = returned.first(is_("begun"))
            compared = compare(losses(plain[0].events), losses(survivor.events))
            state = last_words(plain[0]) == last_words(survivor)
            notes = [f"final state {'equal' if state else 'different'}"]
            if healed is not None:
                notes.append(f"restart to first joint commit {healed['at_s'] - restarted_s:.2f} s")
            if begun is not None:
                notes.append(f"of which starting the process {begun['at_s'] - restarted_s:.2f} s")
            return Recovery(
                step=at_step,
                detected_s=(discarded[0]["at_s"] if discarded else after["at_s"]) - killed_s,
                recovered_s=after["at_s"] - killed_s,
                whole_s=None if healed is None else healed["at_s"] - killed_s,
                steps_redone=0,
                attempts_discarded=len(discarded),
                samples_missing=len(alone) * 4,
                **compared,
                detail="; ".join(notes),
            )

    def wrapped(self, directory: Path, at_step: int, into_step_s: float) -> dict[str, Any]:
        """What the survivor does when it uses torchft's own `DistributedDataParallel`."""
        with self._replicas(directory, "--wrapper") as (_, (survivor, victim)):
            survivor.wait_for(lambda e: e["event"] == "attempt" and e["step"] == at_step - 1, f"step {at_step - 1}")
            time.sleep(into_step_s)
            killed_s = victim.kill()
            with contextlib.suppress(ChildSilent):
                after = survivor.wait_for(lambda e: commits(e) and e["replicas"] == 1, "a commit", WRAPPED_S)
                return {"survived": True, "recovered_s": after["at_s"] - killed_s}
            said = (directory / "replica-0.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return {"survived": False, "last_words": [line.strip() for line in said[-3:]]}

    @contextlib.contextmanager
    def _replicas(self, directory: Path, *more: str) -> Iterator[tuple[Callable[[int], Child], list[Child]]]:
        with Children() as children:
            script = [self.python, str(HERE / "recovery_torchft.py")]
            lighthouse = children.start("lighthouse", [*script, "lighthouse"], directory / "lighthouse.log")
            address = lighthouse.wait_for(is_("lighthouse"), "its address")["address"]

            def start(index: int) -> Child:
                command = [*script, "replica", str(index), "--lighthouse", address, "--layers", str(self.layers)]
                command += ["--steps", str(STEPS["torchft"]), *more]
                return children.start(f"replica {index}", command, directory / f"replica-{index}.log")

            replicas = [start(index) for index in range(REPLICAS)]
            for replica in replicas:
                replica.wait_for(is_("loaded"), "loaded")
            for replica in replicas:
                replica.go()
            yield start, replicas


# --------------------------------------------------------------------------------------------------------- pipelining


@dataclass(frozen=True)
class Pipelining:
    layers: int

    def undisturbed(self, directory: Path) -> list[Event]:
        with Children() as children:
            ranks = self._start(children, directory, "undisturbed", [sys.executable])
            ranks[-1].wait_for(is_("done"), "done")
            return ranks[-1].events

    def killed(self, directory: Path, at_step: int, into_step_s: float, victim: int, plain: list[Event]) -> Recovery:
        """With a supervisor that starts everybody again."""
        with Children() as children:
            ranks, killed_s = self._kill(children, directory, at_step, into_step_s, victim)
            gone_s = ranks[victim].ended_within(PATIENCE_S)
            assert gone_s is not None
            for rank in ranks:
                rank.kill()
            before = losses(ranks[-1].events)
            again = self._start(children, directory, "first", [sys.executable], store="again")
            begun = again[-1].wait_for(is_("begun"), "begun")
            recovered = again[-1].wait_for(is_("step"), "a step")
            whole = again[-1].wait_for(lambda e: e["event"] == "step" and e["step"] >= max(before), "the killed step")
            again[-1].wait_for(is_("done"), "done")
            return Recovery(
                step=at_step,
                detected_s=gone_s - killed_s,
                recovered_s=recovered["at_s"] - killed_s,
                whole_s=whole["at_s"] - killed_s,
                steps_redone=len(before) - begun["step"],
                attempts_discarded=1,
                samples_missing=0,
                **compare(losses(plain), {**before, **losses(again[-1].events)}),
                detail=f"starting processes and loading {begun['at_s'] - gone_s:.2f} s; rank {victim} killed",
            )

    def unsupervised(self, directory: Path, at_step: int, into_step_s: float, victim: int) -> dict[str, Any]:
        """What the other ranks notice by themselves."""
        with Children() as children:
            ranks, killed_s = self._kill(children, directory, at_step, into_step_s, victim)
            ends: dict[str, Any] = {}
            deadline_s = killed_s + UNSUPERVISED_S
            for number, rank in enumerate(ranks):
                if number == victim:
                    continue
                ended_s = rank.ended_within(max(0.0, deadline_s - time.monotonic()))
                error = rank.first(is_("error"))
                ends[f"rank {number}"] = {
                    "ended_after_s": None if ended_s is None else ended_s - killed_s,
                    "error": None if error is None else error["text"],
                }
            return {"victim": victim, "watched_s": UNSUPERVISED_S, "others": ends}

    def _kill(
        self, children: Children, directory: Path, at_step: int, into_step_s: float, victim: int
    ) -> tuple[list[Child], float]:
        ranks = self._start(children, directory, "first", [sys.executable])
        ranks[victim].wait_for(lambda e: e["event"] == "step" and e["step"] == at_step - 1, f"step {at_step - 1}")
        time.sleep(into_step_s)
        return ranks, ranks[victim].kill()

    def _start(
        self, children: Children, directory: Path, name: str, python: list[str], store: str = "store"
    ) -> list[Child]:
        checkpoints = directory / name / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        command = [*python, str(HERE / "recovery_pipelining.py"), "--store", str(directory / name / store)]
        command += ["--checkpoints", str(checkpoints), "--every", str(CHECKPOINT_EVERY)]
        command += ["--layers", str(self.layers), "--steps", str(STEPS["pipelining"])]
        return [
            children.start(
                f"rank {rank}", command, directory / f"{name}-{rank}.log", RANK=str(rank), WORLD_SIZE=str(RANKS)
            )
            for rank in range(RANKS)
        ]


# ----------------------------------------------------------------------------------------------------------- FusionAI


def fusionai(directory: Path, kills: int) -> dict[str, Any]:
    """`fusion demo` with a kill of a stage every `BETWEEN_KILLS` steps, and what its JSON says. Raises `RivalMissing`
    when this build has no `--kill`, or the demo does not come to an end."""
    figures = directory / "demo.json"
    steps = BETWEEN_KILLS * (kills + 1)
    command = [sys.executable, "-m", "fusionai", "demo", "--peers", str(RANKS), "--steps", str(steps)]
    for number in range(kills):
        command += ["--kill", f"{BETWEEN_KILLS * (number + 1)}:{(1 + number) % RANKS}"]
    command += ["--directory", str(directory), "--json", str(figures)]
    with (directory / "demo.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(DEMO_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it ends its peers itself
            process.wait(PATIENCE_S)
    if not figures.is_file():
        said = (directory / "demo.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in said if line.lower().startswith("error")]
        last = [*said, *errors][-1] if said else "it said nothing"
        raise RivalMissing(f"fusion demo --kill ended with code {process.returncode}: {last}")
    return read_demo(json.loads(figures.read_text(encoding="utf-8")))


def read_demo(figures: dict[str, Any]) -> dict[str, Any]:
    """The kills of stages; the broker's are kept apart, they stop no training."""
    stages = [kill for kill in figures["kills"] if kill["stage"] != "broker"]
    equal = figures["max_abs_loss_diff"] == 0.0
    runs = [
        Recovery(
            step=kill["step"],
            detected_s=kill["detected_s"],
            recovered_s=kill["recovered_s"],
            whole_s=kill["recovered_s"],
            steps_redone=0,
            attempts_discarded=1,
            samples_missing=0,
            losses_compared=len(figures["losses"]),
            losses_equal=equal,
            first_different_step=None if equal else first_different(figures["losses"], figures["losses_reference"]),
            detail=f"stage {kill['stage']} killed; result {'equal' if figures['ok'] else 'DIFFERENT'}",
        )
        for kill in stages
    ]
    broker = [kill for kill in figures["kills"] if kill["stage"] == "broker"]
    speeds = {name: figures[name] for name in ("tokens_per_s", "tokens_per_s_undisturbed") if name in figures}
    return {
        "runs": [asdict(run) for run in runs],
        "lost_steps": figures["lost_steps"],
        "broker_kills": broker,
        **speeds,
    }


# --------------------------------------------------------------------------------------------------------- comparison


def is_(name: str) -> Callable[[Event], bool]:
    return lambda event: event["event"] == name


def commits(event: Event) -> bool:
    return event["event"] == "attempt" and event["committed"]


def last_words(child: Child) -> str | None:
    done = child.first(is_("done"))
    return None if done is None else done["square"]


def losses(events: Sequence[Event]) -> dict[int, float]:
    """step -> loss of what counted."""
    return {event["step"]: event["loss"] for event in events if "loss" in event and event.get("committed", True)}


def compare(plain: dict[int, float], disturbed: dict[int, float]) -> dict[str, Any]:
    steps = sorted(plain.keys() & disturbed.keys())
    different = next((step for step in steps if plain[step].hex() != disturbed[step].hex()), None)
    missing = plain.keys() - disturbed.keys()
    return {
        "losses_compared": len(steps),
        "losses_equal": different is None and not missing,
        "first_different_step": different,
    }


def first_different(ours: Sequence[float], plain: Sequence[float]) -> int | None:
    return next((step for step, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)


def run_torchft(directory: Path, rival: Torchft, kills: int) -> dict[str, Any]:
    versions = rival.check()
    plain = rival.undisturbed(fresh(directory / "plain"))
    step_s = step_times(plain[0].events, "attempt")
    runs, wrapped = [], []
    for number, fraction in enumerate(fractions(kills)):
        runs.append(asdict(rival.killed(fresh(directory / str(number)), 10, fraction * step_s, plain)))
        wrapped.append(rival.wrapped(fresh(directory / f"wrapper-{number}"), 10, fraction * step_s))
    return {"versions": versions, "step_s": step_s, "runs": runs, "own_wrapper": wrapped}


def run_pipelining(directory: Path, rival: Pipelining, kills: int) -> dict[str, Any]:
    plain = rival.undisturbed(fresh(directory / "plain"))
    step_s = step_times(plain, "step")
    runs, alone = [], []
    for number, fraction in enumerate(fractions(kills)):
        victim, step = (1 + number) % RANKS, 15 + number
        runs.append(asdict(rival.killed(fresh(directory / str(number)), step, fraction * step_s, victim, plain)))
        alone.append(rival.unsupervised(fresh(directory / f"alone-{number}"), 5, fraction * step_s, victim))
    return {"step_s": step_s, "runs": runs, "unsupervised": alone}


def fractions(count: int) -> list[float]:
    """Moments within a step, evenly spread."""
    return [(number + 0.5) / count for number in range(count)]


def fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def step_times(events: Sequence[Event], name: str) -> float:
    """Median seconds of an undisturbed step."""
    moments = [event["at_s"] for event in events if event["event"] == name]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(moments))


def show(report: dict[str, Any]) -> None:
    print(f"\n{'':<28} {'noticed':>9} {'next step':>10} {'all back':>9}  {'redone':>6} {'rows lost':>9}  losses")
    for name, system in report["systems"].items():
        if "missing" in system:
            print(f"{name:<28} left out: {system['missing']}")
            continue
        for run in system["runs"]:
            equal = "equal to the bit"
            if not run["losses_equal"]:
                equal = f"different from step {run['first_different_step']} on"
            seconds = [
                "-" if run[key] is None else f"{run[key]:.2f} s" for key in ("detected_s", "recovered_s", "whole_s")
            ]
            print(
                f"{name:<28} {seconds[0]:>9} {seconds[1]:>10} {seconds[2]:>9}  {run['steps_redone']:>6} "
                f"{run['samples_missing']:>9}  {equal} ({run['detail']})"
            )


def footnotes(systems: dict[str, Any]) -> list[str]:
    """What the table has no column for."""
    notes = []
    for run in systems.get("torchft", {}).get("own_wrapper", []):
        said = f"went on after {run['recovered_s']:.2f} s" if run["survived"] else f"ended: {run['last_words'][-1]}"
        notes.append(f"torchft with its own DistributedDataParallel, replica killed: the survivor {said}")
    for run in systems.get("torch pipelining", {}).get("unsupervised", []):
        ends = [other["ended_after_s"] for other in run["others"].values()]
        hung = sum(end is None for end in ends)
        last_s = max((end for end in ends if end is not None), default=0.0)
        notes.append(
            f"torch pipelining without a supervisor, rank {run['victim']} killed: {len(ends) - hung} of {len(ends)} "
            f"ranks ended with an error within {last_s:.2f} s, {hung} hung for {run['watched_s']:.0f} s"
        )
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--torchft-python", default=sys.executable, help="an interpreter that has torchft")
    parser.add_argument("--only", default="", help="names of systems, separated by semicolons")
    parser.add_argument("--json", type=Path, default=Path("recovery-benchmark.json"))
    parser.add_argument("--keep", type=Path, help="a folder for logs; without it they are deleted")
    options = parser.parse_args()
    systems: dict[str, Callable[[Path], dict[str, Any]]] = {
        "FusionAI": lambda folder: fusionai(folder, options.kills),
        "torchft": lambda folder: run_torchft(folder, Torchft(options.torchft_python, options.layers), options.kills),
        "torch pipelining": lambda folder: run_pipelining(folder, Pipelining(options.layers), options.kills),
    }
    wanted = [name.strip() for name in options.only.split(";") if name.strip()]
    unknown = set(wanted) - systems.keys()
    if unknown:
        parser.error(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(systems)}")
    report: dict[str, Any] = {
        "schema": "fusionai.benchmark.recovery/1",
        "layers": options.layers,
        "cores": os.cpu_count(),
        "systems": {},
    }
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusion-recovery-")))
        for name, system in systems.items():
            if wanted and name not in wanted:
                continue
            folder = root / name.replace(" ", "-")
            folder.mkdir(parents=True)
            print(f"{name} ...", flush=True)
            try:
                report["systems"][name] = system(folder)
            except RivalMissing as missing:
                report["systems"][name] = {"missing": str(missing)}
    report["finished_at"] = time.strftime("%Y-%m-%d %H:%M:%S")
    show(report)
    print("\n".join(footnotes(report["systems"])))
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written: {options.json}")


if __name__ == "__main__":
    main()
