"""Checkpoint and evaluation that are in progress in a training job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Saves:
    saving: int | None = None
    """Step of the checkpoint that is being written."""
    asked: bool = False
    """Whether stages must be asked to export their state before they are fed."""
    evaluating: int | None = None
    """Step of the state that is being evaluated."""
    named: int = -1
    """Step of the best state that was last announced."""
