"""A causal language model as the attacker sees it: boundaries of texts, of candidate tokens and of embeddings.

A boundary at `depth` is the tensor after that many blocks: 0 is the input of the first block, the last is the output of
the last block, before the final norm. Works for any decoder of `transformers` whose blocks are one list. Weights are
never changed. `defences` change a boundary before a peer sees it; the caller passes in the codecs of links, which
belong to a higher layer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.utils import logging

from fusionai.primitives.errors import ModelError

Change = Callable[[Tensor], Tensor]
"""Change of a boundary [texts, tokens, width] before it is sent. Keeps the shape."""
AT_ONCE: Final = 128
"""Candidates per text in one forward pass."""


class _Reached(Exception):
    """Raised when the requested boundary has been computed, to skip the rest of the model."""


class AttackedModel:
    """Wraps `model` in evaluation mode on its device. Raises `ModelError` if its blocks are not one list."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.base = cast("nn.Module", model.base_model)
        self.blocks = _blocks(self.base, int(model.config.num_hidden_layers))
        self.depth = len(self.blocks)
        self.embedding = cast("Tensor", cast("nn.Module", model.get_input_embeddings()).weight)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def vocabulary(self) -> int:
        return self.embedding.shape[0]

    @property
    def width(self) -> int:
        return self.embedding.shape[1]

    @property
    def longest_tokens(self) -> int:
        """Longest text in which each token sees all tokens before it, limited by positions or an attention window."""
        config = self.model.config
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window"))
        return min((limit for limit in limits if isinstance(limit, int)), default=2**31)

    @torch.no_grad()
    def boundaries(self, ids: Tensor) -> Tensor:
        """Return all boundaries of `ids` [texts, tokens], shape [depth + 1, texts, tokens, width]."""
        with self.recorded() as seen:
            self.base(input_ids=ids, use_cache=False)
        return torch.stack(seen)

    def boundary_at(self, depth: int, **inputs: Tensor) -> Tensor:
        """Return the boundary [texts, tokens, width] at `depth` of `input_ids` or `inputs_embeds`, differentiable,
        without running later blocks."""
        with self.recorded(upto=depth) as seen, contextlib.suppress(_Reached):
            self.base(**inputs, use_cache=False)
        return seen[depth]

    @torch.no_grad()
    def loss(self, ids: Tensor, depth: int = 0, change: Change | None = None) -> float:
        """Return the mean loss on `ids` [texts, tokens] in nats per token, with the boundary at `depth` changed."""
        with self._changed(depth, change):
            return float(text_loss(self.model, ids))

    @torch.no_grad()
    def expectations(self, ids: Tensor) -> Tensor:
        """Return the log-probability of each token at each position before it is seen, [texts, tokens, vocabulary].
        Uniform at the first position, for which the model predicts nothing."""
        logits = self.model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        even = torch.full_like(logits[:, :1], -float(torch.tensor(logits.shape[-1]).log()))
        return torch.cat([even, logits[:, :-1]], dim=1)

    @contextmanager
    def recorded(self, upto: int | None = None) -> Generator[list[Tensor]]:
        """Yield a list that collects each boundary as the model runs. The run ends after boundary `upto`."""
        seen: list[Tensor] = []

        def first(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(args[0] if args else kwargs["hidden_states"])

        def after(_block: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
            keep(out[0] if isinstance(out, tuple) else out)

        def keep(boundary: Tensor) -> None:
            seen.append(boundary)
            if upto is not None and len(seen) == upto + 1:
                raise _Reached

        hooks = [self.blocks[0].register_forward_pre_hook(first, with_kwargs=True)]
        hooks += [block.register_forward_hook(after) for block in self.blocks]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _changed(self, depth: int, change: Change | None) -> Generator[None]:
        if change is None:
            yield
            return

        def before(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

        def after(_block: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        hook = (
            self.blocks[0].register_forward_pre_hook(before, with_kwargs=True)
            if depth == 0
            else self.blocks[depth - 1].register_forward_hook(after)
        )
        try:
            yield
        finally:
            hook.remove()


class Prefixes:
    """The part of the texts that the attacker already has, in a key-value cache."""

    def __init__(self, attacked: AttackedModel) -> None:
        self._attacked = attacked
        self._cache = DynamicCache(config=attacked.model.config)
        self._tokens = 0

    @torch.no_grad()
    def tried(self, candidates: Tensor) -> Tensor:
        """Return the boundaries of each candidate as the next token of its text. `candidates` is [texts, candidates],
        the result [depth + 1, texts, candidates, width]. The candidates are processed as one text in which each sees
        the prefix and itself, because copies of the cache would use more memory."""
        texts, count = candidates.shape
        sees = torch.ones(count, self._tokens + count, dtype=torch.bool, device=candidates.device)
        sees[:, self._tokens :] = torch.eye(count, dtype=torch.bool, device=candidates.device)
        dtype = self._attacked.embedding.dtype
        mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)
        with self._attacked.recorded() as seen:
            self._attacked.base(
                input_ids=candidates,
                attention_mask=mask.expand(texts, 1, -1, -1),
                position_ids=torch.full_like(candidates, self._tokens),
                past_key_values=copy.deepcopy(self._cache),
                use_cache=True,
            )
        return torch.stack(seen)

    @torch.no_grad()
    def advance(self, ids: Tensor) -> None:
        """Append `ids` [texts, tokens] to the texts."""
        if ids.shape[1]:
            self._attacked.base(input_ids=ids, past_key_values=self._cache, use_cache=True)
            self._tokens += ids.shape[1]


def chunks(vocabulary: int) -> Sequence[range]:
    """Split the vocabulary into parts of at most `AT_ONCE` tokens."""
    return [range(start, min(start + AT_ONCE, vocabulary)) for start in range(0, vocabulary, AT_ONCE)]


def _blocks(base: nn.Module, layers: int) -> nn.ModuleList:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise ModelError(
        f"{type(base).__name__}: its {layers} blocks are not one list of modules.",
        hint="The audit reads decoders of transformers, such as Llama, Qwen, Mistral and GPT-2.",
    )


def chosen_device(asked: str) -> str:
    """Return the device to use; `auto` is the GPU if there is one."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def as_tokens(tokens: Sequence[int] | Sequence[Sequence[int]], device: str) -> Tensor:
    return torch.tensor(tokens, dtype=torch.long, device=device)


def as_rows(tokens: Sequence[int], width: int, device: str) -> Tensor:
    """Return the tokens as [rows, width], without an incomplete last row."""
    return as_tokens(tokens[: len(tokens) // width * width], device).reshape(-1, width)


def load_attacked(directory: Path, device: str) -> AttackedModel:
    """Load a model in Hugging Face layout in fp32. Raises `ModelError`."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, RuntimeError) as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise ModelError(
            f"{directory}: not a model that can be audited: {reason}",
            hint="Give the directory of a causal language model in Hugging Face layout, with safetensors.",
        ) from problem
    return AttackedModel(cast(PreTrainedModel, model.to(device)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """Shape of a Llama-type model and its training: `steps` of `rows` texts of `tokens` tokens."""

    layers: int = 4
    width: int = 96
    steps: int = 400
    rows: int = 16
    tokens: int = 128
    learning_rate: float = 3e-3
    seed: int = 7

    @property
    def trained_tokens(self) -> int:
        return self.steps * self.rows * self.tokens


def train_small_model(
    shape: SmallModel, vocabulary: int, batches: Iterator[Tensor], device: str, on_step: Callable[[int, float], None]
) -> AttackedModel:
    """Train the model. `batches` yields [rows, tokens] without end; `on_step` is called with the step and its loss."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.width * 8 // 3 // 8 * 8,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": max(2, shape.width // 32),
        "num_key_value_heads": max(2, shape.width // 32),
        "max_position_embeddings": 1024,
        "initializer_range": 0.04,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    cast(nn.Module, model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=shape.learning_rate, total_steps=shape.steps, pct_start=min(0.3, 20 / shape.steps)
    )
    for step in range(1, shape.steps + 1):
        loss = text_loss(model, next(batches))
        descend(optimizer, loss)
        schedule.step()
        on_step(step, float(loss.detach()))
    return AttackedModel(model)


def text_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of predicting each next token of `ids` [texts, tokens]."""
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Update the optimizer's parameters by one step, with their gradient clipped to norm 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def batches_of(stream: Tensor, rows: int, tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield batches [rows, tokens] from random places in `stream`, without end."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(tokens, device=stream.device)
    while True:
        starts = torch.randint(len(stream) - tokens, (rows, 1), generator=generator).to(stream.device)
        yield stream[starts + offsets]


Packed = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""Packs and unpacks a boundary [texts, tokens, width]; returns the result."""
NOISES: Final = (0.3, 1.0, 3.0)
"""Default sizes of the noise, relative to each row's RMS."""


@dataclass(frozen=True, slots=True)
class Defence:
    """A named defence. If `change` is random, it draws new numbers at each call."""

    name: str
    change: Change


def defences(packings: Mapping[str, Packed], noises: tuple[float, ...] = NOISES, seed: int = 0) -> tuple[Defence, ...]:
    """Return the defences: clean, bf16, the packings by name, and noise of these sizes relative to each row's RMS."""
    return (
        Defence("clean", lambda boundary: boundary),
        Defence("bf16", lambda boundary: boundary.to(torch.bfloat16).to(boundary.dtype)),
        *(Defence(name, _packed(packing)) for name, packing in packings.items()),
        *(Defence(f"noise {size:g}", gaussian(size, seed)) for size in noises),
    )


def gaussian(size: float, seed: int) -> Change:
    """Return a change that adds normal noise of `size` times each row's RMS."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(boundary: Tensor) -> Tensor:
        scale = boundary.square().mean(-1, keepdim=True).sqrt() * size
        return boundary + scale * torch.randn(boundary.shape, generator=generator).to(boundary)

    return noisy


def _packed(packing: Packed) -> Change:
    def through(boundary: Tensor) -> Tensor:
        rows: npt.NDArray[Any] = boundary.detach().float().cpu().contiguous().numpy()
        return torch.from_numpy(np.array(packing(rows))).to(boundary)

    return through


def secret_prefix(
    public: AttackedModel,
    batches: Iterator[Tensor],
    *,
    blocks: int,
    distance: float,
    steps: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int], None],
) -> AttackedModel:
    """Return a copy of `public` whose first `blocks` blocks were moved and trained on `batches` [rows, tokens]."""
    secret = AttackedModel(copy.deepcopy(public.model))
    generator = torch.Generator().manual_seed(seed)
    trained: list[nn.Parameter] = []
    for block in secret.blocks[:blocks]:
        for parameter in block.parameters():
            parameter.requires_grad_(True)
            trained.append(parameter)
            if parameter.ndim > 1:
                fresh = torch.randn(parameter.shape, generator=generator).to(parameter) * parameter.detach().std()
                parameter.data.mul_(1 - distance).add_(distance * fresh)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    for step in range(steps):
        descend(optimizer, text_loss(secret.model, next(batches)))
        on_step(step + 1)
    return AttackedModel(secret.model)
