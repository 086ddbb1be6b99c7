"""Run `torch.utils.checkpoint` as a plain call while a module is compared with its graph.

A checkpoint runs its function again in backward and would draw its random numbers again there, but the comparison
replays draws in forward only. Gradients are the same either way.

Neighbours: `capture.self_check` opens it; `capture.custom_gradients` does the same while tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint


class _Plain:
    """Stands for the autograd function that recomputes: only runs the function."""

    @staticmethod
    def apply(run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return run(*args)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """While open, checkpointed functions keep their activations instead of recomputing them."""
    module: Any = checkpoint
    reentrant, frames = module.CheckpointFunction, module._checkpoint_without_reentrant_generator

    def plainly(*_: Any, **__: Any) -> Iterator[None]:
        yield

    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = _Plain, plainly
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = reentrant, frames
