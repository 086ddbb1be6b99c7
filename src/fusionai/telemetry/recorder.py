"""Writes steps and metrics to a JSONL file from a thread of its own, without ever blocking a caller.

Every step gets one line with its numbers. Its pieces of work take many times that space, so they are written at most
once per `DETAIL_EVERY_S`, and a job of days leaves a file of megabytes.

Callers put records into a bounded queue. If the disk is slower, records are dropped and counted, and the count is
written as the metric `telemetry.dropped`. If the file can't be written, `failure` has the reason, later records count
as dropped, and the job continues. `records` has the schema.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Final, Protocol, TextIO

import msgspec

from fusionai.telemetry.records import MetricName, MetricRecord, Origin, Record, StepRecord, Work, WorkKind

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


class Piece(Protocol):
    """A piece of a stage's work, with times on the recorder's clock."""

    @property
    def kind(self) -> WorkKind: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


class Recorder:
    """Records steps and metrics in one file, for one process. Safe to call from any thread; `close` writes out what is
    queued.

    `clock`: monotonic seconds, for the times of records. Raises `ValueError` in the caller's thread, at once, for ids
    or names outside the closed sets.
    """

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

    def record_step(
        self, step: int, metrics: Mapping[MetricName, float], pieces: Mapping[int, Sequence[Piece]]
    ) -> None:
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


def _busy_s(pieces: Sequence[Piece]) -> float:
    return round(sum(piece.end_s - piece.start_s for piece in pieces if piece.kind not in _NOT_BUSY), 6)


def _work(piece: Piece, at_s: float) -> Work:
    return Work(
        piece.kind,
        piece.microbatch,
        round((piece.start_s - at_s) * 1e6),
        round((piece.end_s - piece.start_s) * 1e6),
    )
