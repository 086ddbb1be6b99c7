"""Writes a job's curves for TensorBoard. tensorboardX is loaded only when used."""

from __future__ import annotations

from pathlib import Path


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
