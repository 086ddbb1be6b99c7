"""Example inputs for a capture, made from a batch of the job's data: the batch size varies, every other size is fixed.

Neighbours: `client.training.preparation` provides the batch, `capture.capture` takes the examples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusionai.backends.torch.host import to_torch
from fusionai.capture.tasks import ExampleInput
from fusionai.primitives.tensors import HostTensor


def examples_of(batch: Mapping[str, HostTensor]) -> dict[str, ExampleInput]:
    """Return one example per input, in the batch's order."""
    return {name: ExampleInput(to_torch(tensor, torch.device("cpu"), own=True)) for name, tensor in batch.items()}
