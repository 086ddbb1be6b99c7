"""Any model: a sample of the zoo in every run, all of it in the long one. docs/models.md shows the whole table."""

from __future__ import annotations

import pytest

from harness.universality import examine
from harness.zoo import Model, models

SAMPLE = ("t5", "resnet", "three outputs")
"""An encoder and a decoder, images, several results: what language models lack."""


MISSED = {
    "mobilenet_v2": "thirty-five norms over a batch make 3e-5 of JAX's rounding",
}


def marked(model: Model) -> list[pytest.MarkDecorator]:
    if model.name in MISSED:
        return [pytest.mark.long, pytest.mark.xfail(reason=MISSED[model.name], strict=True)]
    return [] if model.name in SAMPLE else [pytest.mark.long]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=marked(model)) for model in models()], ids=lambda model: model.name
)
def test_a_model_runs_on_every_backend_as_its_own_module(model: Model) -> None:
    if model.name not in SAMPLE:
        pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
        pytest.importorskip("onnxruntime", reason="the extra fusionai[onnxruntime] is not installed")
    row = examine(model, ("torch",) if model.name in SAMPLE else ("torch", "jax", "onnxruntime"))
    assert row.files.state != "missed", row.files.reason
    assert row.capture.state == "equal", row.capture.reason
    for cells in (row.forward, row.gradients, row.serving):
        for name, cell in cells.items():
            assert cell.state != "missed", f"{name}: {cell.reason}"
    assert not row.refused
