from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fusionai.primitives.clock import VirtualClock
from fusionai.telemetry.recorder import Recorder, read_records
from fusionai.telemetry.records import MetricRecord, SpanRecord


def recorder(path: Path, **settings: object) -> Recorder:
    return Recorder(path, job="demo-0a1b2c3d", peer="abcdefgh", **settings)  # pyright: ignore[reportArgumentType]


def test_spans_and_metrics_come_back_with_their_origin(tmp_path: Path) -> None:
    clock = VirtualClock(10.0)
    sink = recorder(tmp_path / "deep" / "telemetry.jsonl", clock=clock.now_s, plan_version=3)
    with sink.span("stage.forward", step=4, stage=1, microbatch=2):
        clock.advance(0.5)
    sink.use_plan(4)
    sink.record_metric("train.loss", 2.5, step=5)
    sink.close()
    span, metric = read_records(tmp_path / "deep" / "telemetry.jsonl")
    assert isinstance(span, SpanRecord)
    assert (span.name, span.step, span.stage, span.microbatch) == ("stage.forward", 4, 1, 2)
    assert (span.start_s, span.end_s) == (10.0, 10.5)
    assert (span.origin.job, span.origin.peer, span.origin.plan_version) == ("demo-0a1b2c3d", "abcdefgh", 3)
    assert isinstance(metric, MetricRecord)
    assert (metric.name, metric.value, metric.origin.plan_version) == ("train.loss", 2.5, 4)


def test_a_span_is_recorded_when_its_body_raises(tmp_path: Path) -> None:
    sink = recorder(tmp_path / "t.jsonl")
    with pytest.raises(RuntimeError), sink.span("eval.run", step=1):
        raise RuntimeError
    sink.close()
    assert [record.name for record in read_records(tmp_path / "t.jsonl")] == ["eval.run"]


def test_numbers_json_has_no_word_for_become_null(tmp_path: Path) -> None:
    sink = recorder(tmp_path / "t.jsonl")
    for value in (float("nan"), float("inf")):
        sink.record_metric("train.grad_norm", value, step=1)
    sink.close()
    values = [r.value for r in read_records(tmp_path / "t.jsonl") if isinstance(r, MetricRecord)]
    assert values == [None, None]


@pytest.mark.parametrize("text", ["def f(x): return x", "Hello", "", "a" * 200, "naïve", "a\n"])
def test_text_is_refused_where_a_name_or_id_belongs(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="expected the job"):
        Recorder(tmp_path / "t.jsonl", job=text, peer="abc")
    with pytest.raises(ValueError, match="expected the peer"):
        Recorder(tmp_path / "t.jsonl", job="abc", peer=text)
    sink = recorder(tmp_path / "t.jsonl")
    with pytest.raises(ValueError, match="unknown metric"):
        sink.record_metric(text, 1.0, step=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown span"):
        sink.record_span(text, step=1, start_s=0, end_s=1)  # pyright: ignore[reportArgumentType]
    sink.close()
    assert (tmp_path / "t.jsonl").read_bytes() == b""


def test_a_slow_disk_drops_and_counts_instead_of_blocking(tmp_path: Path) -> None:
    blocked, entered = threading.Event(), threading.Event()

    class SlowPath(type(tmp_path)):
        def open(self, *arguments: object, **options: object) -> object:  # pyright: ignore
            entered.set()
            blocked.wait()
            return super().open(*arguments, **options)  # pyright: ignore

    path = SlowPath(tmp_path / "t.jsonl")
    sink = recorder(path, capacity=8)
    assert entered.wait(5)
    started_s = time.monotonic()
    for step in range(1000):
        sink.record_metric("train.loss", 1.0, step=step)
    assert time.monotonic() - started_s < 2
    assert sink.dropped == 992
    blocked.set()
    sink.close()
    records = list(read_records(tmp_path / "t.jsonl"))
    assert [r.step for r in records[:8]] == list(range(8))
    last = records[-1]
    assert isinstance(last, MetricRecord)
    assert (last.name, last.value) == ("telemetry.dropped", 992.0)


def test_a_file_that_cannot_be_written_does_not_stop_anybody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    sink = recorder(tmp_path / "file" / "t.jsonl")
    sink.record_metric("train.loss", 1.0, step=1)
    sink.close()
    sink.record_metric("train.loss", 1.0, step=2)
    assert isinstance(sink.failure, OSError)
    assert sink.dropped >= 1


def test_records_of_many_threads_are_whole_lines(tmp_path: Path) -> None:
    sink = recorder(tmp_path / "t.jsonl")

    def work(stage: int) -> None:
        for step in range(200):
            sink.record_metric("stage.busy", 0.5, step=step, stage=stage)

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    sink.close()
    records = list(read_records(tmp_path / "t.jsonl"))
    assert len(records) == 800
    assert sink.dropped == 0


def test_a_torn_last_line_ends_the_reading(tmp_path: Path) -> None:
    sink = recorder(tmp_path / "t.jsonl")
    sink.record_metric("eval.loss", 1.0, step=1)
    sink.close()
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write('{"kind":"met')
    assert [r.step for r in read_records(tmp_path / "t.jsonl")] == [1]
