"""A stage on ONNX Runtime: its state, which sessions keep in the forms that the library knows."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.ir.schema import Graph, InitOp, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.ir.weights import bfloat16_bits
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import StageOptions

pytest.importorskip("onnxruntime", reason="the extra fusionai[onnxruntime] is not installed")
from fusionai.backends.onnxruntime.backend import OnnxBackend


def test_bfloat16_parameters_keep_their_bits() -> None:
    graph = validate(
        Graph(
            name="shifted",
            inputs=("x",),
            outputs={"y": "y"},
            values={name: ValueSpec((3,), "bfloat16") for name in ("x", "y", "shift")},
            params={
                "shift": ParamSpec(
                    key="shift",
                    kind="parameter",
                    shape=(3,),
                    dtype="bfloat16",
                    init=(InitOp(op="fill", args=(1.5,)),),
                )
            },
            nodes=(Node(id=0, op="aten.add.Tensor", args=(Ref("x"), Ref("shift")), outputs=("y",)),),
        )
    )
    program = OnnxBackend("cpu").load(graph, grad_inputs=(), options=StageOptions())
    assert program.initialise() == ()
    ((_, first),) = program.export_entries(["model/shift"])
    assert bytes(first.data) == bfloat16_bits(np.full(3, 1.5, np.float32)).tobytes()
    given = host_tensor("bfloat16", (3,), bfloat16_bits(np.array([1.0, -2.5, 3.0], np.float32)).data)
    program.import_state([("model/shift", given)])
    assert [bytes(tensor.data) for _, tensor in program.export_state(("model",))] == [bytes(given.data)]
