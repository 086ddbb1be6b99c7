from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.optimizers import StageOptimizer
from fusionai.wire.messages import OptimizerSpec

backend = TorchBackend("cpu", threads=1)
cold = len(sys.modules)
backend.warm_up()
warm = set(sys.modules)
weight = torch.ones(2, requires_grad=True)
(weight * weight).sum().backward()
StageOptimizer(OptimizerSpec(kind="adamw"), {"weight": weight}).step(0.1)
print(len(warm) > cold, sorted(set(sys.modules) - warm))
"""


@pytest.mark.slow
def test_after_it_the_first_step_imports_nothing() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "True []"
