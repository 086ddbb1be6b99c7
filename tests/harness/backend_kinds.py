"""Machines of a pool in one process with backends of several kinds.

Neighbours: `harness.pool` and `harness.serving_pool` have the machines.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusionai.backends.interface import Backend
from fusionai.backends.torch.backend import TorchBackend


def opened(kind: str) -> Backend:
    if kind == "torch":
        return TorchBackend(device="cpu", threads=1)
    if kind == "onnxruntime":
        from fusionai.backends.onnxruntime.backend import OnnxBackend

        return OnnxBackend(device="cpu", threads=1)
    from fusionai.backends.jax.backend import JaxBackend

    return JaxBackend(device="cpu")


class Kinds:
    """Backends of the owner (torch), then of the peers."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._coming: Iterator[str] = iter(("torch", *kinds))

    def __call__(self) -> Backend:
        return opened(next(self._coming))
