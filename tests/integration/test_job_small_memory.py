"""Jobs whose stages save memory: with activations made again and state in files no bit changes, and a machine that dies
changes none where state is kept in 8 bits either."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.primitives.ids import PeerId
from fusionai.training import progress
from fusionai.wire import messages as wire
from fusionai.wire.messages import OptimizerSpec
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tokens

pytestmark = pytest.mark.slow

VOCABULARY, STEPS = 67, 6
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
RANGES = ((0, 2), (2, 4), (4, 5))
EIGHT_BIT = OptimizerSpec(weight_decay=0.1, state_bits=8)
PLAIN = OptimizerSpec(weight_decay=0.1)


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 2), sequence=(1, 16))


def run(
    directory: Path, captured: Captured, *, victim: int | None = None, cut_after: int | None = None, **changes: object
) -> Run:
    """With `victim`, that stage dies at its first backward of step 4. With `cut_after`, driver and machines die once
    that step is official, and all begin again."""

    async def body() -> Run:
        async with MemoryPool(5, lambda: TorchBackend(device="cpu", threads=1)) as pool:
            job = Job(
                pool=pool,
                directory=directory,
                graph=captured.graph,
                state=captured.state,
                ranges=RANGES,
                owned=frozenset({2}),
                standbys={0: 2, 1: 3},
                data=Data(tokens(VOCABULARY, 2, 16)),
                steps=STEPS,
                microbatches=2,
                checkpoint_every=2,
                replans=True,
                **changes,  # pyright: ignore[reportArgumentType]
            )

            def see(sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
                if isinstance(message, wire.Backward) and (message.producer, message.step) == (victim, 4):
                    pool.kill(peer_id(message.producer))

            pool.on_message = see
            if cut_after is not None:
                await job.run(kill_after=cut_after)
            return await job.run(power_cut=cut_after is not None)

    done = asyncio.run(body())
    assert done.end is not None
    assert (done.end.failed, done.end.steps) == (None, STEPS)
    return done


def same(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    weights, others = one.weights(STEPS), other.weights(STEPS)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


def test_saving_memory_changes_no_bit(llama: Captured, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", llama, optimizer=PLAIN)
    same(run(tmp_path / "away", llama, optimizer=PLAIN, offload=True, recompute=True), plain)
    same(run(tmp_path / "all", llama, optimizer=PLAIN, offload=True, recompute=True, offload_weights=True), plain)


AWAY = {"offload": True, "recompute": True, "offload_weights": True}


@pytest.mark.parametrize(
    "levers", [{}, {"offload": True, "recompute": True}, AWAY], ids=["memory", "file", "weights-too"]
)
def test_a_takeover_with_state_in_8_bits_keeps_every_bit(
    levers: dict[str, bool], llama: Captured, tmp_path: Path
) -> None:
    calm = run(tmp_path / "calm", llama, optimizer=EIGHT_BIT)
    struck = run(tmp_path / "struck", llama, optimizer=EIGHT_BIT, victim=1, **levers)
    assert [event for event in struck.events if isinstance(event, progress.Restored)]
    same(struck, calm)


def test_a_job_whose_weights_come_and_go_goes_on_from_its_checkpoint(llama: Captured, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", llama, optimizer=PLAIN)
    resumed = run(tmp_path / "cut", llama, optimizer=PLAIN, cut_after=4, **AWAY)
    assert 0 < resumed.base < STEPS
    assert resumed.losses == plain.losses[resumed.base :]
    weights, others = resumed.weights(STEPS), plain.weights(STEPS)
    for name, value in weights.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)


def test_state_in_8_bits_loses_little(llama: Captured, tmp_path: Path) -> None:
    plain, coded = (run(tmp_path / str(one.state_bits), llama, optimizer=one) for one in (PLAIN, EIGHT_BIT))
    assert coded.losses != plain.losses
    assert coded.losses == pytest.approx(plain.losses, rel=1e-2)
