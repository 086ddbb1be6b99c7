"""Whether quantised files stay packed: only if every machine of the pool can multiply by them so. What local peers are
taken to be: equal."""

from __future__ import annotations

import pytest

from fusionai.client.serving.planning import can_stay_packed, equalised
from fusionai.ir.packed import with_packed
from fusionai.ir.schema import Graph, PackedPart, Packing, ParamSpec
from fusionai.scheduling.problem.types import Link, PeerProfile


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


def test_local_peers_are_equal_and_one_that_was_busy_when_its_link_was_measured_is_no_slower() -> None:
    links = [(1e8, 1e-4), (5e7, 3e-3), (2e8, 2e-4)]
    peers = tuple(
        PeerProfile(
            peer=f"p{number}",
            flops_per_s=(number + 1) * 1e9,
            memory_bytes=10**9,
            uplink=Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency),
            downlink=Link(bandwidth_bytes_per_s=2 * bandwidth, latency_s=latency),
        )
        for number, (bandwidth, latency) in enumerate(links)
    )
    found = equalised(peers)
    assert [one.peer for one in found] == ["p0", "p1", "p2"]
    assert {one.flops_per_s for one in found} == {2e9}
    assert {one.uplink for one in found} == {Link(bandwidth_bytes_per_s=2e8, latency_s=1e-4)}
    assert {one.downlink for one in found} == {Link(bandwidth_bytes_per_s=4e8, latency_s=1e-4)}
