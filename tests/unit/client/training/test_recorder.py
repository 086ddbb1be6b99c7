from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from fusionai.client.training.recorder import MetricRecord, Recorder, StepRecord, Work
from fusionai.wire.messages import Span
from harness.virtual_clock import VirtualClock


def recorder(path: Path, **settings: object) -> Recorder:
    return Recorder(path, job="demo-0a1b2c3d", peer="abcdefgh", **settings)  # pyright: ignore[reportArgumentType]


def read_records(path: Path) -> list[StepRecord | MetricRecord]:
    """Oldest first."""
    return msgspec.json.Decoder(StepRecord | MetricRecord).decode_lines(path.read_bytes())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits until the writer has looked once more."""
    monkeypatch.setattr("fusionai.client.training.recorder._POLL_S", 0.01)


WORK = {1: (Span("forward", 2, 9.0, 9.25), Span("wait", 0, 9.25, 9.75), Span("backward", 2, 9.75, 9.999999))}


def test_steps_and_metrics_come_back_with_their_origin(tmp_path: Path) -> None:
    clock = VirtualClock(10.0)
    sink = recorder(tmp_path / "deep" / "telemetry.jsonl", clock=clock.now_s, plan_version=3)
    sink.record_step(4, {"train.loss": 2.75, "train.grad_norm": float("inf")}, WORK)
    sink.use_plan(4)
    sink.record_metric("eval.loss", 2.5, step=5)
    sink.close()
    step, metric = read_records(tmp_path / "deep" / "telemetry.jsonl")
    assert isinstance(step, StepRecord)
    assert (step.step, step.at_s, step.metrics) == (4, 10.0, {"train.loss": 2.75, "train.grad_norm": None})
    assert step.busy_s == {1: 0.499999}
    assert step.work == {
        1: (
            Work("forward", 2, -1_000_000, 250_000),
            Work("wait", 0, -750_000, 500_000),
            Work("backward", 2, -250_000, 249_999),
        )
    }
    assert (step.origin.job, step.origin.peer, step.origin.plan_version) == ("demo-0a1b2c3d", "abcdefgh", 3)
    assert isinstance(metric, MetricRecord)
    assert (metric.name, metric.value, metric.origin.plan_version) == ("eval.loss", 2.5, 4)


def test_single_pieces_of_work_are_written_for_one_step_in_ten_seconds(tmp_path: Path) -> None:
    clock = VirtualClock(0.0)
    path = tmp_path / "t.jsonl"
    sink = recorder(path, clock=clock.now_s)
    pieces = {stage: [Span("forward", n, n / 100, n / 100 + 0.009) for n in range(32)] for stage in range(4)}
    for step in range(100):  # 25 s
        sink.record_step(step, {"train.loss": 1.0}, pieces)
        clock.advance(0.25)
    sink.close()
    records = [record for record in read_records(path) if isinstance(record, StepRecord)]
    assert [record.step for record in records] == list(range(100))
    assert [record.step for record in records if record.work] == [0, 40, 80]
    assert all(record.busy_s == dict.fromkeys(range(4), 0.288) for record in records)
    assert path.stat().st_size < 100 * 400


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
    with pytest.raises(ValueError, match="unknown work"):
        sink.record_step(1, {}, {0: [Span(text, 0, 0, 1)]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown metric"):
        sink.record_step(1, {text: 1.0}, {})  # pyright: ignore[reportArgumentType]
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
    records = read_records(tmp_path / "t.jsonl")
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
            sink.record_metric("train.step_s", 0.5, step=step, stage=stage)

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    sink.close()
    records = read_records(tmp_path / "t.jsonl")
    assert len(records) == 800
    assert sink.dropped == 0
