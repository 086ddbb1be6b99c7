"""Inversion of updates (A-5): from which texts a gradient was computed, following DAGER (arXiv 2405.15586).

The gradient of a weight that reads rows x is a sum of outer products with these rows. With fewer tokens than inputs,
the rows span its row space, so geometry tells whether a token was there: for the tokens, the first block's attention
projections are tested; for their order, the second block's, whose inputs depend on all earlier tokens. Queries alone
do not suffice: a text's first token attends only to itself, so its query has no gradient.

The attacker is given the number of texts and tokens, which tensor sizes reveal anyway. See `subject`, `audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from fusionai.primitives.errors import ModelError
from fusionai.privacy.subject import AttackedModel

_SPANNED: Final = 1e-7
"""Share of the largest singular value below which a singular value is rounding error."""
_CANDIDATES: Final = 3
"""Candidates kept by the first block's test, as a multiple of the update's tokens."""
_BEAMS: Final = 2
"""Beams kept by the second block's test, as a multiple of the texts."""
_AT_ONCE: Final = 4096
_SAME: Final = 1e-6
"""Relative squared distance below which two rows count as equal."""
_AGAIN: Final = 0.01
"""Penalty for repeating a row: more than rounding error, less than that of a row that was not there."""
_NAMES: Final = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "query_key_value", "Wqkv", "qkv_proj")


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the query, key and value projections of the first and second block. Each is [outputs, inputs], or
    fewer rows in that form."""

    first: Tensor
    second: Tensor

    def changed(self, change: Callable[[Tensor], Tensor]) -> Gradients:
        return Gradients(change(self.first), change(self.second))


def gradients_of(attacked: AttackedModel, ids: Tensor) -> Gradients:
    """Return the gradients of the language model's loss on `ids` [texts, tokens + 1]. The last token is a label
    only."""
    weights = [[module.weight for module in _projections(attacked, block)] for block in (0, 1)]
    flat = [*weights[0], *weights[1]]
    with torch.enable_grad():
        for weight in flat:
            weight.requires_grad_(True)
        logits = attacked.model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, flat)
        for weight in flat:
            weight.requires_grad_(False)
    middle = len(weights[0])
    return Gradients(torch.cat(gradients[:middle]), torch.cat(gradients[middle:]))


def texts_of(attacked: AttackedModel, gradients: Gradients, texts: int, tokens: int) -> list[tuple[int, ...]]:
    """Return `texts` guesses of `tokens` each, most likely first. Their order is unrelated to the batch."""
    first, second = (_span(gradient, texts * tokens) for gradient in (gradients.first, gradients.second))
    vocabulary = torch.arange(attacked.vocabulary, device=attacked.device)
    away = torch.cat([_away(_inputs(attacked, part[:, None])[0][:, -1], first) for part in vocabulary.split(_AT_ONCE)])
    there = away.argsort()[: _CANDIDATES * texts * tokens]
    beams, badness = there.new_zeros((1, 0)), torch.zeros(1, device=attacked.device)
    for _ in range(tokens):
        longer = torch.cat([beams.repeat_interleave(len(there), 0), there.repeat(len(beams))[:, None]], dim=1)
        worse = torch.cat([_misfit(_inputs(attacked, part)[1], second) for part in longer.split(_AT_ONCE)])
        total = badness.repeat_interleave(len(there)) + worse
        badness, kept = total.topk(min(_BEAMS * texts, len(total)), largest=False)
        beams = longer[kept]
    return [tuple(beam) for beam in beams[:texts].tolist()]


def check_invertible(attacked: AttackedModel) -> None:
    """Raises `ModelError` for a model that `gradients_of` does not support."""
    if attacked.depth < 2:
        raise ModelError(
            "gradient inversion needs the weights of two blocks, and the model has one block.",
            hint="Leave gradient inversion out: name other --attacks.",
        )
    for block in (0, 1):
        _projections(attacked, block)


def in_order(guesses: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Assign each guess to the text it matches best, each once, because the order of a batch can't be recovered."""
    left = [tuple(guess) for guess in guesses]
    pairs = [
        (sum(one == other for one, other in zip(guess, text, strict=False)), number, place)
        for number, guess in enumerate(left)
        for place, text in enumerate(truth)
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    placed: dict[int, tuple[int, ...]] = {}
    used: set[int] = set()
    for _, guess, text in pairs:
        if guess not in used and text not in placed:
            used.add(guess)
            placed[text] = left[guess]
    return [placed.get(text, ()) for text in range(len(truth))]


def _misfit(rows: Tensor, span: Tensor) -> Tensor:
    """Return the distance of the last of `rows` [texts, tokens, inputs] from the span, [texts]. A text's first token
    attends only to itself when repeated, so every repetition gives the same row; repetitions get a penalty."""
    last, before = rows[:, -1], rows[:, :-1]
    apart = (before - last[:, None]).square().sum(-1) / last.square().sum(-1, keepdim=True)
    return _away(last, span) + _AGAIN * (apart < _SAME).any(-1)


def _span(gradient: Tensor, tokens: int) -> Tensor:
    """Return an orthonormal basis [rank, inputs] of the span of the rows behind the gradient, at most `tokens` of
    them."""
    _, sizes, rows = torch.linalg.svd(gradient.double(), full_matrices=False)
    rank = int((sizes > _SPANNED * sizes[0]).sum())
    return rows[: min(rank, tokens)]


def _away(rows: Tensor, span: Tensor) -> Tensor:
    """Return the distance of each of `rows` [rows, inputs] from the span, relative to the row's size."""
    rows = rows.double()
    inside = (rows @ span.T).square().sum(-1)
    size = rows.square().sum(-1)
    return ((size - inside).clamp(min=0) / size).float()


@torch.no_grad()
def _inputs(attacked: AttackedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of both blocks' projections, [texts, tokens, inputs] each."""
    seen: list[Tensor] = []
    hooks = [
        _projections(attacked, block)[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
        for block in (0, 1)
    ]
    try:
        attacked.run_to(ids, 2)
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0], seen[1]


def _projections(attacked: AttackedModel, block: int) -> list[nn.Linear]:
    """Return the block's projections to queries, keys and values, which read the same rows."""
    found = [
        module
        for name, module in attacked.blocks[block].named_modules()
        if name.rpartition(".")[2] in _NAMES and isinstance(module, nn.Linear)
    ]
    if not found:
        raise ModelError(
            f"{type(attacked.model).__name__}: block {block} has no linear layer that projects to queries.",
            hint="Leave gradient inversion out: name other --attacks.",
        )
    return found
