"""Initial values: the same bits everywhere, the distributions asked for, every step's meaning."""

from __future__ import annotations

import hashlib
import math
import statistics

import numpy as np
import pytest

from fusionai.ir.schema import Graph, InitOp, ParamSpec, content_hash, decode, encode
from fusionai.ir.weights import CHUNK, initialise
from fusionai.primitives.errors import GraphError

GOLDEN_NORMAL = "14440761b89c3c8060c17e78bb97ee7953d41630a8bdbc137877596f9088f4dc"
GOLDEN_TRUNCATED = "f23e8a617c90837ba8417949ce973ebb503df7bd238b9c05d7e748b0f416fecc"
NORMAL = (InitOp("normal", (0.0, 1.0)),)
TRUNCATED = (
    InitOp("uniform", (-0.9544997361036416, 0.9544997361036416)),
    InitOp("erfinv"),
    InitOp("mul", (0.02 * math.sqrt(2.0),)),
    InitOp("clamp", (-0.04, 0.04)),
)


def test_bits_are_fixed_for_good() -> None:
    """Checkpoints of one release must equal fresh parameters of the next."""
    values = initialise("layers.0.weight", (3, 5), "float32", (InitOp("normal", (0.0, 0.02)),), seed=7)
    assert hashlib.sha256(values.tobytes()).hexdigest() == GOLDEN_NORMAL
    values = initialise("layers.0.weight", (1000,), "float32", TRUNCATED, seed=7)
    assert hashlib.sha256(values.tobytes()).hexdigest() == GOLDEN_TRUNCATED


def test_depends_on_seed_and_key_only() -> None:
    a = initialise("a", (64,), "float32", NORMAL, seed=1)
    assert np.array_equal(a, initialise("a", (64,), "float32", NORMAL, seed=1))
    assert not np.array_equal(a, initialise("b", (64,), "float32", NORMAL, seed=1))
    assert not np.array_equal(a, initialise("a", (64,), "float32", NORMAL, seed=2))
    # "1\0" + "2a" is not "12\0" + "a".
    assert not np.array_equal(
        initialise("2a", (64,), "float32", NORMAL, seed=1), initialise("a", (64,), "float32", NORMAL, seed=12)
    )


def test_chunks_do_not_show() -> None:
    long = initialise("a", (3 * CHUNK + 5,), "float32", NORMAL, seed=1)
    short = initialise("a", (CHUNK + 1,), "float32", NORMAL, seed=1)
    assert np.array_equal(long[: CHUNK + 1], short)


def test_two_draws_of_one_parameter_differ() -> None:
    first = initialise("a", (64,), "float32", NORMAL, seed=1)
    second = initialise("a", (64,), "float32", (InitOp("fill", (0.0,)), *NORMAL), seed=1)
    assert not np.array_equal(first, second)


def test_normal_is_normal() -> None:
    values = np.sort(initialise("a", (200_000,), "float32", NORMAL, seed=3).astype(np.float64))
    normal = statistics.NormalDist()
    for share in (0.0005, 0.05, 0.3, 0.5, 0.7, 0.95, 0.9995):
        below = float(np.searchsorted(values, normal.inv_cdf(share))) / values.size
        # Five standard deviations of a binomial share.
        assert abs(below - share) < 5 * math.sqrt(share * (1 - share) / values.size)


def test_uniform_keeps_its_range() -> None:
    values = initialise("a", (50_000,), "float32", (InitOp("uniform", (-0.5, 0.25)),), seed=3)
    assert values.min() >= -0.5
    assert values.max() <= 0.25
    assert abs(float(values.mean()) + 0.125) < 5 * 0.75 / math.sqrt(12 * values.size)


def test_erfinv_inverts_erf() -> None:
    values = initialise("a", (500,), "float32", (InitOp("uniform", (-0.999, 0.999)),), seed=3)
    inverse = initialise("a", (500,), "float32", (InitOp("uniform", (-0.999, 0.999)), InitOp("erfinv")), seed=3)
    back = np.array([math.erf(float(x)) for x in inverse])
    assert np.abs(back - values).max() < 1e-6


def test_erfinv_of_the_ends_is_clamped() -> None:
    steps = (InitOp("fill", (1.0,)), InitOp("erfinv"), InitOp("clamp", (-2.0, 2.0)))
    assert initialise("a", (2,), "float32", steps, seed=0).tolist() == [2.0, 2.0]


def test_each_step() -> None:
    steps = (InitOp("fill", (2.0,)), InitOp("mul", (3.0,)), InitOp("add", (-1.0,)), InitOp("fill_row", (1, 0.0)))
    assert initialise("a", (2, 2), "float32", steps, seed=0).tolist() == [[5.0, 5.0], [0.0, 0.0]]


def test_dtypes() -> None:
    fill = (InitOp("fill", (1.0 + 2**-8 + 2**-12,)),)
    assert initialise("a", (), "int64", fill, seed=0).tolist() == 1
    assert initialise("a", (1,), "bool", fill, seed=0).dtype == np.bool_
    assert initialise("a", (1,), "float16", fill, seed=0).dtype == np.float16
    # Just above the middle between 1 and the next bfloat16: rounds up, as raw bits.
    assert initialise("a", (1,), "bfloat16", fill, seed=0).tolist() == [0x3F81]
    # Exactly the middle: to even.
    assert initialise("a", (1,), "bfloat16", (InitOp("fill", (1.0 + 2**-8,)),), seed=0).tolist() == [0x3F80]
    assert initialise("a", (0, 3), "float32", NORMAL, seed=0).shape == (0, 3)


@pytest.mark.parametrize("step", [InitOp("normal", (1.0,)), InitOp("fill"), InitOp("fill_row", (9, 0.0))])
def test_malformed_steps_are_refused(step: InitOp) -> None:
    with pytest.raises(GraphError, match=step.op):
        initialise("a", (2,), "float32", (step,), seed=0)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(GraphError, match="complex64"):
        initialise("a", (2,), "complex64", NORMAL, seed=0)


def test_numbers_that_are_whole_are_written_as_they_will_be_read():
    """A row's number is an int to whoever writes it; graphs are told apart by their bytes."""
    graph = Graph(
        params={
            "p": ParamSpec(key="w", kind="parameter", shape=(4, 2), dtype="float32", init=(InitOp("fill_row", (1, 0)),))
        }
    )
    assert content_hash(decode(encode(graph))) == content_hash(graph)


def test_shared_draws_depend_on_their_number_alone() -> None:
    def drawn(key: str, number: float, seed: int = 1) -> list[float]:
        return initialise(key, (9,), "float32", (InitOp("shared", (number,)), *NORMAL), seed).tolist()

    assert drawn("a", 5) == drawn("b", 5)
    assert drawn("a", 5) != drawn("a", 6)
    assert drawn("a", 5) != drawn("a", 5, seed=2)
    assert drawn("5", 5) != initialise("5", (9,), "float32", NORMAL, seed=1).tolist()
