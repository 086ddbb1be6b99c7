"""Capture a model for serving as what its configuration says it is: a causal language model, an encoder of texts, or a
classifier of texts.

Decides which of transformers' heads a checkpoint gets, and how long its texts may be. Neighbours: `capture.capture`
does the work, `ir.serving` makes the graph that is served and says what it is for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.shrinking import reduced
from fusionai.capture.models.build import Adapters
from fusionai.capture.models.huggingface import resolve
from fusionai.capture.models.image_processor import NoImages
from fusionai.capture.models.seq2seq import require_equal
from fusionai.capture.models.source import (
    Architecture,
    CodeSource,
    ConfigSource,
    DirectorySource,
    FactorySource,
    GgufSource,
    HubSource,
    ModelSource,
)
from fusionai.capture.tasks import ROWS, TOKENS, ExampleInput
from fusionai.capture.tracing.export import LongestApart
from fusionai.ir.serving import BATCH, SEQUENCE, TOKEN_TYPES
from fusionai.primitives.errors import GraphError, ModelError

LONGEST_PASS: Final = 2048
"""Most positions per pass for which the graph of a causal model is captured (chosen), unless the model has a lower
limit."""
LONGEST_TEXT: Final = 8192
"""Most positions of a text for which the graph of an encoder is captured (chosen): the limit of today's long ones."""
SMALL_LAYERS: Final = 2
"""Layers of the copy on which an encoder-decoder model is tried (chosen)."""
SMALL_DIVISOR: Final = 4
"""Divisor of its widths and heads (chosen)."""
_SMALL_TOKENS: Final = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
"""Special tokens of that copy, within its small vocabulary."""
SENTENCE_MODULES: Final = "modules.json"
"""File that lists the modules of a model of sentence-transformers."""


def capture_served(source: ModelSource, adapter: Adapters | None = None, *, images: bool = False) -> Captured:
    """Capture `source` for `ir.serving.serving_graph`; with `images`, as it is, to take rows of images. Raises
    `ModelError` with the reason if it can't be captured, `NoImages` if it can't be with images."""
    architecture = "causal_lm" if images else serving_architecture(source)
    if architecture == "seq2seq_lm":
        return _seq2seq(replace(source, architecture=architecture), adapter)
    if isinstance(source, CodeSource | FactorySource) or architecture == "causal_lm":
        try:
            return _causal(source, LONGEST_PASS, adapter, images=images)
        except LongestApart as error:
            return _causal(source, error.length - 1, adapter, images=images)
        except NoImages:
            raise
        except ModelError as error:
            return _with_own_attention(source, adapter, error)
    if adapter is not None:
        raise ModelError(
            "adapters are served with causal language models only, and this model is an encoder of texts.",
            hint="Merge the adapter into the model's weights, and serve the result.",
        )
    source = replace(source, architecture=architecture)
    return capture(
        source,
        task="none",
        batch=(1, 1),
        sequence=(1, LONGEST_TEXT),
        train=False,
        example_inputs=_pair_inputs(source) if architecture == "classification" else None,
    ).as_filed()


def _causal(source: ModelSource, longest: int, adapter: Adapters | None, *, images: bool) -> Captured:
    return capture(source, batch=(1, 2), sequence=(1, longest), train=False, adapter=adapter, images=images).as_filed()


def _seq2seq(source: ModelSource, adapter: Adapters | None) -> Captured:
    """Capture the decoder of an encoder-decoder model, behind the rows of its encoder. Raises `NoDecoder`."""
    assert isinstance(source, ConfigSource | DirectorySource | HubSource)
    if adapter is not None:
        raise ModelError(
            "adapters are served with causal language models only, and this model has an encoder before its decoder.",
            hint="Merge the adapter into the model's weights, and serve the result.",
        )
    found = resolve(source)
    fields = {**reduced(found.config.to_dict(), SMALL_LAYERS, SMALL_DIVISOR), **_SMALL_TOKENS}
    small = replace(found, config=type(found.config).from_dict(fields), weights=())
    require_equal(small, type(found.config).__name__.removesuffix("Config"))
    return _causal(source, LONGEST_PASS, None, images=True)


def decoder_words(source: ModelSource) -> str | None:
    """Say how an encoder-decoder model is served, or why it is not; None for other models."""
    if isinstance(source, CodeSource | FactorySource | GgufSource) or serving_architecture(source) != "seq2seq_lm":
        return None
    try:
        captured = capture_served(source)
    except (ModelError, GraphError) as error:
        return f"Not served: {error}"
    how = "from caches" if captured.attention_nodes == captured.attention_layers else "anew for every token"
    return f"Served with its encoder on the job owner's machine; the decoder on the pool computes {how}."


def _with_own_attention(source: ModelSource, adapter: Adapters | None, reason: ModelError) -> Captured:
    """Capture a model that can't have the semantic attention, which `reason` says. It is computed anew for every token.
    Raises `reason` if that fails too."""
    if isinstance(source, CodeSource | FactorySource):
        raise reason
    try:
        captured = capture(
            source, batch=(1, 2), sequence=(1, LONGEST_PASS), train=False, adapter=adapter, own_attention=True
        ).as_filed()
    except ModelError:
        raise reason from None
    return replace(captured, notes=(*captured.notes, f"No cache can serve it: {reason.message}"))


def serving_architecture(source: ModelSource) -> Architecture:
    """Return the head to serve `source` with. A model without a head is a causal language model if transformers has one
    of its kind, unless it attends both ways or comes with the modules of sentence-transformers. Raises `ModelError`."""
    if isinstance(source, CodeSource | FactorySource | GgufSource):
        return "causal_lm"
    found = resolve(source).config
    named = str((found.architectures or [""])[0])
    if named.endswith("ForSequenceClassification"):
        return "classification"
    if named.endswith("EncoderModel"):
        return "text_encoder"
    if found.is_encoder_decoder and not named.endswith("ForCausalLM"):
        return "seq2seq_lm"
    if named.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "causal_lm"
    directory = source.path if isinstance(source, DirectorySource) else None
    return "plain" if _attends_both_ways(found) or _for_sentences(directory) else "causal_lm"


def _attends_both_ways(config: Any) -> bool:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    if getattr(config, "is_decoder", False):
        return False
    kind = type(config)
    return (
        kind in AutoModelForMaskedLM._model_mapping
        or kind not in AutoModelForCausalLM._model_mapping
        or bool(getattr(config, "use_bidirectional_attention", False))
    )


def _for_sentences(directory: Path | None) -> bool:
    return directory is not None and (directory / SENTENCE_MODULES).is_file()


def _pair_inputs(source: ModelSource) -> Mapping[str, ExampleInput] | None:
    """Return inputs with the types of tokens, if the model tells two texts apart by them and its tokenizer gives them;
    None if it takes tokens alone."""
    assert isinstance(source, ConfigSource | DirectorySource | HubSource)
    model = resolve(source)
    types = getattr(model.config, "type_vocab_size", None) or 0
    if types < 2 or TOKEN_TYPES not in inspect.signature(model.model_class.forward).parameters:
        return None
    if isinstance(source, DirectorySource) and not _tokenizer_gives_types(source.path):
        return None
    tokens = torch.randint(0, int(model.config.vocab_size), (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    kinds = (torch.arange(TOKENS) >= TOKENS // 2).long().expand(ROWS, TOKENS).contiguous()
    return {
        name: ExampleInput(tensor, (BATCH, SEQUENCE)) for name, tensor in (("input_ids", tokens), (TOKEN_TYPES, kinds))
    }


def _tokenizer_gives_types(directory: Path) -> bool:
    """Return whether transformers' tokenizer of the model tells the types of tokens, which its class decides."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"transformers can't read the tokenizer in {directory}: {error}") from error
    return TOKEN_TYPES in tokenizer.model_input_names
