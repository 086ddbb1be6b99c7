"""A machine that stands by has imported all it needs to take a stage over, and no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusionai.ir import schema

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import fusionai.execution.training.stages
from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.ir.validate import parse
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import OptimizerSpec, StageOptions

backend = TorchBackend("cpu", threads=1)
backend.probe()
backend.warm_up()
warm = set(sys.modules)
program = backend.load(
    parse(Path(sys.argv[1]).read_bytes()), grad_inputs=(), options=StageOptions(optimizer=OptimizerSpec())
)
program.initialise()
host = lambda array: host_tensor(str(array.dtype), array.shape, array.tobytes())
fed = {"ids": host(np.arange(10).reshape(2, 5)), "labels": host(np.zeros((2, 5), dtype=np.int64))}
program.forward(Call("train", 0, 0), fed)
program.backward(Call("train", 0, 0), {"loss": host(np.asarray(np.float32(1.0)))})
backend.clip_scale(list(program.gradient_norms().values()), 1.0)
program.apply(scale=1.0, learning_rate=0.1)
came = {name for name in set(sys.modules) - warm if name.startswith(("torch", "sympy"))}
print(sorted(came), "torch._dynamo" in sys.modules)
"""


def test_after_it_loading_and_training_import_nothing_of_torch_and_no_compiler(kit, tmp_path: Path) -> None:
    stored = tmp_path / "graph.json"
    stored.write_bytes(schema.encode(kit.mlp_graph()))
    said = subprocess.run([sys.executable, "-c", SCRIPT, str(stored)], capture_output=True, text=True, check=False)
    assert said.stdout.strip() == "[] False", said.stderr
