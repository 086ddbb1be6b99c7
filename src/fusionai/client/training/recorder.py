"""Writes steps and metrics of a job to a JSONL file and to TensorBoard.

A record consists of numbers, a name from a closed set, and the ids it belongs to. It has no field for free text, so no
text of the data, token or secret can get into a file. A thread of its own writes the file; a full queue drops records
and counts them, so that recording never blocks training. tensorboardX is loaded only when used.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Annotated, Final, Literal, TextIO, get_args

import msgspec
from msgspec import Meta

from fusionai.wire.messages import Span, WorkKind

MetricName = Literal[
    "train.loss",
    "train.learning_rate",
    "train.grad_norm",
    "train.tokens_per_s",
    "train.step_s",
    "eval.loss",
    "telemetry.dropped",
]
WORK_KINDS: Final[frozenset[str]] = frozenset(get_args(WorkKind))
METRIC_NAMES: Final[frozenset[str]] = frozenset(get_args(MetricName))

_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")
"""An id: up to 128 lower-case letters, digits and dashes, with no dash at the start."""
Id = Annotated[str, Meta(max_length=128, pattern=r"^[a-z0-9][a-z0-9-]*$")]


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ids in every record. Raises `ValueError` for an invalid id, so that no free text gets in as an id."""

    job: Id
    peer: Id
    plan_version: int

    def __post_init__(self) -> None:
        for name, value in (("job", self.job), ("peer", self.peer)):
            if not _ID.fullmatch(value):
                raise ValueError(f"expected the {name} as lower-case letters, digits and dashes, got {value!r}")


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A piece of a stage's work. It is encoded as an array of whole microseconds, which takes a tenth of an object's
    size, since a step has hundreds of pieces. `start_us` is relative to the record's `at_s`. It is negative, because a
    step's work ends before its commit."""

    kind: WorkKind
    microbatch: int
    start_us: int
    took_us: int

    def __post_init__(self) -> None:
        if self.kind not in WORK_KINDS:
            raise ValueError(f"unknown work {self.kind!r}; known: {', '.join(sorted(WORK_KINDS))}")


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="step"):
    """A training step, in one line. `busy_s` is always present, `work` only in some of the steps."""

    origin: Origin
    step: int
    at_s: float
    metrics: dict[MetricName, float | None]
    busy_s: dict[int, float]
    """Stage -> seconds it computed, without waiting and sending."""
    work: dict[int, tuple[Work, ...]] = {}
    """Stage -> its pieces of work, in the order in which they ran."""

    def __post_init__(self) -> None:
        if unknown := self.metrics.keys() - METRIC_NAMES:
            raise ValueError(f"unknown metric {min(unknown)!r}; known: {', '.join(sorted(METRIC_NAMES))}")


class MetricRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="metric"
):
    """A number at a step. `value` is None if it was infinite or NaN, which JSON can't express."""

    name: MetricName
    origin: Origin
    step: int
    stage: int | None = None
    at_s: float
    value: float | None

    def __post_init__(self) -> None:
        if self.name not in METRIC_NAMES:
            raise ValueError(f"unknown metric {self.name!r}; known: {', '.join(sorted(METRIC_NAMES))}")


Record = StepRecord | MetricRecord


_CAPACITY: Final = 65_536
"""Records that may wait to be written (chosen)."""
_POLL_S: Final = 0.1
"""Seconds without a record after which the file is flushed and a close is noticed (chosen)."""
_CLOSE_S: Final = 5.0
"""Seconds that `close` waits for the disk (chosen)."""
DETAIL_EVERY_S: Final = 10.0
"""Smallest number of seconds between two steps whose pieces of work are written (chosen)."""
_NOT_BUSY: Final[frozenset[WorkKind]] = frozenset({"send", "wait"})
"""Kinds of work that do not count as busy time."""


class Recorder:
    """Records steps and metrics in one file, for one process. Safe to call from any thread; `close` writes out what is
    queued. `clock`: monotonic seconds, for the times of records. Raises `ValueError` in the caller's thread, at once,
    for ids or names outside the closed sets."""

    def __init__(
        self,
        path: Path,
        *,
        job: str,
        peer: str,
        plan_version: int = 0,
        capacity: int = _CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._origin = Origin(job=job, peer=peer, plan_version=plan_version)
        self._clock = clock
        self._queue: Queue[Record] = Queue(maxsize=capacity)
        self._dropped = 0
        self._dropped_lock = threading.Lock()
        self._failure: OSError | None = None
        self._next_detail_s = float("-inf")
        self._closing = threading.Event()
        self._path = path
        self._thread = threading.Thread(target=self._write, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of records lost so far."""
        return self._dropped

    @property
    def failure(self) -> OSError | None:
        """The error that keeps the file from being written, None if there is none."""
        return self._failure

    def use_plan(self, version: int) -> None:
        """Use this plan version for all later records."""
        self._origin = msgspec.structs.replace(self._origin, plan_version=version)

    def record_step(self, step: int, metrics: Mapping[MetricName, float], pieces: Mapping[int, Sequence[Span]]) -> None:
        """Record a step. `pieces`: stage -> its work in this step."""
        at_s = self._clock()
        detailed = at_s >= self._next_detail_s
        if detailed:
            self._next_detail_s = at_s + DETAIL_EVERY_S
        self._put(
            StepRecord(
                origin=self._origin,
                step=step,
                at_s=at_s,
                metrics={name: _finite(value) for name, value in metrics.items()},
                busy_s={stage: _busy_s(own) for stage, own in pieces.items()},
                work={stage: tuple(_work(piece, at_s) for piece in own) for stage, own in pieces.items()}
                if detailed
                else {},
            )
        )

    def record_metric(self, name: MetricName, value: float, *, step: int, stage: int | None = None) -> None:
        self._put(self._metric(name, value, step, stage))

    def close(self) -> None:
        """Write out what is queued, for at most 5 s if the disk hangs. Calling it twice is harmless."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _put(self, record: Record) -> None:
        if self._closing.is_set() or self._failure is not None:
            self._drop()
            return
        try:
            self._queue.put_nowait(record)
        except Full:
            self._drop()

    def _drop(self) -> None:
        with self._dropped_lock:
            self._dropped += 1

    def _metric(self, name: MetricName, value: float, step: int, stage: int | None) -> MetricRecord:
        return MetricRecord(
            name=name,
            origin=self._origin,
            step=step,
            stage=stage,
            at_s=self._clock(),
            value=_finite(value),
        )

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                self._drain(file)
        except OSError as error:
            self._failure = error
            while not self._queue.empty():
                self._queue.get_nowait()
                self._drop()

    def _drain(self, file: TextIO) -> None:
        step = reported = 0
        while True:
            try:
                record = self._queue.get(timeout=_POLL_S)
            except Empty:
                # Read once, because the count may grow meanwhile.
                if (dropped := self._dropped) > reported:
                    reported = dropped
                    file.write(_line(self._metric("telemetry.dropped", dropped, step, None)))
                file.flush()
                if self._closing.is_set():
                    return
            else:
                step = record.step
                file.write(_line(record))


def _line(record: Record) -> str:
    return msgspec.json.encode(record).decode() + "\n"


def _finite(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _busy_s(pieces: Sequence[Span]) -> float:
    return round(sum(piece.end_s - piece.start_s for piece in pieces if piece.kind not in _NOT_BUSY), 6)


def _work(piece: Span, at_s: float) -> Work:
    return Work(
        piece.kind,
        piece.microbatch,
        round((piece.start_s - at_s) * 1e6),
        round((piece.end_s - piece.start_s) * 1e6),
    )


class TensorBoardCurves:
    """Event files in `directory`. Raises `OSError` if the directory can't be written."""

    def __init__(self, directory: Path) -> None:
        # Imported here, because it is slow to import and most commands never draw a curve.
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), max_queue=1000, flush_secs=10)

    def step(self, step: int, *, loss: float, learning_rate: float, grad_norm: float, tokens_per_s: float) -> None:
        """Record a committed training step."""
        self._writer.add_scalar("train/loss", loss, step)
        self._writer.add_scalar("train/learning_rate", learning_rate, step)
        self._writer.add_scalar("train/grad_norm", grad_norm, step)
        self._writer.add_scalar("train/tokens_per_s", tokens_per_s, step)

    def evaluation(self, step: int, loss: float) -> None:
        """Record the loss on the evaluation split after `step` steps."""
        self._writer.add_scalar("eval/loss", loss, step)

    def close(self) -> None:
        self._writer.close()
