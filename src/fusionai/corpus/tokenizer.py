"""Text to token ids and back: a byte-level BPE trained here, or a model's own tokenizer. Decides special tokens and
which files make up a tokenizer.

Uses the `tokenizers` library alone, no model framework. The files are in Hugging Face layout, so `AutoTokenizer` can
load them. Neighbours: `tokens` encodes with it, checkpoints contain its files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from fusionai.corpus.tables import HubTokenizer, LocalTokenizer
from fusionai.primitives.errors import DataError
from fusionai.storage.atomic import write_atomic

END_OF_TEXT: Final = "<|endoftext|>"
MASK: Final = "<|mask|>"
_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)
_PAD_TO_NOTHING: Final = 10**30
"""The `model_max_length` that transformers writes for a tokenizer without a limit."""


class Tokenizer:
    """Encodes text as plain text: a special token's name in the data never becomes that token."""

    def __init__(self, files: dict[str, bytes], where: str) -> None:
        """`files`: name -> content, with `tokenizer.json` and `tokenizer_config.json` among them. Raises `DataError` if
        they can't be read."""
        try:
            self._engine = Engine.from_str(files["tokenizer.json"].decode())
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
        # `tokenizers` raises a bare Exception for a file it can't parse.
        except Exception as problem:
            raise DataError(f"{where}: not a readable tokenizer: {problem}") from problem
        self._engine.encode_special_tokens = True
        self._engine.no_padding()
        self._engine.no_truncation()
        self._files = dict(files)
        special = json.loads(files.get("special_tokens_map.json", b"{}"))
        self._end_id = self._special_id("eos", config, special)
        if self._end_id is None:
            # BERT-type tokenizers end a document with their separator.
            self._end_id = self._special_id("sep", config, special)
        self._mask_id = self._special_id("mask", config, special)
        self._where = where

    @property
    def files(self) -> dict[str, bytes]:
        """Name -> content of all files that belong next to a model."""
        return dict(self._files)

    @property
    def content_hash(self) -> str:
        """SHA-256 of `tokenizer.json` and the special tokens, hex."""
        text = self._files["tokenizer.json"] + f"{self._end_id}:{self._mask_id}".encode()
        return hashlib.sha256(text).hexdigest()

    @property
    def vocabulary(self) -> int:
        """The largest token id plus 1, the least `vocab_size` that a model needs."""
        return max(self._engine.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_id(self) -> int:
        """The token that ends a document. Raises `DataError` if there is none."""
        if self._end_id is None:
            raise DataError(f"{self._where}: no end-of-text token.", hint="Set eos_token in tokenizer_config.json.")
        return self._end_id

    @property
    def mask_id(self) -> int:
        """The mask token. Raises `DataError` if there is none."""
        if self._mask_id is None:
            raise DataError(f"{self._where}: no mask token.", hint="Masked language models need a mask_token.")
        return self._mask_id

    def encode(self, text: str) -> list[int]:
        """Token ids, without added special tokens."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for several texts, on all cores."""
        return [encoding.ids for encoding in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, without special tokens."""
        return self._engine.decode(list(tokens), skip_special_tokens=True)

    def spell(self, tokens: Iterable[int]) -> str:
        """Text of tokens, with the names of special tokens."""
        return self._engine.decode(list(tokens), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files to a directory. Raises `StorageError`."""
        for name, content in self._files.items():
            write_atomic(directory / name, content)

    def _special_id(self, name: str, config: dict[str, Any], special: dict[str, Any]) -> int | None:
        for source in (config, special):
            token = source.get(f"{name}_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return self._engine.token_to_id(text)
        return None


def train_tokenizer(texts: Iterator[str], vocabulary: int, *, masked: bool = False) -> Tokenizer:
    """Train a byte-level BPE: every text round-trips and nothing is unknown. The same texts give the same tokenizer.

    `vocabulary`: the most entries it may have; a small corpus gives fewer. `masked` adds a mask token.
    """
    special = [END_OF_TEXT, MASK] if masked else [END_OF_TEXT]
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer=trainer)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": _PAD_TO_NOTHING,
        "clean_up_tokenization_spaces": False,
    }
    if masked:
        config["mask_token"] = MASK
    files = {
        "tokenizer.json": engine.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }
    return Tokenizer(files, "the trained tokenizer")


def load_tokenizer(source: LocalTokenizer | HubTokenizer) -> Tokenizer:
    """Load a tokenizer from a directory or the hub. Raises `DataError` with what is missing."""
    match source:
        case LocalTokenizer(path=path):
            return _load_directory(Path(path))
        case HubTokenizer(hub=hub):
            return Tokenizer(_download(hub), hub)


def _load_directory(directory: Path) -> Tokenizer:
    if not directory.is_dir():
        raise DataError(f"no tokenizer directory at {directory}.")
    files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    if "tokenizer.json" not in files:
        raise DataError(
            f"{directory}: no tokenizer.json.",
            hint="Write one with transformers: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY).",
        )
    return Tokenizer(files, str(directory))


def _download(hub: str) -> dict[str, bytes]:
    try:
        # In one request: without a network, one request per file would take half a minute to fail.
        directory = Path(snapshot_download(hub, allow_patterns=list(_FILES)))
        files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    except LocalEntryNotFoundError as problem:
        raise DataError(
            f"tokenizer of {hub}: not in the local cache, and the hub can't be reached.",
            hint="Check the network, or give a local directory with path.",
        ) from problem
    # The hub client raises HTTP, validation and OS errors, none with a common base.
    except Exception as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise DataError(f"tokenizer of {hub}: can't be downloaded: {reason}") from problem
    if "tokenizer.json" not in files:
        raise DataError(f"{hub}: has no tokenizer.json on the hub.")
    return files
