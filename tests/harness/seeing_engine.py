"""A scripted engine whose model reads pictures: each one becomes three rows of zeros."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from fusionai.capture.models.image_processor import picture_of
from fusionai.capture.models.images import EncodedImage
from fusionai.serving.images import ImageMarks, ImageReader
from harness.scripted_engine import ScriptedEngine
from harness.tiny_text import write_tiny_text

TEMPLATE: Final = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARK: Final = "<|image|>"
ROWS: Final = 3


def encode(data: bytes) -> EncodedImage:
    assert picture_of(data).mode == "RGB"
    return EncodedImage(MARK * ROWS, np.zeros((ROWS, 4), np.float32), None, ROWS)


def seeing_engine(directory: Path) -> ScriptedEngine:
    text = write_tiny_text(directory, TEMPLATE, [MARK])
    marks = ImageMarks(MARK, text.tokenizer.added[MARK])
    return ScriptedEngine(replace(text, images=ImageReader(encode, marks)))
