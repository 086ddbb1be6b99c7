"""Dropout masks are the documented function of their counters: another implementation makes the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionai.backends.interface import Call
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch import semantic as module
from fusionai.backends.torch.semantic import dropout, scaled_mask
from fusionai.wire.messages import OptimizerSpec

CPU = torch.device("cpu")


def mix(x: np.ndarray) -> np.ndarray:
    """In unsigned 32-bit arithmetic that wraps."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x21F0AAAD)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def words(*values: int) -> np.ndarray:
    return np.array([value % 2**32 for value in values], dtype=np.uint32)


def reference_mask(
    count: int, p: float, seed: int, step: int, microbatch: int, node: int, start: int = 0
) -> np.ndarray:
    """bool [count]: which elements from `start` on are kept."""
    keys = []
    for number in (1, 2):
        folded = mix(words(number))
        for word in words(seed, seed >> 32, step, step >> 32, microbatch, node):
            folded = mix(folded ^ word)
        keys.append(folded)
    index = np.arange(start, start + count, dtype=np.uint64)
    low, high = (index & np.uint64(2**32 - 1)).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    u = mix(mix(low ^ keys[0]) ^ keys[1] ^ mix(high))
    return u.astype(np.uint64) >= np.uint64(int(p * 2**32))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize(
    ("seed", "step", "microbatch", "node"), [(0, 0, 0, 0), (2**62 - 1, 2**40, 7, 12345), (1, 2, 3, 4)]
)
def test_masks_equal_an_independent_implementation(p, seed, step, microbatch, node):
    mask = scaled_mask((5, 7, 33), p, DropoutKey(seed, step, microbatch), node, dtype=torch.float32, device=CPU)
    kept = reference_mask(5 * 7 * 33, p, seed, step, microbatch, node).reshape(5, 7, 33)
    np.testing.assert_array_equal(mask.numpy(), kept.astype(np.float32) * np.float32(1.0 / (1.0 - p)))


def test_large_tensors_are_hashed_piecewise_with_the_same_result(monkeypatch):
    key = DropoutKey(1, 2, 3)
    whole = scaled_mask((1000,), 0.3, key, 4, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 64)
    assert torch.equal(whole, scaled_mask((1000,), 0.3, key, 4, dtype=torch.float32, device=CPU))


def test_everything_is_dropped_at_one():
    x = torch.ones(100)
    assert torch.equal(dropout(x, 1.0, DropoutKey(0, 0, 0), 0), torch.zeros(100))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p(p):
    count = 200_000
    mask = scaled_mask((count,), p, DropoutKey(11, 5, 2), 77, dtype=torch.float32, device=CPU)
    dropped = float((mask == 0).float().mean())
    assert abs(dropped - p) < 5 * (p * (1 - p) / count) ** 0.5


def test_every_counter_changes_the_mask_and_masks_are_unrelated():
    base = DropoutKey(1, 1, 1)
    variants = [
        (base, 1),
        (DropoutKey(2, 1, 1), 1),
        (DropoutKey(1 + 2**32, 1, 1), 1),
        (DropoutKey(1, 2, 1), 1),
        (DropoutKey(1, 1, 2), 1),
        (base, 2),
    ]
    masks = [scaled_mask((50_000,), 0.5, key, node, dtype=torch.float32, device=CPU) > 0 for key, node in variants]
    for first in range(len(masks)):
        for second in range(first):
            agreement = float((masks[first] == masks[second]).float().mean())
            assert abs(agreement - 0.5) < 0.02, (first, second)


def test_a_stage_drops_in_training_only_and_alike_in_replays(kit, load):
    stage = kit.Stage(b=(1, 4))
    x = stage.input("x", "b", 64)
    y = stage.node("fusion.dropout", x, shape=("b", 64), p=0.5)
    program = load(stage.graph(y=y), ("x",), seed=5, optimizer=OptimizerSpec())
    ones = kit.host(np.ones((2, 64), dtype=np.float32))

    def run(mode: str, step: int, microbatch: int) -> np.ndarray:
        return kit.array_of(program.forward(Call(mode, step, microbatch), {"x": ones})["y"])

    np.testing.assert_array_equal(run("eval", 0, 0), 1.0)
    np.testing.assert_array_equal(run("infer", 0, 0), 1.0)
    first = run("train", 3, 4)
    expected = reference_mask(128, 0.5, seed=5, step=3, microbatch=4, node=10).reshape(2, 64) * np.float32(2.0)
    np.testing.assert_array_equal(first, expected)
    returned = program.backward(Call("train", 3, 4), {"y": ones})
    np.testing.assert_array_equal(kit.array_of(returned["x"]), expected)
    np.testing.assert_array_equal(run("train", 3, 4), first)
    assert not np.array_equal(run("train", 3, 5), first)
