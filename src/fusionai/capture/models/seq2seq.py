"""Encoder-decoder models as causal ones: the decoder reads the encoder's rows at the beginning of its own sequence.

In the graph, a position below 0 in `input_ids` is a row of the encoder, which comes as `image_rows`, as rows of images
do (`capture.models.images`). Such a row keeps its value through all layers. A position of text attends twice in each
layer: to the text before it, and to the encoder's rows. Both are causal attention over the whole sequence, in which a
further column of the keys hides the positions of the other kind. So caches, pieces of prompts, cuts, takeovers and
every backend handle such a model as any causal one.

Which modules of transformers have this form is found by the names that its decoders share, and tried on a small copy
against transformers' own forward (`require_equal`). Everything else is refused with the reason.

Neighbours: `capture.capture` calls `take_source`, `capture.tasks` fills the holder, `capture.models.sources` runs the
encoder, `capture.tracing.attention` hides keys."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from fusionai.capture.models.huggingface import HuggingFaceModel
from fusionai.capture.models.images import Holder
from fusionai.capture.tracing import code_lines
from fusionai.capture.tracing.attention import Hiding
from fusionai.primitives.errors import ModelError

_ATTENTIONS: Final = (
    (("self_attn",), ("encoder_attn",)),
    (("layer", "0", "SelfAttention"), ("layer", "1", "EncDecAttention")),
)
"""Paths of a layer's attention to the text and to the encoder's rows: those of BART's kin and of T5's."""
_ROWS: Final = "encoder_hidden_states"
"""Argument of a layer with the encoder's rows."""
_SAMPLE: Final = (5, 6)
"""Rows and tokens of the sample on which a model is tried (chosen)."""
_TOLERANCE: Final = 1e-4
"""Largest difference of logits, relative to the largest: sums come in another order."""


class NoDecoder(ModelError):
    """An encoder-decoder model whose decoder can't be served."""


class DecoderHolder(Holder):
    """Also holds which positions are the encoder's rows, [b, s, 1], and the places of those of text, [b, s]."""

    def __init__(self) -> None:
        super().__init__()
        self.is_row: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None


class _Decoding(nn.Module):
    """Base class put before a model's own class: its forward runs the decoder alone."""

    holder: DecoderHolder

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, use_cache: bool = False
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        holder = self.holder
        holder.positions = None if position_ids is None else position_ids[0]
        assert holder.rows is not None
        # It also depends on the rows, which are numbers: what follows from tokens alone is computed by every stage, and
        # tokens would leave the first one. Layers get it as an argument, by which repeated layers can be copied.
        are_numbers = holder.rows[..., :1] == holder.rows[..., :1]
        is_row: Any = BaseModelOutput(last_hidden_state=(input_ids < 0).unsqueeze(-1) & are_numbers)
        result = super().forward(decoder_input_ids=input_ids.clamp(min=0), encoder_outputs=is_row, use_cache=use_cache)
        holder.is_row = holder.positions = None
        return result


class _Keeping(nn.Module):
    """Base class put before a layer's own class: the encoder's rows stay as they are, and are attended to."""

    holder: DecoderHolder

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = super().forward
        given = inspect.signature(own).bind(hidden_states, *args, **kwargs)
        is_row = self.holder.is_row = given.arguments[_ROWS]
        hidden_states = self._begun(hidden_states)
        given.arguments |= {next(iter(given.arguments)): hidden_states, _ROWS: hidden_states}
        result = own(*given.args, **given.kwargs)
        made = result[0] if isinstance(result, tuple) else result
        kept = torch.where(is_row, hidden_states, made)
        return (kept, *result[1:]) if isinstance(result, tuple) else kept

    def _begun(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class _KeepingFirst(_Keeping):
    """For the first layer, which also puts the encoder's rows in place of embeddings."""

    def _begun(self, hidden_states: torch.Tensor) -> torch.Tensor:
        holder = self.holder
        assert holder.rows is not None
        assert holder.is_row is not None
        return torch.where(holder.is_row, holder.rows, hidden_states)


class _Placing(nn.Module):
    """Base class put before the own class of an embedding of positions that takes their numbers."""

    holder: DecoderHolder

    def forward(self, given: Any, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        positions = self.holder.positions
        assert positions is not None
        found = super().forward(given, position_ids=positions)
        return found.reshape(*positions.shape, found.shape[-1])


class _PlacingBehindPadding(nn.Module):
    """For an embedding of positions that counts from behind the number of the padding token (M2M100)."""

    holder: DecoderHolder

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        positions = self.holder.positions
        assert positions is not None
        table: Any = self
        return table.weights[positions + table.padding_idx + 1]


@cache
def _class_of(base: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{base.__name__.removeprefix('_')}{kind.__name__}", (base, kind), {})


def _put_before(base: type[nn.Module], module: nn.Module, holder: DecoderHolder) -> None:
    module.__class__ = _class_of(base, type(module))
    own: Any = module
    own.holder = holder


def take_source(module: nn.Module) -> int:
    """Make the module decode behind the rows of its encoder. Returns the size of a row. Raises `NoDecoder`."""
    model: Any = module
    if not hasattr(model, "get_decoder") or "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        raise _refusal(module, "it has no decoder with tokens of its own")
    decoder = model.get_decoder()
    layers = _layers(decoder)
    if not layers:
        raise _refusal(module, "its decoder has no list of layers")
    attentions = [_attentions_of(layer) for layer in layers]
    if any(
        found is None or _ROWS not in inspect.signature(layer.forward).parameters
        for layer, found in zip(layers, attentions, strict=True)
    ):
        raise _refusal(module, "its decoder's layers do not have attention to the text and to the encoder's rows")
    holder = DecoderHolder()
    _place(module, getattr(decoder, "embed_positions", None), holder)
    for number, (layer, found) in enumerate(zip(layers, attentions, strict=True)):
        assert found is not None
        for attention, hides_rows in zip(found, (True, False), strict=True):
            attention.hiding = Hiding(holder, hides_rows)
        _put_before(_Keeping if number else _KeepingFirst, layer, holder)
    _put_before(_Decoding, module, holder)
    return int(model.get_decoder().config.hidden_size)


def is_decoding(module: nn.Module) -> bool:
    """Return whether `take_source` has changed the module."""
    return isinstance(module, _Decoding)


def has_places(module: nn.Module) -> bool:
    """Return whether the decoder has an embedding of positions."""
    return any(isinstance(child, _Placing | _PlacingBehindPadding) for child in module.modules())


def attention_layers(module: nn.Module) -> int:
    """Return how many attentions the decoder has."""
    model: Any = module
    return 2 * len(_layers(model.get_decoder()))


def _place(module: nn.Module, table: nn.Module | None, holder: DecoderHolder) -> None:
    """Make the embedding of positions, if there is one, read those of the holder."""
    if table is None:
        return
    if "position_ids" in inspect.signature(table.forward).parameters:
        _put_before(_Placing, table, holder)
    elif hasattr(table, "create_position_ids_from_input_ids") and isinstance(
        getattr(table, "weights", None), torch.Tensor
    ):
        _put_before(_PlacingBehindPadding, table, holder)
    else:
        raise _refusal(module, "its embedding of positions does not take their numbers")


def _layers(decoder: Any) -> list[Any]:
    found = getattr(decoder, "layers", None) or getattr(decoder, "block", None)
    return list(found) if isinstance(found, nn.ModuleList) else []


def _attentions_of(layer: nn.Module) -> tuple[Any, Any] | None:
    for paths in _ATTENTIONS:
        try:
            to_text, to_rows = (layer.get_submodule(".".join(path)) for path in paths)
        except AttributeError:
            continue
        return to_text, to_rows
    return None


def _refusal(module: nn.Module, reason: str) -> NoDecoder:
    return NoDecoder(
        f"{type(module).__name__} can't be served, because {reason}.",
        hint="Encoder-decoder models like BART, Marian, M2M100, T5 and Whisper are served.",
    )


def require_equal(model: HuggingFaceModel, name: str) -> None:
    """Raise `NoDecoder` unless the decoder behind rows computes what transformers' own forward computes. `model`: one
    that is small enough to be built."""
    generator = torch.Generator().manual_seed(0)
    try:
        plain, taken = model.construct_plain().eval(), model.construct().eval()
        _draw(plain, generator)
        taken.load_state_dict(plain.state_dict())
        width = take_source(taken)
        rows = torch.randn((1, _SAMPLE[0], width), generator=generator)
        tokens = torch.randint(3, _vocabulary(plain), (1, _SAMPLE[1]), generator=generator)
        with torch.inference_mode():
            wanted = _own_logits(plain, rows, tokens)
            found = _logits(taken, rows, tokens)
    except NoDecoder:
        raise
    except Exception as error:  # another decoder than this module expects may fail in any way
        raise NoDecoder(
            f"{name} can't be served, because a small copy of it fails: {code_lines.reason(error)}."
        ) from error
    if found.shape != wanted.shape or not torch.allclose(
        found, wanted, rtol=0.0, atol=_TOLERANCE * float(wanted.abs().max())
    ):
        raise NoDecoder(
            f"{name} can't be served, because its decoder uses the encoder's rows in another way than attention "
            "to them.",
            hint="Encoder-decoder models like BART, Marian, M2M100, T5 and Whisper are served.",
        )


def _draw(module: nn.Module, generator: torch.Generator) -> None:
    """Draw weights so large that every part of the model shows in its logits."""
    with torch.no_grad():
        for value in module.parameters():
            spread = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.1
            value.add_(torch.randn(value.shape, generator=generator) * spread)


def _vocabulary(module: Any) -> int:
    return int(module.get_output_embeddings().weight.shape[0])


def _own_logits(model: Any, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    from transformers.modeling_outputs import BaseModelOutput

    given: Any = BaseModelOutput(last_hidden_state=rows)
    return model(encoder_outputs=given, decoder_input_ids=tokens, use_cache=False).logits


def _logits(model: Any, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits at the tokens behind `rows`, by the module that `take_source` has changed."""
    count = rows.shape[1]
    holder: DecoderHolder = model.holder
    holder.rows = torch.cat([rows, torch.zeros((1, tokens.shape[1], rows.shape[2]))], 1)
    ids = torch.cat([torch.full((1, count), -1), tokens], 1)
    positions = torch.cat([torch.zeros((1, count), dtype=torch.int64), torch.arange(tokens.shape[1])[None]], 1)
    try:
        return model(ids, positions.expand(3, -1, -1)).logits[:, count:]
    finally:
        holder.rows = None
