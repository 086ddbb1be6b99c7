"""Bodies of requests that read texts without continuing them, and of their answers: vectors in OpenAI's form, ranks in
the form that Jina, Cohere and vLLM share, scores in vLLM's.

`requests` reads bodies, `texts` fills the answers, `app` describes them in its OpenAPI document.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from fusionai.gateway.requests import OPENAI, OtherFields, TokenId, Word

Cut = Annotated[int, Meta(ge=-1, le=2**31)]
"""vLLM's `truncate_prompt_tokens`: the length to which longer texts are cut; -1: as long as the model allows."""

RERANK: Final = OtherFields(
    harmless=OPENAI.harmless,
    neutral={"rank_fields": (None, ["text"]), "max_chunks_per_doc": (None, 1), "softmax": (None,)},
    advice={"rank_fields": "Documents are texts, or objects with a text as `text`."},
)


class EmbeddingRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`. `truncate_prompt_tokens` as in vLLM. `prompt_name`: one of the model's own prompts, to be
    put before each text, as in sentence-transformers."""

    model: Annotated[str, Meta(max_length=512)]
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    truncate_prompt_tokens: Cut | None = None
    prompt_name: Word | None = None


class Embedding(Struct, frozen=True):
    """One vector; in base64 it is little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class TextUsage(Struct, frozen=True):
    """Token count over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True):
    """Answer to `POST /v1/embeddings`."""

    data: list[Embedding]
    model: str
    usage: TextUsage
    object: Literal["list"] = "list"


class Document(Struct, frozen=True):
    """A document to rank."""

    text: str


class RerankRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/rerank`. `top_n`: how many results, the best first; 0 or null: all. `return_documents` null: as the
    path does it. `max_tokens_per_doc`: longer documents are cut to this length. `use_activation` false: the model's
    plain numbers."""

    model: Annotated[str, Meta(max_length=512)]
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Cut | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    use_activation: bool | None = None


class Ranked(Struct, frozen=True):
    """A document's place. `index`: its number in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RankedList(Struct, frozen=True):
    """Answer to `POST /v1/rerank`, the most relevant document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: TextUsage


class ScoreRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/score`: one text against each of the others, or as many pairs as both lists have."""

    model: Annotated[str, Meta(max_length=512)]
    text_1: str | Annotated[list[str], Meta(min_length=1)]
    text_2: str | Annotated[list[str], Meta(min_length=1)]
    truncate_prompt_tokens: Cut | None = None
    use_activation: bool | None = None


class Score(Struct, frozen=True):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, frozen=True):
    """Answer to `POST /v1/score`."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: TextUsage
    object: Literal["list"] = "list"
