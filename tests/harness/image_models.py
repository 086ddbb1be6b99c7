"""Tiny models of images and text, each in a directory as its makers publish it, with processor, tokenizer and template.

Weights are drawn wide, so that answers depend on the images. Processors are written as files, because some classes
can't be made without torchvision.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.25,
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "initializer_range": 0.25,
}  # fmt: skip
_LISTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE\n"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_EITHER = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' or 'image_url' in c %}IMAGE"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GRID = [[32, 32], [32, 64], [64, 32], [64, 64]]
Ids = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Family:
    """`marks`: special tokens of the tokenizer. `config`: makes the configuration from their ids. `image`: what the
    template writes for an image. `named`: marks that the tokenizer knows by a name."""

    config: Callable[[Ids], Any]
    marks: Sequence[str]
    image: str
    processor: str
    settings: Mapping[str, Any]
    pictures: Callable[[], Any]
    lists: bool = False
    named: Mapping[str, str] = field(default_factory=dict[str, str])


def _qwen_pictures() -> Any:
    return transformers.Qwen2VLImageProcessorPil(
        min_pixels=16 * 16, max_pixels=64 * 64, patch_size=8, merge_size=2, temporal_patch_size=2
    )


def _qwen_ids(ids: Ids) -> dict[str, Any]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, (ids[mark] for mark in _QWEN_MARKS), strict=True))


def _qwen_eyes(**more: Any) -> dict[str, Any]:
    return {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.25, **more,
    }  # fmt: skip


def _qwen2_5_vl(ids: Ids) -> Any:
    texts = TEXT | {"rope_parameters": _QWEN_ROPE | {"mrope_section": [1, 1, 2]}}
    eyes = _qwen_eyes(window_size=32, fullatt_block_indexes=[1])
    return transformers.Qwen2_5_VLConfig(vision_config=eyes, text_config=texts, **_qwen_ids(ids))


def _qwen3_vl(ids: Ids) -> Any:
    texts = TEXT | {"rope_parameters": _QWEN_ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    eyes = _qwen_eyes(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
    return transformers.Qwen3VLConfig(vision_config=eyes, text_config=texts, **_qwen_ids(ids))


def _qwen3_5(ids: Ids) -> Any:
    rope = _QWEN_ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    delta = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }  # fmt: skip
    texts = TEXT | delta | {"rope_parameters": rope}
    eyes = _qwen_eyes(num_position_embeddings=64)
    return transformers.Qwen3_5Config(vision_config=eyes, text_config=texts, **_qwen_ids(ids))


def _llava(ids: Ids) -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**EYES, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=ids["<image>"],
    )


def _llava_onevision(ids: Ids) -> Any:
    return transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**EYES),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=_GRID,
    )


def _mistral3(ids: Ids) -> Any:
    eyes = EYES | {"image_size": 48, "head_dim": 16}
    return transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**eyes),
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
    )


def _idefics3(ids: Ids) -> Any:
    return transformers.Idefics3Config(
        vision_config=EYES,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=0,
    )


def _internvl(ids: Ids) -> Any:
    return transformers.InternVLConfig(
        vision_config=EYES | {"image_size": [32, 32], "patch_size": [8, 8]},
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
    )


def _gemma3(ids: Ids) -> Any:
    """Its layers have windows, all but one, and a picture has more rows than a window."""
    texts = TEXT | {
        "sliding_window": 12, "query_pre_attn_scalar": 8, "pad_token_id": ids["<image_soft>"] - 1,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    return transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**EYES | {"image_size": 64}),
        text_config=transformers.Gemma3TextConfig(**texts),
        mm_tokens_per_image=16,
        image_token_index=ids["<image_soft>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
    )


_IDEFICS_MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
FAMILIES: dict[str, Family] = {
    "llava": Family(
        _llava, ("<image>",), "<image>", "LlavaProcessor",
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        lambda: transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        lists=True,
    ),
    "llava_onevision": Family(
        _llava_onevision, ("<image>", "<video>"), "<image>", "LlavaOnevisionProcessor",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        lambda: transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 32, "width": 32}, image_grid_pinpoints=_GRID
        ),
        lists=True,
    ),
    "mistral3": Family(
        _mistral3, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]", "PixtralProcessor",
        {"patch_size": 8, "spatial_merge_size": 2},
        lambda: transformers.PixtralImageProcessorPil(
            size={"longest_edge": 48}, patch_size={"height": 8, "width": 8}
        ),
    ),
    "qwen2_5_vl": Family(
        _qwen2_5_vl, _QWEN_MARKS, "<|vision_start|><|image_pad|><|vision_end|>", "Qwen2_5_VLProcessor", {},
        _qwen_pictures,
    ),
    "qwen3_vl": Family(
        _qwen3_vl, _QWEN_MARKS, "<|vision_start|><|image_pad|><|vision_end|>", "Qwen3VLProcessor", {}, _qwen_pictures
    ),
    "qwen3_5": Family(
        _qwen3_5, _QWEN_MARKS, "<|vision_start|><|image_pad|><|vision_end|>", "Qwen3VLProcessor", {}, _qwen_pictures
    ),
    "idefics3": Family(
        _idefics3,
        (*_IDEFICS_MARKS, *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))),
        "<image>", "Idefics3Processor", {"image_seq_len": 4},
        lambda: transformers.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
    ),
    "gemma3": Family(
        _gemma3, ("<image_soft>", "<start_of_image>", "<end_of_image>"), "<start_of_image>", "Gemma3Processor",
        {"image_seq_length": 16},
        lambda: transformers.Gemma3ImageProcessorPil(size={"height": 64, "width": 64}),
        lists=True,
        named={"image_token": "<image_soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "internvl": Family(
        _internvl, ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"), "<IMG_CONTEXT>", "InternVLProcessor",
        {"image_seq_length": 4},
        lambda: transformers.GotOcr2ImageProcessorPil(
            size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        named={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
}  # fmt: skip


def write_image_model(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a model of the family with new weights and return its directory."""
    made = FAMILIES[family]
    tokenizer = _tokenizer(made)
    ids = {mark: int(tokenizer.convert_tokens_to_ids(mark)) for mark in made.marks}
    config = made.config(ids)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    made.pictures().save_pretrained(directory)
    settings = {"processor_class": made.processor, **made.settings}
    (directory / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    template = (_LISTS if made.lists else _EITHER).replace("IMAGE", made.image)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def _tokenizer(family: Family) -> Any:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<eos>", "<pad>", *family.marks])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>", extra_special_tokens=dict(family.named)
    )


def picture(width: int, height: int, seed: int) -> bytes:
    """A picture of random pixels, as PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")
