"""A pool of real processes for tests of the command line: the shipped `fusion broker` and `fusion join` on loopback.

Also runs `fusion` in this process, which saves the start of an interpreter and of torch per command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, TypeVar, Unpack
from unittest.mock import patch

from fusionai.capture.capture import Captured, CaptureOptions, capture
from fusionai.capture.models.source import ConfigSource, ModelSource
from fusionai.cli.main import main
from fusionai.client.pool.session import OWNER_DIRECTORY
from fusionai.execution.measurement import FILE as MEASUREMENT
from harness.patience import CEILING_S
from harness.zygote import Child, forking, of_this_process

PATIENCE_S = CEILING_S

T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """What a command left: exit code and what it said."""

    code: int
    out: str
    err: str


_captured: Final[dict[str, Captured]] = {}


def captured_once(source: ModelSource, **options: Unpack[CaptureOptions]) -> Captured:
    """`capture`; a configuration that this process has captured with the same options is not captured again, which
    takes seven seconds. The comparison with the module is made each time."""
    if not isinstance(source, ConfigSource) or options.get("adapter") or options.get("example_inputs"):
        return capture(source, **options)
    key = repr((source, sorted(options.items())))
    if key not in _captured:
        _captured[key] = capture(source, **options)
    return _captured[key]


def fusion(*arguments: object) -> Done:
    """One command in this process, which is no program that lasts: what stays is not set aside, which would take
    half a second each time for all that the tests have imported."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as within:
        within.enter_context(contextlib.redirect_stdout(out))
        within.enter_context(contextlib.redirect_stderr(err))
        for program in ("training.train", "serving.serve"):
            within.enter_context(patch(f"fusionai.client.{program}.set_aside_what_stays"))
        within.enter_context(patch("fusionai.client.training.preparation.capture", captured_once))
        within.enter_context(forking())
        code = main([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


def processes_at(directory: Path) -> list[int]:
    """Other processes whose command names the directory, or that have something open below it: what is forked has no
    command of its own."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
            named = [(process / "cmdline").read_bytes().decode(errors="replace"), *links]
            if int(process.name) != os.getpid() and any(str(directory) in one for one in named):
                found.append(int(process.name))
    return found


class Process:
    """One command in a process of its own, its lines as they come (stdout and stderr together)."""

    started: ClassVar[list[Process]] = []

    def __init__(self, *arguments: object, program: Sequence[object] = ()) -> None:
        """`python -m fusionai`, by a fork where nobody looks at what the process has loaded; or another program."""
        command = [str(argument) for argument in arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process: Child | subprocess.Popen[str]
        if program or {"jax", "onnxruntime"} & set(command):
            self.process = subprocess.Popen(
                [sys.executable, *map(str, program or ("-m", "fusionai")), *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                env=environment,
            )
        else:
            self.process = of_this_process().start(command, environment)
        self.lines: list[str] = []
        self.came_at_s: list[float] = []
        """When each line came, seconds since 1970."""
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        Process.started.append(self)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                with self._said:
                    self.lines.append(line)
                    self.came_at_s.append(time.time())
                    self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def wait_for(self, words: str) -> str:
        found = self.wait_until(lambda: next((line for line in self.lines if words in line), None))
        if found is None:
            raise AssertionError(f"{words!r} never came; said: {self.text}")
        return found

    def wait_until(self, answer: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T | None:
        """What `answer` gives, asked whenever a line comes; None when it never gave any, or the process ended."""
        deadline_s = time.monotonic() + patience_s
        with self._said:
            while (given := answer()) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._reader.is_alive():
                    return None
                self._said.wait(left_s)
        return given

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        """The exit code, once it is there."""
        code = self.process.wait(timeout=PATIENCE_S)
        self._reader.join()
        return code

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


@dataclass
class LivePool:
    """`with LivePool(directory, peers=("one", "two")) as pool`. Every process is killed at the end."""

    directory: Path
    peers: tuple[str, ...] = ()
    broker: Process = field(init=False)
    members: dict[str, Process] = field(default_factory=dict)
    port: str = "0"
    broker_options: tuple[str, ...] = ()
    measured: ClassVar[bytes] = b""
    """What the first peer of all pools measured and kept. Each later one finds it beside it, and the owner in its home,
    as after a restart: a measurement takes three seconds of a core, and for a peer a process of its own."""

    def __enter__(self) -> LivePool:
        self.open_broker()
        try:
            for name in self.peers:
                self.start(name, self.invite())
                if not LivePool.measured:
                    self.members[name].wait_for("In pool")
                    LivePool.measured = (self.directory / name / MEASUREMENT).read_bytes()
            for name in self.peers:
                self.members[name].wait_for("In pool")
            entered = fusion("join", self.invite(), "--owner", "--home", self.owner)
            assert entered.code == 0, entered.err
            if LivePool.measured:
                (self.owner / OWNER_DIRECTORY / MEASUREMENT).write_bytes(LivePool.measured)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in Process.started:  # a job whose test failed too: without its pool it would wait for ever
            process.end()
        Process.started.clear()

    @property
    def owner(self) -> Path:
        """The job owner's home."""
        return self.directory / "owner"

    def open_broker(self) -> None:
        """Again on the same home and port, it is the same pool."""
        self.broker = Process(
            *("broker", "--home", self.directory / "broker", "--host", "127.0.0.1", "--port", self.port),
            *self.broker_options,
        )
        self.broker.wait_for("Press Ctrl-C")
        self.port = re.findall(r"127\.0\.0\.1:(\d+)", self.broker.text)[0]

    def invite(self, *more: object) -> str:
        said = fusion("invite", "--home", self.directory / "broker", *more)
        assert said.code == 0, said.err
        return re.findall(r"fusion1-\S+", said.out)[0]

    def start(self, name: str, *more: object, program: Sequence[object] = ()) -> Process:
        """`fusion join` in the background; without an invitation, as who it was before."""
        beside = self.directory / "measured"
        if LivePool.measured and not beside.exists():
            beside.mkdir(parents=True)
            (beside / MEASUREMENT).write_bytes(LivePool.measured)
        self.members[name] = Process(
            *("join", *more, "--home", self.directory / name, "--host", "127.0.0.1"),
            *("--threads", "1", "--name", name, "--max-memory", "1GB", "--measured-beside", beside),
            program=program,
        )
        return self.members[name]

    def kill(self, name: str) -> None:
        self.members.pop(name).end()


TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write_recipe(path: Path, **changes: object) -> Path:
    """A recipe that trains a tiny model in moments. `changes`: `table__key=value`, or `table=None` to leave out;
    None leaves a key out."""
    tables: dict[str, dict[str, object]] = {
        "job": {"name": "tiny", "steps": 4, "seed": 1, "directory": "run"},
        "model": {"config": dict(TINY)},
        "data": {"files": ["text.txt"], "sequence_length": 32, "tokenizer": {"train": 300}},
        "train": {"batch_size": 4, "microbatches": 2, "learning_rate": 1e-3},
        "privacy": {"level": "encrypted"},
    }
    for name, value in changes.items():
        table, _, key = name.partition("__")
        if not key:
            assert isinstance(value, dict)
            tables[table] = value
        elif value is None:
            tables[table].pop(key, None)
        else:
            tables.setdefault(table, {})[key] = value
    lines = [
        f"[{table}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in keys.items())
        for table, keys in tables.items()
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


WORDS: Final = (
    *("seven", "wizards", "boil", "eleven", "green", "frogs", "near", "a", "broken", "bridge"),
    *("at", "dawn", "while", "nobody", "looks"),
)


def write_text(path: Path, lines: int = 120) -> Path:
    """Text with some order in it, the same every time."""
    made = (" ".join(WORDS[(line * 7 + place * place) % len(WORDS)] for place in range(40)) for line in range(lines))
    path.write_text(".\n".join(made), encoding="utf-8")
    return path


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value)
        case list() | tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case dict():
            return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
        case _:
            return repr(value)
