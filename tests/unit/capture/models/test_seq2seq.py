"""Which encoder-decoder models are served, and why others are not."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from fusionai.capture.models.huggingface import HuggingFaceModel
from fusionai.capture.models.seq2seq import NoDecoder, require_equal

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        "BartConfig",
        "M2M100Config",
        "BlenderbotConfig",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("MarianConfig", "PLBartConfig", "BlenderbotSmallConfig")
        ),
    ],
)
def test_decoders_that_read_rows_by_attention_alone(kind: str) -> None:
    require_equal(HuggingFaceModel(getattr(transformers, kind)(**FIELDS), "seq2seq_lm"), kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("LEDConfig", "embedding of positions"),
        ("FSMTConfig", "embedding of positions"),
        ("MvpConfig", "in another way than attention"),
        ("PegasusXConfig", "a small copy of it fails"),
    ],
)
def test_other_decoders_are_refused_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(NoDecoder, match=reason):
        require_equal(HuggingFaceModel(getattr(transformers, kind)(**FIELDS), "seq2seq_lm"), kind)
