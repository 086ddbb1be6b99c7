"""Encoders and cross-encoders over stages of a pool in memory: their vectors and scores are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fusionai.capture.models.source import DirectorySource
from fusionai.capture.served import capture_served
from fusionai.ir.graph import nodes_by_block
from fusionai.ir.serving import purpose_of, serving_graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId
from fusionai.serving.interface import Generation, TextPair
from fusionai.serving.pooling import Pooling, PoolingMode
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions
from harness.pool import OWNER, peer_id
from harness.serving_pool import Served, served
from harness.small_encoders import (
    ENCODERS,
    LONGEST,
    VOCABULARY,
    own_encoder,
    own_score,
    saved_encoder,
    states,
    texts,
)

pytestmark = pytest.mark.slow

OPTIONS = ServeOptions(page_tokens=4, pages=200, sessions=9, pass_tokens=48, at_once=True)


@asynccontextmanager
async def running(model: Path, directory: Path, **job: Any) -> AsyncIterator[Served]:
    """Embedding and tail with the owner, the layers on three peers."""
    captured = capture_served(DirectorySource(model))
    graph = serving_graph(captured.graph)
    blocks = len(nodes_by_block(graph))
    # ALBERT's layers share one set of weights and are one block.
    ends = [1, 2, 3, blocks - 1, blocks] if blocks > 4 else range(1, blocks + 1)
    ranges = list(zip([0, *ends], ends, strict=False))
    given = {"options": OPTIONS, "vocabulary": VOCABULARY, "context_tokens": LONGEST, "purpose": purpose_of(graph)}
    async with served(captured, directory, ranges, **{**given, **job}) as made:
        yield made


@pytest.mark.parametrize("kind", ENCODERS)
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = saved_encoder(tmp_path / "model", kind)
    asked = texts(7)

    async def story() -> list[list[float]]:
        async with running(model, tmp_path) as job:
            return await job.engine.embed(asked, "")

    found = asyncio.run(story())
    own = own_encoder(model)
    for tokens, vector in zip(asked, found, strict=True):
        mean = states(own, tokens).mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "gte"])
def test_scores_of_pairs_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = saved_encoder(tmp_path / "model", kind, scores=True)
    asked = [TextPair(tokens, len(tokens) // 2) for tokens in texts(6)]

    async def story() -> list[list[float]]:
        async with running(model, tmp_path) as job:
            with pytest.raises(ExecutionError, match="gives scores of texts, not vectors"):
                await job.engine.embed([(7, 8)], "")
            with pytest.raises(ExecutionError, match="gives scores of texts, not tokens"):
                job.engine.submit(Generation(prompt=(7, 8), max_tokens=3))
            return await job.engine.score(asked, "")

    found = asyncio.run(story())
    own = own_encoder(model)
    expected = [own_score(own, pair, types=kind == "bert") for pair in asked]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert len({round(one, 4) for (one,) in found}) == len(asked), "the pairs tell nothing apart"


@pytest.mark.parametrize("mode", get_args(PoolingMode))
def test_each_pooling_reads_the_rows_it_needs(mode: PoolingMode, tmp_path: Path) -> None:
    model = saved_encoder(tmp_path / "model", "bert")
    asked, rows = texts(4), list[int]()

    def noted(sender: PeerId, receiver: PeerId, message: object) -> None:
        del sender
        if isinstance(message, wire.Pass) and receiver == OWNER:
            rows.extend(header.shape[1] for header in message.tensors)

    async def story() -> list[list[float]]:
        async with running(model, tmp_path, pooling=Pooling((mode,), ()), on_message=noted) as job:
            rows.clear()
            return await job.engine.embed(asked, "")

    found = asyncio.run(story())
    own = own_encoder(model)
    for tokens, vector in zip(asked, found, strict=True):
        said = states(own, tokens).astype(np.float64)
        weights = np.arange(1, len(tokens) + 1)[:, None]
        expected = {
            "cls": said[0],
            "max": said.max(axis=0),
            "mean": said.mean(axis=0),
            "mean_sqrt_len_tokens": said.sum(axis=0) / len(tokens) ** 0.5,
            "weightedmean": (said * weights).sum(axis=0) / weights.sum(),
            "lasttoken": said[-1],
        }[mode]
        np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-5)
    single = mode in ("cls", "lasttoken")
    assert sum(rows) == (len(asked) if single else sum(map(len, asked)))


def test_a_text_is_computed_again_with_the_same_bits_when_a_machine_dies(tmp_path: Path) -> None:
    model = saved_encoder(tmp_path / "model", "bert")
    asked = texts(40)

    async def story() -> tuple[list[list[float]], list[list[float]], list[frozenset[str]]]:
        async with running(model, tmp_path, spares=1) as job:
            before = await job.engine.embed(asked, "")
            embedding = asyncio.create_task(job.engine.embed(asked, ""))
            await asyncio.sleep(0)
            await asyncio.sleep(0.02)
            assert not embedding.done()
            job.pool.kill(peer_id(1))
            return before, await embedding, job.replanner.asked

    before, after, lost = asyncio.run(story())
    assert lost, "no machine was replaced"
    assert before == after


def test_texts_of_one_request_do_not_fill_the_queue(tmp_path: Path) -> None:
    model = saved_encoder(tmp_path / "model", "bert")

    async def story() -> int:
        async with running(model, tmp_path, queue=80) as job:
            return len(await job.engine.embed(texts(300, 9), ""))

    assert asyncio.run(story()) == 300
