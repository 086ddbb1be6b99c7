from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fusionai.client.training.recorder import TensorBoardCurves


@pytest.mark.slow
def test_curves_land_in_an_event_file(tmp_path: Path) -> None:
    curves = TensorBoardCurves(tmp_path)
    curves.step(1, loss=2.5, learning_rate=0.25, grad_norm=1.5, tokens_per_s=512.0)
    curves.evaluation(1, 2.75)
    curves.close()
    assert scalars(tmp_path) == {
        ("train/loss", 1): 2.5,
        ("train/learning_rate", 1): 0.25,
        ("train/grad_norm", 1): 1.5,
        ("train/tokens_per_s", 1): 512.0,
        ("eval/loss", 1): 2.75,
    }


def test_importing_does_not_load_tensorboard() -> None:
    code = "import sys, fusionai.client.training.recorder; sys.exit('tensorboardX' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def scalars(directory: Path) -> dict[tuple[str, int], float]:
    from tensorboardX.proto.event_pb2 import Event

    found: dict[tuple[str, int], float] = {}
    (path,) = directory.iterdir()
    raw = path.read_bytes()
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<Q", raw, position)
        event = Event.FromString(raw[position + 12 : position + 12 + length])
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
        position += 12 + length + 4
    return found
