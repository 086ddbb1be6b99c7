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
backend.probe()
backend.warm_up()
warm = set(sys.modules)
weight = torch.ones(2, requires_grad=True)
(weight * weight).sum().backward()
backend.clip_scale([1.0, 2.0], 1.0)
StageOptimizer(OptimizerSpec(kind="adamw"), {"weight": weight}).step(0.1)
print(sorted(set(sys.modules) - warm), "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_after_it_the_first_step_imports_nothing_and_nothing_imports_the_compiler() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[] False"
