"""Whole jobs over the memory network with real stages: the same bits as plain PyTorch in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource, FactorySource
from fusionai.training import progress
from fusionai.training.driver import Driver
from fusionai.wire.messages import OptimizerSpec
from harness.one_process import assert_same_state, assert_same_weights, causal_loss, load, plain, transformers_model
from harness.pool import Data, Job, MemoryPool, Run, array, tensor, tokens

pytestmark = pytest.mark.slow

VOCABULARY, BATCH, SEQUENCE, MICROBATCHES, STEPS = 61, 2, 10, 3, 4
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
DATA = Data(tokens(VOCABULARY, BATCH, SEQUENCE))
FOUR_AND_LOSS = ((0, 2), (2, 3), (3, 4), (4, 6), (6, 7))
"""Embedding and first layer, two layers, last layer and head; the loss."""


def backend() -> TorchBackend:
    return TorchBackend(device="cpu", threads=1)


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource({**LLAMA, "tie_word_embeddings": False}), batch=(1, 4), sequence=(1, 32))


@pytest.fixture(scope="module")
def tied() -> Captured:
    return capture(ConfigSource({**LLAMA, "tie_word_embeddings": True}), batch=(1, 4), sequence=(1, 32))


def run(directory: Path, captured: Captured, *, peers: int = 4, share: float = 1.0, **changes: object) -> list[Run]:
    """`starts`: what happens to each start of the driver, one after the other."""
    starts = changes.pop("starts", ({},))

    async def all_starts() -> list[Run]:
        async with MemoryPool(peers, backend, share=share) as pool:
            fields: dict[str, object] = {
                "ranges": FOUR_AND_LOSS,
                "owned": frozenset({4}),
                "data": DATA,
                "steps": STEPS,
                "microbatches": MICROBATCHES,
                **changes,
            }
            job = Job(pool=pool, directory=directory, graph=captured.graph, state=captured.state, **fields)  # pyright: ignore
            return [await job.run(**start) for start in starts]  # pyright: ignore

    return asyncio.run(all_starts())


# ------------------------------------------------------------------------------------------------------------- bits


@pytest.fixture(scope="module")
def uninterrupted(llama: Captured, tmp_path_factory: pytest.TempPathFactory) -> Run:
    async def greedy(driver: Driver) -> list[int]:
        ids = DATA.make(0, 0)["input_ids"][:1, :4]
        chosen: list[int] = []
        for _ in range(4):
            positions = np.arange(ids.shape[1])[None]
            outputs = await driver.infer({"input_ids": tensor(ids), "position_ids": tensor(positions)})
            chosen.append(int(array(outputs["logits"])[0, -1].argmax()))
            ids = np.concatenate([ids, [[chosen[-1]]]], axis=1)
        return chosen

    directory = tmp_path_factory.mktemp("uninterrupted")
    (done,) = run(directory, llama, evaluate_every=2, evaluation_batches=3, starts=({"epilogue": greedy},))
    assert done.end is not None
    assert done.end.failed is None
    return done


def test_four_peers_and_the_owners_loss_train_bit_for_bit_as_transformers(llama: Captured, uninterrupted: Run):
    model = transformers_model(llama)
    assert uninterrupted.losses == plain(model, uninterrupted)
    assert_same_weights(model, uninterrupted, STEPS)


def test_evaluation_and_greedy_completion_are_those_of_transformers(llama: Captured, uninterrupted: Run):
    model = transformers_model(llama)
    for event in uninterrupted.events:
        if isinstance(event, progress.Evaluated) and event.step == STEPS:
            found = event.loss
    load(model, uninterrupted.weights(STEPS))
    model.eval()
    with torch.no_grad():
        batches = [DATA.make(10**6, index) for index in range(3)]
        values = [
            causal_loss(model, {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in batch.items()}).item()
            for batch in batches
        ]
        ids = torch.from_numpy(DATA.make(0, 0)["input_ids"][:1, :4])
        chosen: list[int] = []
        for _ in range(4):
            chosen.append(int(model(input_ids=ids).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[chosen[-1]]])], dim=1)
    assert found == sum(values) / 3
    assert uninterrupted.extra == chosen


def test_the_loss_may_be_placed_in_the_pool(llama: Captured, uninterrupted: Run, tmp_path: Path):
    (done,) = run(tmp_path, llama, ranges=((0, 2), (2, 4), (4, 7)), owned=frozenset(), peers=3)
    assert done.losses == uninterrupted.losses
    assert_same_state(done.weights(STEPS), uninterrupted.weights(STEPS))


def test_credit_and_share_change_no_bit(llama: Captured, uninterrupted: Run, tmp_path: Path):
    (done,) = run(tmp_path, llama, in_flight=1, share=0.5)
    assert done.losses == uninterrupted.losses
    assert_same_state(done.weights(STEPS), uninterrupted.weights(STEPS))


def test_weight_gradients_put_off_change_no_bit(llama: Captured, uninterrupted: Run, tmp_path: Path):
    (done,) = run(tmp_path, llama, room=True)
    assert [options.weight_lag for options in done.job.stage_options()] == [2, 2, 2, 2, 0]
    assert done.losses == uninterrupted.losses
    assert_same_state(done.weights(STEPS), uninterrupted.weights(STEPS))


def test_activations_made_again_change_no_bit(llama: Captured, uninterrupted: Run, tmp_path: Path):
    (done,) = run(tmp_path, llama, recompute=True, room=True)
    assert [(options.recompute, options.weight_lag) for options in done.job.stage_options()] == [(True, 0)] * 5
    assert done.losses == uninterrupted.losses
    assert_same_state(done.weights(STEPS), uninterrupted.weights(STEPS))


def test_momentum_and_no_clipping_train_bit_for_bit(llama: Captured, tmp_path: Path):
    sgd = OptimizerSpec(kind="sgd", momentum=0.9, nesterov=True, weight_decay=0.01)
    (done,) = run(tmp_path, llama, optimizer=sgd, clip_norm=None)
    model = transformers_model(llama)
    assert done.losses == plain(model, done)
    assert_same_weights(model, done, STEPS)


def test_tied_weights_stay_one_weight(tied: Captured, tmp_path: Path):
    (done,) = run(tmp_path, tied)
    assert done.end is not None
    assert done.end.failed is None
    model = transformers_model(tied)
    assert done.losses == plain(model, done)
    assert_same_weights(model, done, STEPS)


def test_half_precision_stays_close(llama: Captured, tmp_path: Path):
    (done,) = run(tmp_path, llama, precision="bf16")
    model = transformers_model(llama)
    assert done.losses == pytest.approx(plain(model, done, autocast=True), rel=2e-2)
    assert done.losses != plain(transformers_model(llama), done), "matrix products are in half precision"


# ----------------------------------------------------------------------------------------------------------- resuming


def test_a_job_that_was_stopped_goes_on_with_the_same_bits(llama: Captured, uninterrupted: Run, tmp_path: Path):
    stopped, resumed = run(tmp_path, llama, starts=({"stop_after": 1}, {}))
    assert stopped.end is not None
    assert stopped.end.stopped == "asked to"
    assert resumed.base == stopped.end.steps
    assert 1 < resumed.base < STEPS
    assert [*stopped.losses, *resumed.losses] == uninterrupted.losses
    assert_same_state(resumed.weights(STEPS), uninterrupted.weights(STEPS))


def test_when_all_have_died_between_commits_the_journal_is_replayed(
    llama: Captured, uninterrupted: Run, tmp_path: Path
):
    killed, resumed = run(tmp_path, llama, checkpoint_every=2, starts=({"kill_after": 2}, {"power_cut": True}))
    assert killed.end is None
    assert resumed.end is not None
    assert resumed.end.failed is None
    assert resumed.base == 2, "the checkpoint lies behind the last commit"
    assert [(done.record.step, done.replayed) for done in resumed.steps()] == [(2, True), (3, False)]
    assert [*killed.losses[:2], *resumed.losses] == uninterrupted.losses
    assert_same_state(resumed.weights(STEPS), uninterrupted.weights(STEPS))


def test_a_driver_that_died_alone_finds_its_stages_where_they_are(llama: Captured, uninterrupted: Run, tmp_path: Path):
    killed, resumed = run(tmp_path, llama, checkpoint_every=2, starts=({"kill_after": 2}, {}))
    assert [(done.record.step, done.replayed) for done in resumed.steps()] == [(3, False)]
    assert [*killed.losses, *resumed.losses] == uninterrupted.losses
    assert_same_state(resumed.weights(STEPS), uninterrupted.weights(STEPS))


def test_when_all_have_died_before_any_checkpoint_it_is_replayed_from_the_seed(
    llama: Captured, uninterrupted: Run, tmp_path: Path
):
    _, resumed = run(tmp_path, llama, save_base=False, starts=({"kill_after": 1}, {"power_cut": True}))
    assert resumed.base == 0
    assert [done.replayed for done in resumed.steps()] == [True, True, False, False]
    assert resumed.losses == uninterrupted.losses
    assert_same_state(resumed.weights(STEPS), uninterrupted.weights(STEPS))


# ----------------------------------------------------------------------------------------------------- other modules


class Convolutions(nn.Module):
    """Buffers that every microbatch rewrites."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            for i in range(3)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Skips(nn.Module):
    """The first value is needed by every later stage, over the heads of those between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        y = first
        for layer in self.layers:
            y = layer(y) + 0.5 * y
        return self.last(y * first + first)


def class_batches(shape: tuple[int, ...]) -> Data:
    def make(step: int, microbatch: int) -> dict[str, np.ndarray]:
        draw = np.random.default_rng((step, microbatch))
        return {"x": draw.standard_normal(shape).astype(np.float32), "labels": draw.integers(0, 5, shape[:1])}

    return Data(make)


def class_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["labels"])


def classifier(make: Callable[[], nn.Module], example: torch.Tensor) -> tuple[Captured, list[tuple[int, int]]]:
    captured = capture(
        FactorySource(lambda: (make(), {"x": example}), make.__name__), task="classification", batch=(1, 8)
    )
    last = max(node.block for node in captured.graph.nodes)
    return captured, [(block, block + 1) for block in range(last)] + [(last, last + 1)]


def test_buffers_that_training_rewrites_are_part_of_the_state(tmp_path: Path):
    captured, ranges = classifier(Convolutions, torch.zeros(2, 3, 6, 6))
    data = class_batches((4, 3, 6, 6))
    options = {"ranges": ranges, "owned": frozenset({len(ranges) - 1}), "peers": len(ranges) - 1, "data": data}
    (straight,) = run(tmp_path / "straight", captured, **options)  # pyright: ignore
    killed, resumed = run(
        tmp_path / "broken",
        captured,
        checkpoint_every=2,
        starts=({"kill_after": 2}, {"power_cut": True}),
        **options,  # pyright: ignore
    )
    model = Convolutions()
    assert straight.losses == plain(model, straight, class_loss)
    assert_same_weights(model, straight, STEPS)
    assert model.state_dict()["blocks.0.1.num_batches_tracked"] == STEPS * MICROBATCHES
    assert [*killed.losses[:2], *resumed.losses] == straight.losses
    assert_same_state(resumed.weights(STEPS), straight.weights(STEPS))


def test_a_value_may_skip_stages(tmp_path: Path):
    captured, ranges = classifier(Skips, torch.zeros(2, 6))
    last = len(ranges) - 1
    (done,) = run(tmp_path, captured, ranges=ranges, owned=frozenset({last}), peers=last, data=class_batches((4, 6)))
    to_last = {port.other for port in done.job.cut().stages[last - 1].boundary.receives}
    assert last >= 4
    assert {0, last - 2} <= to_last, "over the heads of those between"
    model = Skips()
    assert done.losses == plain(model, done, class_loss)
    assert_same_weights(model, done, STEPS)
