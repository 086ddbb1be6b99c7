"""Encoders on the job owner's machine: opens that of an encoder-decoder model, says what a model's encoders read, and
ends them.

`client.serving.model` opens models, `client.serving.serve` shows the notes; `capture.models.sources` runs the encoder,
`serving.sources` says how requests use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fusionai.capture.capture import Captured
from fusionai.capture.models.sources import SourceEncoder
from fusionai.serving.model_text import ModelText
from fusionai.serving.sources import DecoderRules, Source, SpeechTokens, source_positions
from fusionai.serving.text import read_json


def with_source(directory: Path, captured: Captured, texts: ModelText) -> ModelText:
    """Return the model's text with its encoder, loaded and tried. Blocking. Raises `ModelError`."""
    encoder = SourceEncoder(captured, directory)
    rules = DecoderRules.load(directory)
    speech = SpeechTokens.load(directory, texts.tokenizer) if encoder.hears else None
    source = Source(encoder, rules, speech, source_positions(captured.config or {}))
    samples = read_json(directory / "generation_config.json").get("do_sample") is True
    sampling = texts.sampling if samples else replace(texts.sampling, temperature=0.0)
    return replace(texts, source=source, sampling=sampling)


def encoder_notes(name: str, texts: ModelText) -> Iterator[str]:
    """Yield what the encoders of the model `name` read, and what the answers differ in from transformers' defaults."""
    if texts.images is not None:
        yield f"{name} reads images; this machine encodes them"
    if texts.source is not None:
        yield f"{name} reads {'text' if texts.source.speech is None else 'speech'} with its encoder, on this machine"
        yield from (f"{name}: {words}" for words in texts.source.rules.words)


def close_encoders(texts: ModelText) -> None:
    """End the encoders' threads."""
    for reader in (texts.images, texts.source):
        if reader is not None:
            reader.close()
