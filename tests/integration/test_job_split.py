"""Jobs whose model's ends stay with their owner: the same bits as one process, whatever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from harness.one_process import assert_same_state, assert_same_weights, plain, transformers_model
from harness.pool import Data, Job, MemoryPool, Run, tokens

pytestmark = pytest.mark.slow

VOCABULARY, STEPS = 61, 4
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
DATA = Data(tokens(VOCABULARY, 2, 10))
SPLIT = ((0, 1), (1, 3), (3, 5), (5, 7))
"""The owner's embedding, two layers, two layers, the owner's norm, head and loss."""


Starts = tuple[dict[str, object], ...]


def captured(*, tied: bool) -> Captured:
    return capture(ConfigSource({**LLAMA, "tie_word_embeddings": tied}), batch=(1, 4), sequence=(1, 32))


def run(
    directory: Path,
    model: Captured,
    *,
    peers: int = 2,
    starts: tuple[dict[str, object], ...] = ({},),
    **changes: object,
) -> list[Run]:
    async def all_starts() -> list[Run]:
        async with MemoryPool(peers, lambda: TorchBackend(device="cpu", threads=1)) as pool:
            fields: dict[str, object] = {
                "ranges": SPLIT,
                "owned": frozenset({0, 3}),
                "data": DATA,
                "steps": STEPS,
                "microbatches": 3,
                **changes,
            }
            job = Job(pool=pool, directory=directory, graph=model.graph, state=model.state, **fields)  # pyright: ignore
            return [await job.run(**start) for start in starts]  # pyright: ignore

    return asyncio.run(all_starts())


@pytest.fixture(scope="module")
def model() -> Captured:
    return captured(tied=False)


@pytest.fixture(scope="module")
def whole(model: Captured, tmp_path_factory: pytest.TempPathFactory) -> Run:
    (done,) = run(tmp_path_factory.mktemp("whole"), model)
    assert done.end is not None
    assert done.end.failed is None
    return done


def test_bits_are_those_of_one_process(model: Captured, whole: Run):
    alone = transformers_model(model)
    assert whole.losses == plain(alone, whole)
    assert_same_weights(alone, whole, STEPS)


def test_tied_ends_in_one_process_stay_one_weight(tmp_path: Path):
    tied = captured(tied=True)
    (done,) = run(tmp_path, tied)
    alone = transformers_model(tied)
    assert done.losses == pytest.approx(plain(alone, done), rel=1e-6)
    assert_same_weights(alone, done, STEPS, atol=1e-6)


def test_the_owners_state_comes_back_from_the_checkpoint(model: Captured, whole: Run, tmp_path: Path):
    """The driver dies, and the ends with it; its peers live, and go back to where the owner can."""
    killed, resumed = run(tmp_path, model, checkpoint_every=2, starts=({"kill_after": 2}, {}))
    assert [(done.record.step, done.replayed) for done in resumed.steps()] == [(2, True), (3, False)]
    assert [*killed.losses[:2], *resumed.losses] == whole.losses
    assert_same_state(resumed.weights(STEPS), whole.weights(STEPS))


def test_replicas_sum_their_ends_too(model: Captured, tmp_path: Path):
    one, two = (
        run(tmp_path / str(count), model, peers=2 * count, replicas=count, microbatches=4)[0] for count in (1, 2)
    )
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    assert two.end is not None
    assert two.end.failed is None
