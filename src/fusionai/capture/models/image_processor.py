"""Prepares pictures for a model as its own processor does: pixels for the encoder, and the text that stands for them.

Reads a picture's bytes within limits and runs transformers' processor of the model, whose form with Pillow is always
taken, so that one picture gives the same pixels whether or not torchvision is installed. Never loads remote code.

Neighbours: `capture.models.images` encodes the pixels, `serving.images` asks for both."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from PIL import Image, ImageOps, UnidentifiedImageError

from fusionai.capture.models.huggingface import last_line
from fusionai.primitives.errors import ModelError, UsageError

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
MOST_PIXELS: Final = 2**26
"""Most pixels of a picture (chosen): 8,192 x 8,192."""
_SAMPLE: Final = (64, 48)
_MODELS: Final = "transformers.models"


class NoImages(ModelError):
    """A model that can't be served with images, and may be served without."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """`pixels`: arguments of the model's forward, pixels and tokens of the text around the picture. `text`: what stands
    for the picture in a prompt."""

    pixels: Mapping[str, Any]
    text: str


class ImageProcessor:
    """`placeholder`: what a chat template writes where a picture belongs."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.placeholder: str = processor.image_token

    @classmethod
    def load(cls, directory: Path, config: Any) -> ImageProcessor:
        """Load the processor of a model with the configuration `config`. Raises `NoImages`."""
        from transformers import AutoImageProcessor, AutoTokenizer

        kind = _processor_class(directory, config)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = {
                    "image_processor": AutoImageProcessor.from_pretrained(
                        directory, backend="pil", local_files_only=True, trust_remote_code=False
                    ),
                    "tokenizer": AutoTokenizer.from_pretrained(
                        directory, local_files_only=True, trust_remote_code=False
                    ),
                }
                settings, _ = kind.get_processor_dict(directory, local_files_only=True)
                parts = [made.get(name) for name in kind.get_attributes()]
                processor = _only_images(kind).from_args_and_dict(parts, settings)
        except Exception as error:  # the files may hold anything
            raise NoImages(
                f"the image processor in {directory} can't be used: {last_line(error)}.",
                hint="Fetch or save the model again, with its processor.",
            ) from error
        if not isinstance(getattr(processor, "image_token", None), str):
            raise NoImages(f"the image processor in {directory} has no token that stands for a picture.")
        return cls(processor)

    def word(self, token: int) -> str:
        """Return the text of a token of the model's vocabulary."""
        return str(self._processor.tokenizer.convert_ids_to_tokens(token))

    def prepare(self, data: bytes, before: str = "", after: str = "") -> PreparedImage:
        """Prepare one picture, between two texts. Raises `UsageError` for bytes that are no picture, or one that
        is too large, or that the model's processor can't take."""
        text = f"{before}{self.placeholder}{after}"
        picture = picture_of(data)
        try:
            made = self._processor(images=[picture], text=[text], return_tensors="pt")
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            raise UsageError(
                f"the model's processor can't take a picture of {picture.width} x {picture.height} pixels: "
                f"{last_line(error)}.",
                hint="Send it in another size or shape.",
            ) from error
        return PreparedImage(dict(made), self._processor.written[0])


def picture_of(data: bytes) -> Image.Image:
    """Return the picture, upright and in RGB. Raises `UsageError`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise UsageError(
                    f"the picture has {width} x {height} pixels; at most {MOST_PIXELS:,} are accepted.",
                    hint="Send it in a smaller size.",
                )
            return ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError:
        raise UsageError(
            "these bytes are no picture in a known format.", hint=f"Send one of {', '.join(FORMATS)}."
        ) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"the picture can't be read: {last_line(error)}.", hint="Save it again.") from error


def sample() -> bytes:
    """Return a small picture, to try a processor and an encoder with."""
    written = io.BytesIO()
    Image.new("RGB", _SAMPLE, "gray").save(written, "PNG")
    return written.getvalue()


def _only_images(kind: type[Any]) -> type[Any]:
    """Return the class without need of a part for videos or sound, which would take torchvision or other packages. It
    keeps the texts that last stood for images, in `written`."""

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    def replace(self: Any, text: list[str], images_replacements: list[str], *others: Any, **more: Any) -> Any:
        self.written = list(images_replacements)
        return kind.get_text_with_replacements(self, text, images_replacements, *others, **more)

    own = {"check_argument_for_proper_class": check, "get_text_with_replacements": replace, "written": []}
    return type(kind.__name__, (kind,), own)


def _processor_class(directory: Path, config: Any) -> type[Any]:
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    )

    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise NoImages(f"transformers has no processor for pictures of {config.model_type!r}.")
    own = model_type_to_module_name(config.model_type)
    others = [model_type_to_module_name(one) for one, other in PROCESSOR_MAPPING_NAMES.items() if other == name]
    plain = name.removesuffix("Processor").lower()
    for module in dict.fromkeys((own, *others, plain)):
        found = getattr(_processing_module(module), name, None)
        if found is not None:
            return found
    raise NoImages(f"{directory}: transformers' {name} can't be used here.", hint="Install torchvision.")


def _processing_module(model: str) -> ModuleType | None:
    """Import a model's module of processors. Some take a function from the form of the image processor that needs
    torchvision; the form with Pillow has the same function."""
    try:
        with _pillow_in_place(model):
            return importlib.import_module(f"{_MODELS}.{model}.processing_{model}")
    except ImportError:
        return None


@contextmanager
def _pillow_in_place(model: str) -> Iterator[None]:
    name = f"{_MODELS}.{model}.image_processing_{model}"
    if name in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    try:
        sys.modules[name] = importlib.import_module(f"{_MODELS}.{model}.image_processing_pil_{model}")
    except ImportError:
        yield
        return
    try:
        yield
    finally:
        del sys.modules[name]
