"""Writes a job's telemetry (JSONL) and TensorBoard curves from its events.

It never delays the job: telemetry that can't be written in time is dropped and counted, and a failing disk is reported
once. `client.training.train` feeds it, `telemetry` writes.
"""

from __future__ import annotations

from collections.abc import Callable

from fusionai.primitives.ids import JobId, PeerId
from fusionai.storage.rundir import RunDirectory
from fusionai.telemetry.recorder import Recorder, TensorBoardCurves
from fusionai.training import progress


class JobRecords:
    """Telemetry and curves of one job. `warn` receives, once, what can't be written."""

    def __init__(
        self,
        directory: RunDirectory,
        job: JobId,
        peer: PeerId,
        plan_version: int,
        *,
        tensorboard: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._warned = False
        self._recorder = Recorder(directory.telemetry, job=job, peer=peer, plan_version=plan_version)
        self._curves: TensorBoardCurves | None = None
        if tensorboard:
            try:
                self._curves = TensorBoardCurves(directory.tensorboard)
            except OSError as error:
                warn(f"no TensorBoard output: {directory.tensorboard} can't be written ({error.strerror or error})")

    def see(self, event: progress.Progress) -> None:
        match event:
            case progress.StepDone():
                self._step(event)
            case progress.Evaluated(step=step, loss=loss):
                self._recorder.record_metric("eval.loss", loss, step=step)
                if self._curves is not None:
                    self._curves.evaluation(step, loss)
            case progress.PlanChanged(plan=plan):
                self._recorder.use_plan(plan.version)
            case _:
                return
        if self._recorder.failure is not None and not self._warned:
            self._warned = True
            self._warn(f"telemetry stopped: {self._recorder.failure}")

    def _step(self, event: progress.StepDone) -> None:
        record = event.record
        self._recorder.record_step(
            record.step,
            {
                "train.loss": record.loss,
                "train.learning_rate": record.learning_rate,
                "train.grad_norm": record.total_norm,
                "train.tokens_per_s": event.tokens_per_s,
                "train.step_s": event.step_s,
            },
            event.spans,
        )
        if self._curves is not None:
            self._curves.step(
                record.step,
                loss=record.loss,
                learning_rate=record.learning_rate,
                grad_norm=record.total_norm,
                tokens_per_s=event.tokens_per_s,
            )

    def close(self) -> None:
        self._recorder.close()
        if self._curves is not None:
            self._curves.close()
