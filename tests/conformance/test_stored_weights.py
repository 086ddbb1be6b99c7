"""Frozen weights in fewer bits: every backend computes what it would with the numbers they stand for, forward and
backward, with activations kept or made again, and keeps the bytes alone.

The model is a small Llama of which only the norms are trained, so that gradients pass every frozen weight.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec
import numpy as np
import pytest

from fusionai.backends.interface import Backend, Call, StageProgram
from fusionai.backends.state import as_stored, state_entries
from fusionai.backends.tolerance import TOLERANCES
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.ir.schema import Graph, Stored
from fusionai.ir.validate import validate
from fusionai.ir.weights import initialise, stored_bytes, with_stored
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import OptimizerSpec, StageOptions
from harness.opened_weights import unpack_stored

pytestmark = pytest.mark.slow
SEED, ROWS, LENGTH = 3, 2, 12
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
FORMS: tuple[Stored, ...] = ("bf16", "int8", "int4")


def backend_of(kind: str) -> Backend:
    if kind == "torch":
        from fusionai.backends.torch.backend import TorchBackend

        return TorchBackend("cpu", threads=1)
    pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
    from fusionai.backends.jax.backend import JaxBackend

    return JaxBackend("cpu")


@cache
def llama() -> Captured:
    return capture(ConfigSource(CONFIG), batch=(1, ROWS), sequence=(1, LENGTH))


@cache
def frozen_llama() -> Graph:
    graph = llama().graph
    params = {
        value: msgspec.structs.replace(spec, trainable=spec.trainable and len(spec.shape) == 1)
        for value, spec in graph.params.items()
    }
    return validate(msgspec.structs.replace(graph, params=params))


def batch() -> dict[str, HostTensor]:
    draw = np.random.default_rng(SEED)
    made = {
        "input_ids": draw.integers(0, 128, (ROWS, LENGTH)),
        "position_ids": np.tile(np.arange(LENGTH), (ROWS, 1)),
        "labels": draw.integers(0, 128, (ROWS, LENGTH)),
    }
    return {
        name: host_tensor("int64", (ROWS, LENGTH), np.ascontiguousarray(value, np.int64).tobytes())
        for name, value in made.items()
    }


def originals(graph: Graph) -> dict[str, HostTensor]:
    draw = np.random.default_rng(SEED)
    found: dict[str, HostTensor] = {}
    for spec in graph.params.values():
        if spec.init is None:
            continue
        made = np.asarray(initialise(spec.key, spec.shape, spec.dtype, spec.init, SEED))
        if spec.dtype == "float32":
            made = made + draw.normal(0, 0.05, spec.shape).astype(np.float32)
        found[spec.key] = host_tensor(spec.dtype, tuple(spec.shape), np.ascontiguousarray(made).tobytes())
    return found


def run(program: StageProgram) -> tuple[float, dict[str, np.ndarray]]:
    call = Call("train", 0, 0)
    needed = {name: value for name, value in batch().items() if name in frozen_llama().inputs}
    made = program.forward(call, needed, ["loss"])
    program.backward(call, {"loss": host_tensor("float32", (), np.float32(1).tobytes())})
    keys = sorted(spec.key for spec in frozen_llama().params.values() if spec.trainable)
    gradients = {key: np.frombuffer(value.data, np.float32).copy() for key, value in program.export_gradients(keys)}
    return float(np.frombuffer(made["loss"].data, np.float32)[0]), gradients


def loaded(backend: Backend, graph: Graph, values: dict[str, HostTensor], options: StageOptions) -> StageProgram:
    program = backend.load(graph, grad_inputs=(), options=options, memory_limit_bytes=None)
    missing = program.initialise()
    specs = {spec.key: spec for spec in graph.params.values()}
    program.import_state([(f"model/{key}", as_stored(specs[key], value)) for key, value in values.items()])
    constants = [name.removeprefix("model/") for name in missing]
    program.import_state([(f"model/{key}", value) for key, value in llama().state(constants)])
    return program


CASES = [
    *(("torch", form, again, precision) for form in FORMS for again in (False, True) for precision in ("fp32", "bf16")),
    *(("torch", form, "away", precision) for form in FORMS for precision in ("fp32", "bf16")),
    ("jax", "int4", False, "fp32"),
    ("jax", "int8", True, "fp32"),
    pytest.param("jax", "bf16", False, "fp32", marks=pytest.mark.long),
    pytest.param("jax", "int4", True, "bf16", marks=pytest.mark.long),
]
"""`away`: packed weights lie in a file between uses, those they are compared with do not."""


@pytest.mark.parametrize(("kind", "form", "recompute", "precision"), CASES)
def test_it_computes_with_the_numbers_they_stand_for(
    kind: str, form: Stored, recompute: bool | Literal["away"], precision: str
) -> None:
    backend = backend_of(kind)
    plain = frozen_llama()
    packed = validate(with_stored(plain, form))
    assert any(spec.stored for spec in packed.params.values())
    options = StageOptions(
        seed=SEED,
        optimizer=OptimizerSpec(),
        recompute=bool(recompute),
        precision=precision,  # pyright: ignore[reportArgumentType]
    )
    values = originals(plain)
    specs = {spec.key: spec for spec in packed.params.values()}
    stand_for = dict(values)
    for key, spec in specs.items():
        if spec.stored:
            data = np.frombuffer(as_stored(spec, values[key]).data, np.uint8)
            opened = unpack_stored(data, tuple(spec.shape), spec.stored)
            stand_for[key] = host_tensor("float32", opened.shape, opened.tobytes())
    away = msgspec.structs.replace(options, offload_weights=recompute == "away")
    program, other = loaded(backend, packed, values, away), loaded(backend, plain, stand_for, options)
    # What is kept is the bytes: the state has them, and no more is resident.
    entries = state_entries(packed, options.optimizer)
    saved_bytes = 0
    for key, spec in specs.items():
        if spec.stored:
            ((_, kept),) = program.export_entries([f"model/{key}"])
            assert kept == as_stored(spec, values[key])
            assert entries[f"model/{key}"].nbytes == kept.nbytes == stored_bytes(tuple(spec.shape), spec.stored)
            saved_bytes += values[key].nbytes - kept.nbytes
    if recompute != "away":
        assert other.resident_bytes - program.resident_bytes == saved_bytes > 0
    loss, gradients = run(program)
    expected_loss, expected = run(other)
    assert gradients.keys() == expected.keys()
    if kind == "torch":
        assert loss == expected_loss
        for key, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, expected[key], err_msg=key)
    else:
        # Compiled, a level times its scale plus its middle may be rounded once instead of twice.
        tolerance = TOLERANCES["float32" if precision == "fp32" else "bfloat16"]
        assert loss == pytest.approx(expected_loss, rel=tolerance.loss)
        for key, gradient in gradients.items():
            assert np.abs(gradient - expected[key]).max() <= 1e-4 * np.abs(expected[key]).max(), key
