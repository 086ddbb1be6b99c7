"""Text to token numbers and back: a byte-level BPE trained here, or the tokenizer of a model. Decides special tokens
and the files a tokenizer consists of; packs nothing.

Uses the `tokenizers` library alone, no model framework. Files are in Hugging Face layout: `AutoTokenizer` loads them.
Neighbours: `tokens` encodes with it, checkpoints carry its files.
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
"""What transformers writes as `model_max_length` for a tokenizer without a limit."""


class Tokenizer:
    """Encodes text as text: a special token's name in the data never becomes that token."""

    def __init__(self, files: dict[str, bytes], where: str) -> None:
        """`files`: name -> content, with `tokenizer.json` and `tokenizer_config.json` among them. Raises `DataError`
        when they don't hold or name no token that ends a document."""
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
        """Name -> content of everything to put beside a model."""
        return dict(self._files)

    @property
    def content_hash(self) -> str:
        """SHA-256 of `tokenizer.json` and the special tokens, hex."""
        text = self._files["tokenizer.json"] + f"{self._end_id}:{self._mask_id}".encode()
        return hashlib.sha256(text).hexdigest()

    @property
    def vocabulary(self) -> int:
        """One more than the largest token number: what a model's `vocab_size` must at least be."""
        return max(self._engine.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_id(self) -> int:
        """The token that ends a document. Raises `DataError` where there is none."""
        if self._end_id is None:
            raise DataError(f"{self._where}: no end-of-text token.", hint="Set eos_token in tokenizer_config.json.")
        return self._end_id

    @property
    def mask_id(self) -> int:
        """The token that hides another. Raises `DataError` where there is none."""
        if self._mask_id is None:
            raise DataError(f"{self._where}: no mask token.", hint="Masked language models need a mask_token.")
        return self._mask_id

    def encode(self, text: str) -> list[int]:
        """Token numbers, no special tokens added."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, on all cores."""
        return [encoding.ids for encoding in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, special ones left out."""
        return self._engine.decode(list(tokens), skip_special_tokens=True)

    def spell(self, tokens: Iterable[int]) -> str:
        """As `decode`, with the names of special tokens."""
        return self._engine.decode(list(tokens), skip_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write its files. Raises `StorageError`."""
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
    """Byte-level BPE (the same texts give the same tokenizer): any text round-trips, nothing is unknown.

    `vocabulary` is the most entries it may have; a small corpus gives fewer. `masked` adds a mask token.
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
    """Raises `DataError` saying what is missing."""
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
        # All at once: asking for one file after the other takes half a minute to find that there is no network.
        directory = Path(snapshot_download(hub, allow_patterns=list(_FILES)))
        files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    except LocalEntryNotFoundError as problem:
        raise DataError(
            f"tokenizer of {hub}: it is not in the local cache and the hub can't be reached.",
            hint="Check the network, or give a local directory with path.",
        ) from problem
    # The hub client raises HTTP, validation and OS errors, none with a common base.
    except Exception as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise DataError(f"tokenizer of {hub}: can't be downloaded: {reason}") from problem
    if "tokenizer.json" not in files:
        raise DataError(f"{hub}: has no tokenizer.json on the hub.")
    return files
