"""The rules of a decoder hold token by token, as those of transformers; and what of them its files say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as transformers_rules

from fusionai.primitives.errors import ModelError
from fusionai.serving.sources import DecoderRules, OneOf, RuledConstraint

VOCABULARY = 40
END = 2


def allowed(constraint: RuledConstraint | OneOf) -> set[int]:
    bits = np.unpackbits(np.frombuffer(constraint.allowed(), np.uint8), count=VOCABULARY, bitorder="little")
    return {int(token) for token in np.flatnonzero(bits)}


def test_rules_are_those_of_transformers() -> None:
    begun = (2, 7)
    rules = DecoderRules(
        start=begun, suppressed=frozenset({3}), first_suppressed=frozenset({4, END}), least_tokens=5, ngram=2
    )
    constraint = RuledConstraint(rules, begun=begun, vocabulary=VOCABULARY, stop_tokens=frozenset({END}))
    processors = [
        transformers_rules.SuppressTokensLogitsProcessor([3]),
        transformers_rules.SuppressTokensAtBeginLogitsProcessor([4, END], len(begun)),
        transformers_rules.MinNewTokensLengthLogitsProcessor(len(begun), 5, END),
        transformers_rules.NoRepeatNGramLogitsProcessor(2),
    ]
    tokens = list(begun)
    for following in (5, 7, 5, 9, 7, 8, 5, 5, 9):
        scores = torch.zeros(1, VOCABULARY)
        for processor in processors:
            scores = processor(torch.tensor([tokens]), scores)
        assert allowed(constraint) == {int(token) for token in torch.isfinite(scores[0]).nonzero()}
        constraint.accept(following)
        tokens.append(following)


def test_rules_hold_together_with_another_constraint() -> None:
    rules = DecoderRules(start=(1,), suppressed=frozenset({3}))
    inner = OneOf((3, 5), VOCABULARY)
    both = RuledConstraint(rules, begun=(1,), vocabulary=VOCABULARY, stop_tokens=frozenset(), inner=inner)
    assert allowed(both) == {5}


def test_what_the_files_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "decoder_start_token_id": 2}))
    said = {
        "forced_bos_token_id": 0,
        "min_length": 6,
        "max_length": 20,
        "num_beams": 4,
        "encoder_no_repeat_ngram_size": 3,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    rules = DecoderRules.load(tmp_path)
    assert (rules.start, rules.positions, rules.least_tokens, rules.longest) == ((2, 0), 64, 4, 20)
    beams, others = rules.words
    assert "4 beams" in beams
    assert "encoder_no_repeat_ngram_size" in others
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="decoder_start_token_id"):
        DecoderRules.load(tmp_path)
