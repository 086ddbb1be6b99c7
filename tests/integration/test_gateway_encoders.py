"""Encoders and cross-encoders over HTTP, as clients of embedding servers ask them: vectors, ranks, scores, refusals."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import transformers

from fusionai.capture.models.source import DirectorySource
from fusionai.capture.served import capture_served
from fusionai.gateway.config import GatewayConfig
from fusionai.ir.serving import purpose_of, serving_graph
from fusionai.serving.model_text import ModelText
from fusionai.wire.messages import ServeOptions
from harness.gateway_stand import gateway_stand
from harness.patience import CEILING_S
from harness.pool import OWNER, peer_id
from harness.serving_pool import served
from harness.small_encoders import LONGEST, VOCABULARY, own_encoder, saved_encoder, write_modules

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")
TEXTS = ["a pool of peers", "one model to all who ask for vectors", "By night"]
QUERY = "who serves vectors"


@dataclass
class Asked:
    """A served model and clients of it."""

    model: Path
    openai: Any
    http: httpx2.AsyncClient

    async def post(self, path: str, **fields: Any) -> httpx2.Response:
        return await self.http.post(path, json={"model": "tiny", **fields})

    async def refused(self, path: str, **fields: Any) -> tuple[int, str, str | None]:
        """Status, message and code."""
        answer = await self.post(path, **fields)
        error = answer.json()["error"]
        return answer.status_code, error["message"], error["code"]


@asynccontextmanager
async def asked(model: Path, directory: Path) -> AsyncIterator[Asked]:
    """The gateway for `model`, whose layers are on three peers."""
    captured = capture_served(DirectorySource(model))
    text = ModelText.load(model)
    async with served(
        captured,
        directory,
        [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
        peers=[OWNER, peer_id(0), peer_id(1), peer_id(2), OWNER],
        options=ServeOptions(page_tokens=4, pages=200, sessions=9, pass_tokens=48, at_once=True),
        vocabulary=VOCABULARY,
        context_tokens=min(LONGEST, text.sentences.longest_tokens or LONGEST),
        purpose=purpose_of(serving_graph(captured.graph)),
        pooling=text.sentences.pooling,
    ) as job:
        engine: Any = job.engine
        engine.text = text
        config = GatewayConfig("tiny")
        async with (
            gateway_stand(engine, config) as stand,
            openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="-", max_retries=0, timeout=CEILING_S) as api,
            httpx2.AsyncClient(base_url=stand.url, timeout=CEILING_S) as http,
        ):
            yield Asked(model, api, http)


def with_served(model: Path, directory: Path, story: Callable[[Asked], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asked(model, directory) as service:
            await story(service)

    asyncio.run(run())


def own_vectors(model: Path, texts: list[str], longest: int = LONGEST) -> np.ndarray[Any, Any]:
    """The first positions' states of a padded batch, scaled to length 1, as sentence-transformers computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    with torch.no_grad():
        first = own_encoder(model)(**batch).last_hidden_state[:, 0]
    return torch.nn.functional.normalize(first, dim=-1).numpy()


def own_scores(model: Path, query: str, documents: list[str]) -> np.ndarray[Any, Any]:
    """What a CrossEncoder of sentence-transformers gives."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    batch = tokenizer([query] * len(documents), documents, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return own_encoder(model)(**batch).logits[:, 0].sigmoid().numpy()


def embedder(directory: Path) -> Path:
    model = saved_encoder(directory / "model", "bert")
    write_modules(model, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, normalise=True)
    config = {"prompts": {"query": "who ask "}, "default_prompt_name": None}
    (model / "config_sentence_transformers.json").write_text(json.dumps(config))
    return model


def test_openai_reads_vectors_of_an_encoder(tmp_path: Path) -> None:
    model = embedder(tmp_path)

    async def story(service: Asked) -> None:
        api, expected = service.openai, own_vectors(model, TEXTS)
        answer = await api.embeddings.create(model="tiny", input=TEXTS)
        np.testing.assert_allclose([one.embedding for one in answer.data], expected, rtol=0, atol=2e-6)
        assert answer.usage.prompt_tokens == 4 + 2 + 8 + 2 + 2 + 2
        plain = await api.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        np.testing.assert_allclose([one.embedding for one in plain.data], expected, rtol=0, atol=2e-6)
        packed = await service.post("/v1/embeddings", input=TEXTS[0], encoding_format="base64")
        found = np.frombuffer(base64.b64decode(packed.json()["data"][0]["embedding"]), "<f4")
        np.testing.assert_allclose(found, expected[0], rtol=0, atol=2e-6)
        short = await api.embeddings.create(model="tiny", input=TEXTS, dimensions=4)
        cut = expected[:, :4] / np.linalg.norm(expected[:, :4], axis=1, keepdims=True)
        np.testing.assert_allclose([one.embedding for one in short.data], cut, rtol=0, atol=2e-6)
        tokens = ModelText.load(model).text_tokens(TEXTS[1])
        by_tokens = await api.embeddings.create(model="tiny", input=[list(tokens)])
        assert by_tokens.data[0].embedding == answer.data[1].embedding
        prompted = await api.embeddings.create(model="tiny", input=TEXTS[0], extra_body={"prompt_name": "query"})
        np.testing.assert_allclose(
            prompted.data[0].embedding, own_vectors(model, ["who ask " + TEXTS[0]])[0], rtol=0, atol=2e-6
        )
        (card,) = [one async for one in api.models.list()]
        assert (card.id, card.task, card.max_model_len) == ("tiny", "embed", LONGEST)
        shown = await service.http.post("/api/show", json={"model": "tiny"})
        assert shown.json()["capabilities"] == ["embedding"]

    with_served(model, tmp_path, story)


def test_long_empty_and_wrong_texts_are_refused_with_the_lengths(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    long = " ".join(["pool", "night", "scores"] * 20)

    async def story(service: Asked) -> None:
        api, path = service.openai, "/v1/embeddings"
        with pytest.raises(openai.BadRequestError, match="The model's limit is 48 tokens; one input has 62"):
            await api.embeddings.create(model="tiny", input=["a pool", long])
        cut = await api.embeddings.create(model="tiny", input=[long], extra_body={"truncate_prompt_tokens": -1})
        np.testing.assert_allclose(cut.data[0].embedding, own_vectors(model, [long])[0], rtol=0, atol=2e-6)
        assert cut.usage.prompt_tokens == LONGEST
        nine = await api.embeddings.create(model="tiny", input=[long], extra_body={"truncate_prompt_tokens": 9})
        np.testing.assert_allclose(nine.data[0].embedding, own_vectors(model, [long], 9)[0], rtol=0, atol=2e-6)
        exact = " ".join(["pool"] * (LONGEST - 2))
        assert (await api.embeddings.create(model="tiny", input=exact)).usage.prompt_tokens == LONGEST
        for fields, said in (
            ({"input": ""}, "`input` has an empty text"),
            ({"input": ["a", ""]}, "`input` has an empty text"),
            ({"input": [[]]}, "`input` is empty"),
            ({"input": [VOCABULARY]}, "outside the vocabulary"),
            ({"input": ["a", 7]}, "not a mixture"),
            ({"input": "a", "dimensions": 17}, "16 dimensions, not 17"),
            ({"input": "a", "truncate_prompt_tokens": 49}, "from 1 to the model's limit of 48 tokens, got 49"),
            ({"input": "a", "prompt_name": "passage"}, "The model has no prompt `passage`. Its prompts: query."),
            ({"input": [5], "prompt_name": "query"}, "before texts only"),
        ):
            status, message, _ = await service.refused(path, **fields)
            assert (status, said in message) == (400, True), message
        assert (await service.refused(path, input={"a": 1}))[0] == 400
        assert (await service.refused(path, input="a", model="other"))[0] == 404

    with_served(model, tmp_path, story)


def test_other_tasks_than_the_model_s_are_refused(tmp_path: Path) -> None:
    model = embedder(tmp_path)

    async def story(service: Asked) -> None:
        with pytest.raises(openai.BadRequestError, match=r"gives no text\. It gives vectors of texts") as refusal:
            await service.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        assert refusal.value.code == "unsupported_by_model"
        with pytest.raises(openai.BadRequestError, match="gives no text"):
            await service.openai.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.BadRequestError, match="gives no text"):
            await service.openai.responses.create(model="tiny", input="a")
        status, message, _ = await service.refused("/v1/rerank", query="a", documents=["a"])
        assert (status, "gives no scores of pairs of texts" in message) == (400, True)
        for path in ("/v1/messages", "/api/chat"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
            answer = await service.http.post(path, json=body)
            assert (answer.status_code, "gives no text" in answer.text) == (400, True)

    with_served(model, tmp_path, story)


def test_documents_are_ranked_as_by_a_cross_encoder(tmp_path: Path) -> None:
    model = saved_encoder(tmp_path / "model", "bert", scores=True)

    async def story(service: Asked) -> None:
        expected = own_scores(model, QUERY, TEXTS)
        order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
        for path, shows in (("/v1/rerank", True), ("/rerank", True), ("/v2/rerank", False)):
            answer = (await service.post(path, query=QUERY, documents=TEXTS)).json()
            assert [one["index"] for one in answer["results"]] == order
            np.testing.assert_allclose(
                [one["relevance_score"] for one in answer["results"]], expected[order], rtol=0, atol=2e-6
            )
            assert [one.get("document") for one in answer["results"]] == [
                {"text": TEXTS[index]} if shows else None for index in order
            ]
            assert answer["usage"]["total_tokens"] == sum(len(QUERY.split()) + len(one.split()) + 3 for one in TEXTS)
        best = (
            await service.post("/v1/rerank", query=QUERY, documents=[{"text": one} for one in TEXTS], top_n=1)
        ).json()
        assert [one["index"] for one in best["results"]] == order[:1]
        bare = (await service.post("/rerank", query=QUERY, documents=TEXTS, return_documents=False)).json()
        assert not any("document" in one for one in bare["results"])
        scored = (await service.post("/v1/score", text_1=QUERY, text_2=TEXTS)).json()
        np.testing.assert_allclose([one["score"] for one in scored["data"]], expected, rtol=0, atol=2e-6)
        plain = (await service.post("/v1/score", text_1=QUERY, text_2=TEXTS, use_activation=False)).json()
        logits = np.log(expected / (1 - expected))
        np.testing.assert_allclose([one["score"] for one in plain["data"]], logits, rtol=0, atol=1e-4)
        long = " ".join(["pool", "night", "scores"] * 20)
        cut = (await service.post("/v1/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=-1)).json()
        np.testing.assert_allclose(cut["data"][0]["score"], own_scores(model, QUERY, [long])[0], rtol=0, atol=2e-6)
        fewer = (await service.post("/v1/rerank", query=QUERY, documents=[long], max_tokens_per_doc=6)).json()
        kept = own_scores(model, QUERY, [" ".join(long.split()[:6])])[0]
        np.testing.assert_allclose(fewer["results"][0]["relevance_score"], kept, rtol=0, atol=2e-6)
        for fields, said in (
            ({"query": QUERY, "documents": ["a", long]}, "limit is 48 tokens; `query` with one of `documents` has 66"),
            ({"query": "", "documents": ["a"]}, "`query` has an empty text"),
            ({"query": "a", "documents": [""]}, "`documents` has an empty text"),
            ({"query": "a", "documents": []}, "documents"),
            ({"query": "a", "documents": [7]}, "documents"),
            ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ):
            status, message, _ = await service.refused("/v1/rerank", **fields)
            assert (status, said in message) == (400, True), message
        status, message, _ = await service.refused("/v1/score", text_1=["a", "b"], text_2=["a"])
        assert (status, "`text_1` has 2 texts and `text_2` 1" in message) == (400, True)
        with pytest.raises(
            openai.BadRequestError, match=r"gives no vectors of texts\. It gives scores of pairs of texts"
        ):
            await service.openai.embeddings.create(model="tiny", input="a")

    with_served(model, tmp_path, story)
