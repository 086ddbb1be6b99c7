"""Whether quantised files stay packed: only if every machine of the pool can multiply by them so."""

from __future__ import annotations

import pytest

from fusionai.client.serving.planning import can_stay_packed
from fusionai.ir.packed import with_packed
from fusionai.ir.schema import Graph, PackedPart, Packing, ParamSpec
from fusionai.scheduling.problem.types import PeerProfile


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ([("fp32", "packed"), ("packed",)], True),
        ([("fp32", "packed"), ("fp32", "bf16")], False),
        ([("packed",), ()], False),
    ],
)
def test_packed_matrices_need_machines_that_can_keep_them(formats: list[tuple[str, ...]], expected: bool) -> None:
    peers = [
        PeerProfile(peer=f"p{number}", flops_per_s=1e9, memory_bytes=10**9, weight_formats=known)
        for number, known in enumerate(formats)
    ]
    packing = Packing(form="gguf", shape=(2, 256), parts=(PackedPart("uint8", (2, 144)),), kind="Q4_K")
    spec = ParamSpec(key="w", kind="parameter", shape=(2, 256), dtype="float32")
    graph = Graph(name="g", symbols={}, inputs=(), outputs={}, values={}, params={"w": spec}, nodes=())
    assert can_stay_packed(with_packed(graph, {"w": (packing,)}), peers) == expected
    assert not can_stay_packed(graph, peers)
