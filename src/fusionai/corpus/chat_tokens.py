"""Conversations as tokens, each marked whether it is trained, by where the answers stand.

The tokens are those that `serving.model_text` uses as prompts: the same template, and names of special tokens in
people's messages are plain text. Neighbours: `templates` renders the text, `chat_file` stores the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as Engine

from fusionai.corpus.conversations import ChatConversation
from fusionai.corpus.files import RowError
from fusionai.corpus.templates import ConversationError, chat_templates, special_texts
from fusionai.corpus.tokens import CorpusTokenizer
from fusionai.primitives.errors import DataError, ModelError

TEMPLATE_FILE: Final = "chat_template.jinja"
THEN: Final = datetime(2025, 1, 1, tzinfo=UTC)
"""The date for templates that write the current date, so that a job's tokens don't depend on when it runs."""
_LEAD: Final = "\n"


@dataclass(frozen=True, slots=True)
class WrittenTokens:
    """A conversation as text: (text, whether names of special tokens in it are those tokens), and the character spans
    of the trained answers in the joined text. `ends`: the end-of-text token follows."""

    pieces: tuple[tuple[str, bool], ...]
    spans: tuple[tuple[int, int], ...]
    ends: bool

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """`ids` uint32 [n]; `trained` bool [n]: whether the token is a label. The first token never is, as nothing precedes
    it."""

    ids: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.bool_]


def read_template(path: str | None) -> str | None:
    """Text of a template file. Raises `DataError`."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"no chat template at {path}.", hint="Correct [data] template.") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: the chat template can't be read ({problem}).") from None


class ChatWriter:
    """Renders conversations as text. `files`: the tokenizer's. `template` replaces the tokenizer's own template."""

    def __init__(self, files: dict[str, bytes], template: str | None, loss_on: Literal["answers", "all"]) -> None:
        """Raises `DataError` if the template does not compile."""
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        special = json.loads(files.get("special_tokens_map.json", b"{}"))
        own = files.get(TEMPLATE_FILE)
        texts = {} if own is None else {"default": own.decode()}
        if template is not None:
            texts = {"default": template}
        variables = special_texts({**special, **config})
        try:
            self._plain, self._with_tools = chat_templates(config, texts, variables, now=lambda: THEN)
        except ModelError as problem:
            raise DataError(problem.message, hint="Give another one with [data] template.") from problem
        self._all = loss_on == "all"
        self._marks = _special_names(files)

    @property
    def is_plain(self) -> bool:
        """True if there is no template."""
        return self._plain.is_plain

    def write(self, conversation: ChatConversation) -> WrittenTokens:
        """Render a conversation. Raises `RowError` if the template does not accept it."""
        template = self._with_tools if conversation.tools else self._plain
        messages, answers = conversation.messages, conversation.answers
        try:
            pieces, spans = template.render_answers(
                messages, self._marks, () if self._all else answers, tools=conversation.tools or None
            )
        except ConversationError as problem:
            raise RowError(problem.message) from problem
        if self._all:
            spans = [(0, sum(len(text) for text, _ in pieces))]
        # Text written without a template has no mark at the end of an answer.
        ends = template.is_plain and (self._all or len(messages) - 1 in answers)
        return WrittenTokens(tuple(pieces), tuple(spans), ends)


class ChatEncoder:
    """Tokenizes what a `ChatWriter` wrote."""

    def __init__(self, tokenizer: CorpusTokenizer) -> None:
        content = tokenizer.files["tokenizer.json"].decode()
        self._trusting, self._plain = Engine.from_str(content), Engine.from_str(content)
        for engine in (self._trusting, self._plain):
            engine.no_padding()
            engine.no_truncation()
        self._plain.encode_special_tokens = True
        self._tokenizer = tokenizer

    def encode(self, conversations: Sequence[WrittenTokens]) -> list[ChatTokens]:
        """Tokens of the conversations in order; uses all cores."""
        firsts = self._trusting.encode_batch(
            [one.pieces[0][0] if one.pieces and one.pieces[0][1] else "" for one in conversations],
            add_special_tokens=False,
        )
        return [self._one(written, first) for written, first in zip(conversations, firsts, strict=True)]

    def _one(self, written: WrittenTokens, first: Encoding) -> ChatTokens:
        ids: list[int] = []
        trained: list[bool] = []
        at = 0
        for number, (text, trusted) in enumerate(written.pieces):
            if number:
                tokens, places = self._inside(text, trusted=trusted)
            elif trusted:
                tokens, places = first.ids, first.offsets
            else:
                encoded = self._plain.encode(text, add_special_tokens=False)
                tokens, places = encoded.ids, encoded.offsets
            ids += tokens
            trained += [_overlaps(start + at, end + at, written.spans) for start, end in places]
            at += len(text)
        if written.ends:
            ids.append(self._tokenizer.end_id)
            trained.append(True)
        if trained:
            trained[0] = False
        return ChatTokens(np.asarray(ids, dtype="<u4"), np.asarray(trained, dtype=np.bool_))

    def _inside(self, text: str, *, trusted: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode text in the middle of another text, where no tokenizer may put a space before it."""
        engine = self._trusting if trusted else self._plain
        lead = self._trusting.encode(_LEAD, add_special_tokens=False).ids
        encoded = engine.encode(_LEAD + text, add_special_tokens=False)
        if encoded.ids[: len(lead)] == lead:
            places = [(start - len(_LEAD), end - len(_LEAD)) for start, end in encoded.offsets[len(lead) :]]
            return encoded.ids[len(lead) :], places
        encoded = engine.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets


def _overlaps(start: int, end: int, spans: tuple[tuple[int, int], ...]) -> bool:
    """Return whether a token overlaps a span. A token without characters counts where it stands."""
    return any(start < last and max(end, start + 1) > first for first, last in spans)


def _special_names(files: dict[str, bytes]) -> tuple[str, ...]:
    """Names of special tokens, which stay plain text in people's messages."""
    if "tokenizer.json" not in files:
        return ()
    spec = json.loads(files["tokenizer.json"])
    return tuple(str(token["content"]) for token in spec.get("added_tokens", ()) if token.get("special"))
