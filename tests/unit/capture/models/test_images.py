"""Which models are served with images, and which pictures are read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from fusionai.capture.capture import capture
from fusionai.capture.models import image_processor
from fusionai.capture.models.huggingface import has_image_input
from fusionai.capture.models.image_processor import ImageProcessor, NoImages, picture_of
from fusionai.capture.models.images import ImageEncoder, obstacle
from fusionai.capture.models.source import DirectorySource
from fusionai.ir.serving import AXIS_POSITIONS, IMAGE_ROWS, LAYER_ROWS, serving_graph
from fusionai.primitives.errors import ModelError, UsageError
from harness.image_models import EYES, TEXT, picture, write_image_model


def written(image: Image.Image, form: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def test_a_picture_is_read_upright_and_in_rgb():
    grey = Image.new("LA", (6, 4))
    assert picture_of(written(grey, "PNG")).mode == "RGB"
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held sideways
    assert picture_of(written(Image.new("RGB", (6, 4)), "JPEG", exif=turned)).size == (4, 6)
    moving = written(Image.new("P", (6, 4)), "GIF", save_all=True, append_images=[Image.new("P", (6, 4), 1)])
    assert picture_of(moving).size == (6, 4)


def test_what_is_no_picture_or_too_large_a_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    for data in (b"", b"\x89PNG\r\n\x1a\n", b"not a picture", written(Image.new("RGB", (4, 4)), "TIFF")):
        with pytest.raises(UsageError):
            picture_of(data)
    with pytest.raises(UsageError, match="can't be read"):
        picture_of(picture(40, 40, 0)[:-100])
    monkeypatch.setattr(image_processor, "MOST_PIXELS", 99)
    with pytest.raises(UsageError, match="10 x 10 pixels; at most 99"):
        picture_of(picture(10, 10, 0))


def test_models_in_which_an_image_is_more_than_rows_say_why():
    texts = transformers.MllamaTextConfig(
        **TEXT, cross_attention_layers=[1], bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    mllama = transformers.MllamaConfig(vision_config=transformers.MllamaVisionConfig(**EYES), text_config=texts)
    with torch.device("meta"):
        assert "attention of their own" in str(obstacle(transformers.MllamaForConditionalGeneration(mllama)))
        assert obstacle(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))) is not None


@pytest.mark.slow
def test_a_graph_with_images_has_their_inputs_and_an_encoder_beside_it(tmp_path: Path):
    directory = write_image_model("qwen3_vl", tmp_path)
    assert has_image_input(directory)
    captured = capture(
        DirectorySource(directory, "image_text"), batch=(1, 2), sequence=(1, 256), train=False, images=True
    )
    graph = serving_graph(captured.graph)
    assert set(graph.inputs) == {"input_ids", IMAGE_ROWS, LAYER_ROWS, AXIS_POSITIONS}
    encoder = ImageEncoder(captured, directory)
    made = encoder.encode(picture(56, 40, 0))
    assert made.axes is not None
    assert made.layer_rows is not None
    assert made.rows.shape == (made.text.count("<|image_pad|>"), TEXT["hidden_size"])
    assert made.layer_rows.shape == (len(made.rows), 2 * TEXT["hidden_size"])
    assert made.axes.shape == (len(made.rows), 3)
    module: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    prepared = encoder.processor.prepare(picture(56, 40, 0))
    with torch.no_grad():
        own = module.get_image_features(prepared.pixels["pixel_values"], prepared.pixels["image_grid_thw"])
    assert torch.equal(torch.from_numpy(made.rows), torch.cat(list(own.pooler_output)))


def test_a_picture_that_the_processor_can_not_take_is_refused_with_its_size(tmp_path: Path):
    """Qwen's processor refuses sides of which one is 200 times as long as the other."""
    directory = write_image_model("qwen2_5_vl", tmp_path)
    processor = ImageProcessor.load(directory, transformers.AutoConfig.from_pretrained(directory))
    with pytest.raises(UsageError, match="can't take a picture of 900 x 2 pixels"):
        processor.prepare(picture(900, 2, 0))


@pytest.mark.slow
def test_a_processor_that_does_not_fit_the_weights_is_refused_when_the_model_is_opened(tmp_path: Path):
    """The files say four times as many rows as the encoder makes."""
    directory = write_image_model("idefics3", tmp_path)
    settings = directory / "processor_config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace('"image_seq_len": 4', '"image_seq_len": 16'))
    captured = capture(
        DirectorySource(directory, "image_text"), batch=(1, 2), sequence=(1, 256), train=False, images=True
    )
    with pytest.raises(NoImages, match="rows of an image that takes"):
        ImageEncoder(captured, directory)


def test_a_directory_without_a_processor_is_refused_by_name(tmp_path: Path):
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**EYES), text_config=transformers.LlamaConfig(**TEXT)
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(NoImages, match="the image processor in"):
        ImageProcessor.load(tmp_path, config)
    assert issubclass(NoImages, ModelError)
