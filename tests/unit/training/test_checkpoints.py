"""What stages of unlike numerics hold of one parameter is kept once, where rounding explains that they differ."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fusionai.backends.state import StateEntry
from fusionai.primitives.errors import ExecutionError, ModelError, StorageError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.checkpoint import CheckpointHeader
from fusionai.storage.reader import CheckpointReader
from fusionai.training.checkpoints import Checkpoints, Collection
from fusionai.transport.interface import Envelope
from fusionai.wire import messages as wire

FENCE = wire.Fence(plan_version=1, incarnation=1, attempt=1)
PEERS = {0: PeerId("a" * 52), 3: PeerId("b" * 52)}
ENTRY, STEP = "model/embed.weight", 7
VALUE = np.linspace(-1, 1, 8, dtype=np.float32)


def tensor(value: np.ndarray) -> HostTensor:
    return host_tensor("float32", value.shape, value.astype(np.float32).tobytes())


def collected(directory: Path, values: dict[int, np.ndarray], *, tolerant: bool) -> np.ndarray:
    """What is kept of what stages send, in this order."""
    header = CheckpointHeader(graph_hash="g")
    entries = {stage: {ENTRY: StateEntry("embed.weight", "", "float32", VALUE.shape)} for stage in values}

    async def body() -> Path | None:
        checkpoints = Checkpoints(directory, header, files={}, keep=1)
        stages = {stage: PEERS[stage] for stage in sorted(values)}
        collection = Collection(checkpoints, STEP, FENCE, stages, entries, tolerant=tolerant)
        running = asyncio.create_task(collection.run())
        for stage, value in values.items():
            chunk = wire.StateChunk(fence=FENCE, stage=stage, step=STEP, last=True)
            await collection.take(PEERS[stage], Envelope(chunk, {ENTRY: tensor(value)}))
        return await running

    place = asyncio.run(body())
    assert place is not None
    return np.frombuffer(CheckpointReader(place).read(ENTRY).data, np.float32)


@pytest.mark.parametrize("order", [(0, 3), (3, 0)])
def test_the_first_stage_that_has_it_is_believed_whoever_sends_first(order: tuple[int, int], tmp_path: Path):
    held = {0: VALUE, 3: VALUE * np.float32(1 + 1e-6)}
    assert not np.array_equal(held[0], held[3])
    kept = collected(tmp_path, {stage: held[stage] for stage in order}, tolerant=True)
    np.testing.assert_array_equal(kept, VALUE)


def test_tensors_that_no_stage_holds_are_in_every_checkpoint(tmp_path: Path):
    spare = tensor(np.array([3.0, 4.0]))
    unread = lambda: iter([("spare", spare)])  # noqa: E731
    for step in (1, 2):
        checkpoints = Checkpoints(tmp_path, CheckpointHeader(graph_hash="g"), files={}, keep=2, unread=unread)
        writer = checkpoints.writer(step, ())
        writer.add(ENTRY, tensor(VALUE))
        place = writer.finish()
        assert set(load_file(place / "model.safetensors")) == {"embed.weight", "spare"}
        np.testing.assert_array_equal(
            np.frombuffer(CheckpointReader(place).read("model/spare").data, np.float32), [3, 4]
        )


def test_a_tensor_that_cannot_be_made_leaves_no_checkpoint(tmp_path: Path):
    def unread() -> Iterator[tuple[str, HostTensor]]:
        raise ModelError("gone")
        yield "spare", tensor(VALUE)

    with pytest.raises(ModelError, match=r"gone"):
        Checkpoints(tmp_path, CheckpointHeader(graph_hash="g"), files={}, keep=2, unread=unread).writer(1, ())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [(0, 3), (3, 0)])
def test_what_rounding_does_not_explain_ends_it(order: tuple[int, int], tmp_path: Path):
    held = {0: VALUE, 3: VALUE * np.float32(1.01)}
    with pytest.raises(
        StorageError, match=r"stage 3 holds a value of model/embed\.weight that is 0\.01 of its size away"
    ):
        collected(tmp_path, {stage: held[stage] for stage in order}, tolerant=True)
    assert list(tmp_path.iterdir()) == []


def test_of_like_numerics_every_bit_must_be_the_same(tmp_path: Path):
    with pytest.raises(StorageError, match="two stages hold different values"):
        collected(tmp_path, {0: VALUE, 3: VALUE * np.float32(1 + 1e-6)}, tolerant=False)
    np.testing.assert_array_equal(collected(tmp_path, {0: VALUE, 3: VALUE}, tolerant=False), VALUE)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(broken: float, tmp_path: Path):
    with pytest.raises(
        ExecutionError, match=r"step 7 of stage 3 has values of model/embed\.weight that are not finite"
    ):
        collected(tmp_path, {3: np.where(VALUE > 0.5, np.float32(broken), VALUE)}, tolerant=False)
    assert list(tmp_path.iterdir()) == []


def test_a_state_may_contain_the_minus_infinity_of_masks(tmp_path: Path):
    mask = np.where(VALUE > 0.5, np.float32(-np.inf), VALUE)
    np.testing.assert_array_equal(collected(tmp_path, {0: mask}, tolerant=False), mask)
