"""The null backend's costs: virtual durations and counted operations."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.backends.interface import Call
from fusionai.backends.null.backend import NullBackend
from fusionai.backends.null.program import NullCosts
from fusionai.ir.cost import block_costs
from fusionai.wire.messages import OptimizerSpec, StageOptions

COSTS = NullCosts(flops_per_s=1e6, memory_bandwidth_bytes_per_s=1e5)


@pytest.fixture
def program(kit):
    options = StageOptions(optimizer=OptimizerSpec(), in_flight=4)
    loaded = NullBackend(COSTS).load(kit.mlp_graph(), grad_inputs=(), options=options)
    loaded.initialise()
    return loaded


def fed(kit, batch: int, length: int):
    return {name: kit.host(np.zeros((batch, length), dtype=np.int64)) for name in ("ids", "labels")}


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5), (8, 32)])
def test_durations_are_operations_over_speed(kit, program, batch, length):
    records = block_costs(kit.mlp_graph(), {"b": batch, "s": length}, training=True)
    forward, backward = sum(r.forward_flops for r in records), sum(r.backward_flops for r in records)
    assert backward > forward > 0
    program.forward(Call("train", 0, 0), fed(kit, batch, length))
    assert program.last_duration_s == pytest.approx(forward / COSTS.flops_per_s)
    program.backward(Call("train", 0, 0), {"loss": kit.host(np.asarray(np.float32(1.0)))})
    assert program.last_duration_s == pytest.approx(backward / COSTS.flops_per_s)
    assert program.total_flops == pytest.approx(forward + backward)


def test_an_update_takes_the_time_to_move_its_bytes(kit, program):
    program.apply(scale=1.0, learning_rate=0.1)
    parameters = sum(int(np.prod(spec.shape)) for spec in kit.mlp_graph().params.values())
    # Gradient read once; parameter and two slots read and written; one 4-byte counter per parameter likewise.
    moved_bytes = 4 * parameters * (1 + 2 * 3) + 2 * 4 * len(kit.mlp_graph().params)
    assert program.last_duration_s == pytest.approx(moved_bytes / COSTS.memory_bandwidth_bytes_per_s)


def test_values_are_zero_and_norms_one(kit, program):
    out = program.forward(Call("train", 0, 0), fed(kit, 2, 3))
    np.testing.assert_array_equal(kit.array_of(out["logits"]), np.zeros((2, 3, kit.classes), dtype=np.float32))
    program.backward(Call("train", 0, 0), {"loss": kit.host(np.asarray(np.float32(1.0)))})
    assert set(program.gradient_norms().values()) == {1.0}


def test_the_probe_reports_the_pretended_machine():
    report = NullBackend(COSTS).probe()
    assert (report.flops_per_s, report.memory_bandwidth_bytes_per_s) == (1e6, 1e5)
