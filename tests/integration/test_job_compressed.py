"""A job whose activations and gradients travel packed: what travels, what is lost of the loss, and that a machine which
dies changes no bit of it."""

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
from fusionai.wire.codecs import Codec, packed_bytes, packing
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tokens

pytestmark = pytest.mark.slow

VOCABULARY, MICROBATCHES, STEPS = 31, 2, 6
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
DATA = Data(tokens(VOCABULARY, 4, 16))
RANGES = ((0, 2), (2, 3), (3, 5), (5, 6))
CROSSING = (4, 16, 32)
"""One microbatch between two stages."""


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 16))


def run(
    directory: Path,
    captured: Captured,
    codec: Codec | tuple[Codec, ...],
    *,
    victim: int | None = None,
    point: type[wire.Message] = wire.Backward,
) -> tuple[Run, list[wire.Forward | wire.Backward]]:
    """With `victim`, that stage dies at its first such message of step 3. Also what crossed between machines."""
    crossed: list[wire.Forward | wire.Backward] = []

    async def body() -> Run:
        async with MemoryPool(6, lambda: TorchBackend(device="cpu", threads=1)) as pool:
            job = Job(
                pool=pool,
                directory=directory,
                graph=captured.graph,
                state=captured.state,
                ranges=RANGES,
                owned=frozenset({3}),
                standbys={0: 3, 1: 4, 2: 5},
                data=DATA,
                steps=STEPS,
                microbatches=MICROBATCHES,
                codecs=codec if isinstance(codec, tuple) else () if codec == "none" else (codec,) * 3,
                replans=True,
            )

            def see(sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
                if isinstance(message, wire.Forward | wire.Backward):
                    crossed.append(message)
                    whose = message.consumer if isinstance(message, wire.Forward) else message.producer
                    if isinstance(message, point) and (whose, message.step) == (victim, 3):
                        pool.kill(peer_id(whose))

            pool.on_message = see
            return await job.run()

    done = asyncio.run(body())
    assert done.end is not None
    assert (done.end.failed, done.end.steps) == (None, STEPS)
    return done, crossed


@pytest.fixture(scope="module")
def unpacked(
    llama: Captured, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, list[wire.Forward | wire.Backward]]:
    return run(tmp_path_factory.mktemp("plain"), llama, "none")


@pytest.mark.parametrize("codec", ["int8", "int4", "uneven", "int2", "ternary", "subspace"])
def test_what_crosses_is_packed_and_little_of_the_loss_is_lost(
    codec: Codec, llama: Captured, unpacked: tuple[Run, list[wire.Forward | wire.Backward]], tmp_path: Path
) -> None:
    plain, uncompressed = unpacked
    packed, crossed = run(tmp_path, llama, codec)
    assert not any(message.packed for message in uncompressed)
    fed = [message for message in crossed if isinstance(message, wire.Forward) and message.producer == -1]
    assert not any(message.packed for message in fed), "tokens are exact"
    between = [message for message in crossed if message not in fed]
    hidden = [message for message in between if message.packed]
    assert {(message.producer, message.consumer) for message in hidden} == {(0, 1), (1, 2), (2, 3)}
    for message in hidden:
        way = packing(codec, forward=isinstance(message, wire.Forward))
        assert message.packed[0].codec == way
        (header,) = [header for header in message.tensors if header.name == message.packed[0].name]
        assert (header.dtype, header.shape) == ("uint8", (packed_bytes(way, CROSSING),))
    assert packed.losses != plain.losses
    assert packed.losses == pytest.approx(plain.losses, rel={"int8": 1e-3, "int4": 1e-2}.get(codec, 5e-2))


def test_each_boundary_has_its_own_codec(
    llama: Captured, unpacked: tuple[Run, list[wire.Forward | wire.Backward]], tmp_path: Path
) -> None:
    done, crossed = run(tmp_path, llama, ("int8", "none", "int2"))
    packed = {
        (message.producer, message.consumer): {one.codec for one in message.packed}
        for message in crossed
        if message.packed
    }
    assert packed == {(0, 1): {"int8"}, (2, 3): {"int2"}}
    assert done.losses == pytest.approx(unpacked[0].losses, rel=5e-2)


@pytest.fixture(scope="module")
def calm(llama: Captured, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("calm"), llama, "int2")[0]


@pytest.mark.parametrize("point", [wire.Forward, wire.Backward])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_takeover_keeps_every_bit(
    point: type[wire.Message], victim: int, llama: Captured, calm: Run, tmp_path: Path
) -> None:
    struck, _ = run(tmp_path, llama, "int2", victim=victim, point=point)
    assert [event for event in struck.events if isinstance(event, progress.Restored)]
    assert struck.losses == calm.losses
    for name, value in struck.weights(STEPS).items():
        np.testing.assert_array_equal(value, calm.weights(STEPS)[name], err_msg=name)
