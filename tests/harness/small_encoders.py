"""Small random encoders and cross-encoders in Hugging Face layout, and what transformers makes of a text with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

from fusionai.serving.interface import TextPair

LONGEST = 48
"""Positions that each model has."""
SENTENCE = "a pool of peers serves one model to all who ask for vectors and scores in the evening or by night"
WORDS = tuple(SENTENCE.split())
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = len(SPECIAL) + len(WORDS)
_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
_BEHIND_PADDING = {"max_position_embeddings": LONGEST + 1, "type_vocab_size": 1}
"""The table of such a model has a row for padding, behind which positions begin."""
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _SIZES,
    "roberta": _SIZES | _BEHIND_PADDING,
    "xlm-roberta": _SIZES | _BEHIND_PADDING,
    "mpnet": _SIZES | {"max_position_embeddings": LONGEST + 2, "pad_token_id": 1},
    "distilbert": {
        "dim": 16,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 24,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.5,
    },
    "modernbert": _SIZES
    | {"global_attn_every_n_layers": 3, "local_attention": 8}
    | {f"{name}_token_id": number for name, number in (("bos", 2), ("cls", 2), ("eos", 3), ("sep", 3))},
    "nomic_bert": _SIZES,
    "gte": _SIZES,
    "albert": _SIZES | {"embedding_size": 8},
    "electra": _SIZES | {"embedding_size": 16},
    "deberta-v2": _SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "t5": {
        "d_model": 16,
        "d_ff": 24,
        "d_kv": 4,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": VOCABULARY,
        "initializer_factor": 1.0,
    },
}


def saved_encoder(directory: Path, kind: str, *, scores: bool = False) -> Path:
    """A model of this kind with a tokenizer; with `scores` as a cross-encoder with one label."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **ENCODERS[kind], **({"num_labels": 1} if scores else {}))
    if scores:
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    elif kind == "t5":
        model = transformers.T5EncoderModel(config)
    else:
        model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))  # biases and norms begin as constants
    model.save_pretrained(directory)
    write_tokenizer(directory, types=kind == "bert")
    return directory


def write_tokenizer(directory: Path, *, types: bool) -> None:
    """A tokenizer of whole words with BERT's tokens around one or two texts. `types`: it tells them apart."""
    ids = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
    engine = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    engine.normalizer = normalizers.Lowercase()
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    engine.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=engine,
        **({"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if types else {}),
        model_max_length=LONGEST,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
    )
    tokenizer.save_pretrained(directory)


def write_modules(directory: Path, modes: dict[str, bool], *, normalise: bool = False, longest: int = LONGEST) -> None:
    """The files of sentence-transformers for this pooling."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for path in paths[1 : len(kinds)]:
        (directory / path).mkdir(exist_ok=True)
    width = 16
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **modes}))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))


def own_encoder(directory: Path) -> nn.Module:
    """transformers' own."""
    kind = transformers.AutoConfig.from_pretrained(directory)
    classes = {"T5EncoderModel": transformers.T5EncoderModel}
    auto = transformers.AutoModel
    if (kind.architectures or [""])[0].endswith("ForSequenceClassification"):
        auto = transformers.AutoModelForSequenceClassification
    found = classes.get((kind.architectures or [""])[0], auto)
    return found.from_pretrained(directory, dtype=torch.float32).eval()


def states(model: nn.Module, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Last hidden states [positions, width] of one text."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)])).last_hidden_state[0].numpy()


def own_score(model: nn.Module, pair: TextPair, *, types: bool) -> list[float]:
    """The logits of two texts. `types`: the model is told which tokens are of the second one."""
    told = {}
    if types:
        told["token_type_ids"] = torch.tensor(
            [[int(0 < pair.second_from <= place) for place in range(len(pair.tokens))]]
        )
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(pair.tokens)]), **told).logits[0].tolist()


def texts(count: int, longest: int = LONGEST) -> list[tuple[int, ...]]:
    """Tokens of texts of unequal length, the last one as long as a text may be."""
    lengths = [1 + (5 * number) % (longest - 1) for number in range(count - 1)] + [longest]
    return [
        tuple(len(SPECIAL) + (7 * place + 3 * number) % len(WORDS) for place in range(length))
        for number, length in enumerate(lengths)
    ]
