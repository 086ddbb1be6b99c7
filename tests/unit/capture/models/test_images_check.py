"""What a model's own forward hands to its layers is compared with what the served graph will be handed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fusionai.capture.capture import capture
from fusionai.capture.models import images
from fusionai.capture.models.image_processor import NoImages, sample
from fusionai.capture.models.images import EncodedImage, ImageEncoder, axis_positions, compared
from fusionai.capture.models.source import DirectorySource
from harness.image_models import write_image_model

pytestmark = pytest.mark.slow


def encoder(directory: Path) -> ImageEncoder:
    captured = capture(
        DirectorySource(directory, "image_text"), batch=(1, 2), sequence=(1, 256), train=False, images=True
    )
    return ImageEncoder(captured, directory)


def test_every_kind_of_difference_has_its_words(tmp_path: Path):
    made = encoder(write_image_model("qwen3_vl", tmp_path))
    prepared = made.processor.prepare(sample(), "one ", " two")
    image = made._encoded(prepared)
    is_row = prepared.pixels["input_ids"][0] == made.token
    axes, _ = axis_positions(_tokens(image, is_row))
    assert image.layer_rows is not None

    def found(image: EncodedImage, axes: np.ndarray) -> str | None:
        return compared(made._model, prepared.pixels, image, is_row, axes).difference

    assert found(image, axes) is None
    assert "other features" in str(found(replace(image, rows=image.rows * 1.01), axes))
    assert "counts the positions" in str(found(image, axes + (np.arange(len(axes)) > 3)[:, None]))
    assert "add features" in str(found(replace(image, layer_rows=image.layer_rows + 0.1), axes))
    assert "add features" in str(found(replace(image, layer_rows=None), axes))
    decoder: Any = made._model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda _module, args, given: (args, {**given, "picture_sizes": torch.ones(1)}), with_kwargs=True
    )
    assert "also get picture_sizes" in str(found(image, axes))


def test_a_model_in_which_rows_are_not_all_is_refused_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model whose forward changes the features once more, as no list of names would show."""
    directory = write_image_model("llava", tmp_path)
    inner = transformers.LlavaModel
    own = inner.forward

    def forward(self: Any, *args: Any, **given: Any) -> Any:
        features = self.get_image_features
        self.get_image_features = lambda *some, **more: _halved(features(*some, **more))
        try:
            return own(self, *args, **given)
        finally:
            del self.get_image_features

    encoder(directory)
    monkeypatch.setattr(inner, "forward", forward)
    with pytest.raises(NoImages, match="its layers get other features than those of its encoder"):
        encoder(directory)


def test_which_positions_see_each_other_is_read_from_the_masks():
    """Two runs of rows among six tokens, in attention to all and with a window of 2."""
    is_row = torch.tensor([False, True, True, False, True, True])
    back = torch.arange(6)[:, None] - torch.arange(6)
    mutual = torch.zeros(6, 6, dtype=torch.bool)
    mutual[1:3, 1:3] = mutual[4:, 4:] = True
    plain, mixed = back >= 0, (back >= 0) | mutual

    def seen(*masks: torch.Tensor | None, window: int | None = 2) -> bool | None:
        kinds = ("full_attention", "sliding_attention")
        given = {kind: mask if mask is None else mask[None, None] for kind, mask in zip(kinds, masks, strict=False)}
        return images._sees_together(given, is_row, window)

    assert seen(plain, plain & (back < 2)) is False
    assert seen(mixed, mixed & (back < 2)) is True
    assert seen(torch.where(mixed, 0.0, torch.finfo(torch.float32).min)) is True
    assert seen(None, mixed & (back < 2)) is None, "images are another thing to some layers"
    assert seen(mixed, mixed) is None, "the window is not that of the model"
    assert seen(mixed | mixed.T) is None
    everything = torch.ones_like(plain)
    assert images._sees_together(everything, is_row, None) is False, "a mask of padding alone"
    assert images._sees_together(everything[None, None], is_row, None) is None


@pytest.mark.parametrize(("family", "together"), [("gemma3", True), ("llava", False)])
def test_an_encoder_says_whether_rows_see_each_other(family: str, together: bool, tmp_path: Path):
    assert encoder(write_image_model(family, tmp_path)).together is together


def _halved(made: Any) -> Any:
    made.pooler_output = [part / 2 for part in made.pooler_output]
    return made


def _tokens(image: EncodedImage, is_row: torch.Tensor) -> list[tuple[EncodedImage, int] | None]:
    rows = iter(range(len(image.rows)))
    return [(image, next(rows)) if taken else None for taken in is_row.tolist()]
