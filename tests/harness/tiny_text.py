"""A byte-level tokenizer of a few hundred tokens and a chat template with tools, written where a model would lie.

Neighbours: `scripted_engine` and everything that needs texts without a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fusionai.serving.model_text import ModelText

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call: {{ tools | tojson }}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TEXTS = ["You said: the weather in Paris is fine, the pool answers from many machines.", '{"name": "weather"}'] * 4


MARKS = ("<tool_call>", "</tool_call>")


def write_tiny_text(directory: Path, template: str = TEMPLATE, marks: Sequence[str] = MARKS) -> ModelText:
    """Trains it, writes its files to `directory`, loads them as a model's would be. `marks`: further tokens, special
    ones if they are written `<|...|>`."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(_TEXTS, trainer)
    engine.add_tokens([AddedToken(mark, special=mark.startswith("<|")) for mark in marks])
    engine.save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "config.json").write_text("{}", encoding="utf-8")
    return ModelText.load(directory)
