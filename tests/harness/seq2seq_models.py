"""Tiny encoder-decoder models, each in a directory as its makers publish it, and what transformers answers with them.

Weights are drawn wide, so that answers depend on what the encoder reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<s>", "<pad>", "</s>")
LANGUAGES = ("en", "de", "fr")
_SPEECH = (
    "<|startoftranscript|>", *(f"<|{one}|>" for one in LANGUAGES), "<|translate|>", "<|transcribe|>",
    "<|startofprev|>", "<|notimestamps|>",
)  # fmt: skip
RATE_HZ = 16_000
WINDOW_S = 2
_COMMON: dict[str, Any] = {
    "vocab_size": 272, "d_model": 32, "encoder_layers": 2, "decoder_layers": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.25,
    "bos_token_id": 256, "pad_token_id": 257, "eos_token_id": 258, "dropout": 0.0,
}  # fmt: skip
_TEXT = _COMMON | {"max_position_embeddings": 64, "decoder_start_token_id": 258, "forced_eos_token_id": None}
_T5: dict[str, Any] = {
    "vocab_size": 272, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4,
    "pad_token_id": 257, "eos_token_id": 258, "decoder_start_token_id": 257, "initializer_factor": 2.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """`rules`: of its generation_config.json."""

    config: type[Any]
    fields: dict[str, Any]
    rules: dict[str, Any] = field(default_factory=dict[str, Any])


FAMILIES: dict[str, Family] = {
    "whisper": Family(
        transformers.WhisperConfig,
        _COMMON | {
            "max_source_positions": 100, "max_target_positions": 64, "num_mel_bins": 16, "decoder_start_token_id": 259,
        },
        {"suppress_tokens": [3, 5, 100], "begin_suppress_tokens": [32, 258]},
    ),
    "bart": Family(
        transformers.BartConfig, _TEXT,
        {"forced_bos_token_id": 256, "no_repeat_ngram_size": 3, "min_length": 9, "num_beams": 4},
    ),
    "marian": Family(transformers.MarianConfig, _TEXT | {"decoder_start_token_id": 257, "scale_embedding": True}),
    "mbart": Family(transformers.MBartConfig, _TEXT, {"forced_bos_token_id": 260}),
    "m2m100": Family(
        transformers.M2M100Config, _TEXT | {"scale_embedding": True, "pad_token_id": 1}, {"forced_bos_token_id": 261}
    ),
    "pegasus": Family(transformers.PegasusConfig, _TEXT | {"decoder_start_token_id": 257}),
    "t5": Family(transformers.T5Config, _T5),
    "mt5": Family(transformers.MT5Config, _T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
}  # fmt: skip


def write_seq2seq_model(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a model of the family with new weights and return its directory."""
    made = FAMILIES[family]
    config = made.config(**made.fields)
    hears = family == "whisper"
    kind = transformers.AutoModelForSpeechSeq2Seq if hears else transformers.AutoModelForSeq2SeqLM
    torch.manual_seed(seed)
    model = kind.from_config(config).eval()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(0, 0.3)
    tokenizer = _tokenizer(hears=hears)
    # Tiny models repeat themselves without end otherwise.
    rules: dict[str, Any] = {"max_length": 40, "no_repeat_ngram_size": 2} | made.rules
    if hears:
        ids = {mark: int(tokenizer.convert_tokens_to_ids(mark)) for mark in _SPEECH}
        rules |= {
            "lang_to_id": {f"<|{one}|>": ids[f"<|{one}|>"] for one in LANGUAGES},
            "task_to_id": {"translate": ids["<|translate|>"], "transcribe": ids["<|transcribe|>"]},
            "no_timestamps_token_id": ids["<|notimestamps|>"], "is_multilingual": True, "prev_sot_token_id": None,
        }  # fmt: skip
        transformers.WhisperFeatureExtractor(
            feature_size=16, sampling_rate=RATE_HZ, hop_length=160, chunk_length=WINDOW_S, n_fft=400
        ).save_pretrained(directory)
    model.save_pretrained(directory)
    file = directory / "generation_config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved.pop("_from_model_config", None)
    file.write_text(json.dumps(saved | rules), encoding="utf-8")
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer(*, hears: bool) -> Any:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([*SPECIAL, *(_SPEECH if hears else ())])
    plain.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 258)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def sound(seconds: float, seed: int) -> NDArray[np.float32]:
    """Some tones in noise, at `RATE_HZ`."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    tones = sum(np.sin(2 * np.pi * pitch * times) for pitch in random.integers(150, 3000, 4))
    return (0.2 * tones + random.normal(0, 0.05, times.shape)).astype(np.float32)


def generated(
    directory: Path, inputs: dict[str, torch.Tensor], tokens: int | None, **more: Any
) -> tuple[list[int], list[float]]:
    """Return the tokens behind the decoder's start and their log-probabilities, by transformers."""
    hears = "input_features" in inputs
    kind = transformers.AutoModelForSpeechSeq2Seq if hears else transformers.AutoModelForSeq2SeqLM
    module = kind.from_pretrained(directory).eval()
    with torch.no_grad():
        made = module.generate(
            **inputs, max_new_tokens=tokens, num_beams=1, do_sample=False, return_dict_in_generate=True,
            output_logits=True, **more,
        )  # fmt: skip
    rows = [torch.log_softmax(row[0].float(), -1) for row in made.logits]
    answer = made.sequences[0, -len(rows) :].tolist()
    return answer, [float(row[token]) for row, token in zip(rows, answer, strict=True)]
