"""Tokenised conversations with their labels: renders and encodes the data's rows and keeps the result in a file.

    tokens/tokenizer-<key>/   the trained tokenizer
    tokens/<key>/             both parts (`ChatParts`), manifest.json
    tokens/bad_rows.jsonl     rows that were left out

The tokens are those that `serving.model_text` uses as prompts: the same template, and names of special tokens in
people's messages are plain text. `corpus.conversations` checks rows, `corpus.templates` renders them,
`corpus.chat_source` cuts training rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as Engine

from fusionai.corpus.conversations import KEYS, ChatConversation, conversation_of
from fusionai.corpus.files import BadRow, BadRows, RowError, check_bad_rows
from fusionai.corpus.order import Split
from fusionai.corpus.tables import ChatData, HubTokenizer, LocalTokenizer, TrainTokenizer
from fusionai.corpus.templates import ConversationError, chat_templates, special_texts
from fusionai.corpus.text import rows_of
from fusionai.corpus.tokens import (
    CorpusTokenizer,
    HashedFiles,
    Progress,
    batched,
    cache_key,
    cached_tokenizer,
    content_of,
    load_tokenizer,
    mapped,
    read_manifest,
    write_manifest,
)
from fusionai.primitives.errors import DataError, ModelError
from fusionai.storage.atomic import storage_errors, whole_directory

_KINDS: Final = ("bin", "labels.bin", "ends.bin")


class PartCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Number of conversations in a part, of their tokens, and of the tokens that are trained."""

    conversations: int
    tokens: int
    labels: int


class ChatParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`truncated`: conversations cut at their end; `dropped`: left out because of their length; `unanswered`: left out
    because no label remained. `fingerprint`: SHA-256 over all files."""

    train: PartCounts
    evaluation: PartCounts
    truncated: int
    dropped: int
    unanswered: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ChatPart:
    """Read-only memory-mapped arrays: tokens [n], labels [n] (1: trained), end of each conversation [m]."""

    tokens: npt.NDArray[np.uint32]
    labels: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]


def _open_part(stem: Path, counts: PartCounts) -> ChatPart:
    """Map the files that begin with `stem`. Raises `StorageError` if their sizes differ from `counts`."""
    return ChatPart(
        tokens=mapped(stem.with_name(f"{stem.name}.bin"), np.dtype("<u4"), counts.tokens),
        labels=mapped(stem.with_name(f"{stem.name}.labels.bin"), np.dtype("u1"), counts.tokens),
        ends=mapped(stem.with_name(f"{stem.name}.ends.bin"), np.dtype("<i8"), counts.conversations),
    )


BAD_ROWS_FILE: Final = "bad_rows.jsonl"
_LAYOUT: Final = 1
_BATCH: Final = 256


class ChatManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of a file of conversations, and counts of its making. `plain`: there was no chat template."""

    layout: int
    rows: int
    bad_rows: int
    first_bad: tuple[BadRow, ...]
    plain: bool
    written: ChatParts


@dataclass(frozen=True, slots=True)
class ChatFile:
    """Both parts and the tokenizer that made them; the tokenizer's files include the template."""

    train: ChatPart
    evaluation: ChatPart
    manifest: ChatManifest
    tokenizer: CorpusTokenizer
    bad_rows: Path


def open_chat(data: ChatData, directory: Path, seed: int, progress: Progress | None = None) -> ChatFile:
    """Find the file for `data` in the cache at `directory`, or make it. Raises `DataError` if the data can't be read or
    has too many invalid rows, `StorageError` for the cache."""
    template = read_template(data.template)
    split = Split(data.evaluation_fraction, seed)
    listing = directory / BAD_ROWS_FILE
    made_by = [str(_LAYOUT), "chat", data.layout, content_of(data.source), repr(template)]
    made_by.append(repr(data.evaluation_fraction))
    if data.evaluation_fraction > 0:
        made_by.append(str(seed))
    match data.tokenizer:
        case TrainTokenizer(vocabulary=vocabulary):
            place = directory / f"tokenizer-{cache_key([*made_by, str(vocabulary)])}"
            every = _written(
                data, ChatWriter({}, template, "all"), "tokenizer", BadRows(data.bad_rows, listing), progress
            )
            texts = (written.text for index, written in enumerate(every) if not split.is_evaluation(index))
            tokenizer = cached_tokenizer(place, texts, vocabulary)
        case LocalTokenizer() | HubTokenizer():
            tokenizer = load_tokenizer(data.tokenizer)
    if template is not None:
        tokenizer = CorpusTokenizer({**tokenizer.files, TEMPLATE_FILE: template.encode()}, str(data.template))
    writer = ChatWriter(tokenizer.files, None, data.loss_on)
    spoken = [tokenizer.files.get(name, b"").hex() for name in (TEMPLATE_FILE, "tokenizer_config.json")]
    settings = [str(data.sequence_length), data.loss_on, data.too_long]
    place = directory / cache_key([*made_by, tokenizer.content_hash, *spoken, *settings])
    if not place.is_dir():
        _write(place, data, writer, tokenizer, split, BadRows(data.bad_rows, listing), progress)
    manifest = read_manifest(place, ChatManifest)
    check_bad_rows(list(manifest.first_bad), manifest.bad_rows, manifest.rows, data.bad_rows, listing)
    return ChatFile(
        train=_open_part(place / "train", manifest.written.train),
        evaluation=_open_part(place / "evaluation", manifest.written.evaluation),
        manifest=manifest,
        tokenizer=tokenizer,
        bad_rows=listing,
    )


def _written(
    data: ChatData, writer: ChatWriter, what: str, bad: BadRows, progress: Progress | None
) -> Iterator[WrittenTokens]:
    """Yield every conversation as text, without invalid rows. Raises `DataError` if there are too many of those."""
    with bad:
        for place, row in rows_of(data.source, KEYS[data.layout]):
            try:
                if isinstance(row, RowError):
                    raise row
                written = writer.write(conversation_of(row, data.layout))
            except RowError as problem:
                bad.bad(place, str(problem))
                continue
            bad.good()
            if progress is not None:
                progress(what, bad.rows)
            yield written
        bad.settle()


def _write(
    place: Path,
    data: ChatData,
    writer: ChatWriter,
    tokenizer: CorpusTokenizer,
    split: Split,
    bad: BadRows,
    progress: Progress | None,
) -> None:
    """Write the directory as a whole or not at all: it gets its name when all files are on disk."""
    encoder = ChatEncoder(tokenizer)
    seen = truncated = dropped = unanswered = 0
    counts = [[0, 0, 0], [0, 0, 0]]
    with whole_directory(place) as partial:
        names = [partial / f"{part}.{kind}" for part in ("train", "evaluation") for kind in _KINDS]
        with storage_errors(partial), HashedFiles(*names) as files:
            texts = _written(data, writer, "tokens", bad, progress)
            for batch in batched(texts, _BATCH, lambda written: sum(len(text) for text, _ in written.pieces)):
                for conversation in encoder.encode(batch):
                    part = int(split.is_evaluation(seen))
                    seen += 1
                    ids, trained = conversation.ids, conversation.trained
                    if len(ids) > data.sequence_length:
                        if data.too_long == "drop":
                            dropped += 1
                            continue
                        truncated += 1
                        ids, trained = ids[: data.sequence_length], trained[: data.sequence_length]
                    if not trained.any():
                        unanswered += 1
                        continue
                    added = (1, len(ids), int(trained.sum()))
                    counts[part] = [count + more for count, more in zip(counts[part], added, strict=True)]
                    end = np.int64(counts[part][1])
                    for kind, array in enumerate((ids, trained.astype("u1"), end.astype("<i8"))):
                        files.append(len(_KINDS) * part + kind, array.tobytes())
            train, evaluation = (
                PartCounts(conversations=conversations, tokens=tokens, labels=labels)
                for conversations, tokens, labels in counts
            )
            written = ChatParts(
                train=train,
                evaluation=evaluation,
                truncated=truncated,
                dropped=dropped,
                unanswered=unanswered,
                fingerprint=files.fingerprint(),
            )
        manifest = ChatManifest(
            layout=_LAYOUT,
            rows=bad.rows,
            bad_rows=bad.count,
            first_bad=tuple(bad.first),
            plain=writer.is_plain,
            written=written,
        )
        write_manifest(partial, manifest)


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
    """`ids` uint32 [n]; `trained` bool [n]: whether the token is a label. The first never is."""

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
