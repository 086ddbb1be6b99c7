"""Spans and metrics into a JSONL file, from a thread of its own. Decides what is dropped; never makes anybody wait.

Callers put records in a bounded queue and go on. When the disk is slower than that, records are dropped and counted,
and the count is written as the metric `telemetry.dropped`. When the file can't be written, `failure` says why, records
from then on count as dropped, and the job goes on. Neighbours: `records` (the schema), training, execution, the peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Final, TextIO

import msgspec

from fusionai.telemetry.records import MetricName, MetricRecord, Origin, Record, SpanName, SpanRecord

_CAPACITY: Final = 65_536
_POLL_S: Final = 0.1
_CLOSE_S: Final = 5.0


class Recorder:
    """One file, one process. Safe to call from any thread; `close` writes out what is queued.

    `clock`: monotonic seconds, for the times of metrics and of `span`. Raises `ValueError` on ids or names that are
    not of the closed sets, at once and in the caller's thread.
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
        self._closing = threading.Event()
        self._path = path
        self._thread = threading.Thread(target=self._write, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records lost so far."""
        return self._dropped

    @property
    def failure(self) -> OSError | None:
        """Why the file can't be written, if it can't."""
        return self._failure

    def use_plan(self, version: int) -> None:
        """Records from now on carry this plan version."""
        self._origin = msgspec.structs.replace(self._origin, plan_version=version)

    def record_span(
        self,
        name: SpanName,
        *,
        step: int,
        start_s: float,
        end_s: float,
        stage: int | None = None,
        replica: int = 0,
        microbatch: int | None = None,
    ) -> None:
        self._put(
            SpanRecord(
                name=name,
                origin=self._origin,
                step=step,
                stage=stage,
                replica=replica,
                microbatch=microbatch,
                start_s=start_s,
                end_s=end_s,
            )
        )

    def record_metric(self, name: MetricName, value: float, *, step: int, stage: int | None = None) -> None:
        self._put(self._metric(name, value, step, stage))

    @contextmanager
    def span(
        self, name: SpanName, *, step: int, stage: int | None = None, microbatch: int | None = None
    ) -> Iterator[None]:
        """Record the body's time, also when it raises."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.record_span(name, step=step, start_s=start_s, end_s=self._clock(), stage=stage, microbatch=microbatch)

    def close(self) -> None:
        """Write out what is queued. Gives up after a few seconds on a disk that hangs; twice is harmless."""
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
            value=float(value) if isfinite(value) else None,
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
                # The count is read once: it may grow meanwhile.
                if (dropped := self._dropped) > reported:
                    reported = dropped
                    file.write(_line(self._metric("telemetry.dropped", dropped, step, None)))
                file.flush()
                if self._closing.is_set():
                    return
            else:
                step = record.step
                file.write(_line(record))


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, oldest first. A torn last line (the process was killed) ends it without complaint;
    anything else that is not a record raises `msgspec.DecodeError`."""
    decoder = msgspec.json.Decoder(SpanRecord | MetricRecord)
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield decoder.decode(line)


def _line(record: Record) -> str:
    return msgspec.json.encode(record).decode() + "\n"
