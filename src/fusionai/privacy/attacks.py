"""The attacks: every token tried (A-3), learned inverters (A-1, A-2), updates inverted (A-5).

White-box: a decoder's boundary after a text is almost always an injective function of that text (SipIt, arXiv
2510.15511), and all weights except secret ones are public. One pass over the vocabulary serves any number of matchers,
because they differ only in what they compare.

Learned: what `ridge`, `train_inverter` and `nearest` miss may still be recoverable, so their figures are shown only
beside the white-box one.

Gradients (DAGER, arXiv 2405.15586): the gradient of a weight that reads rows x is a sum of outer products with these
rows. With fewer tokens than inputs, the rows span its row space, so geometry tells whether a token was there: for the
tokens, the first block's attention projections are tested; for their order, the second block's, whose inputs depend on
all earlier tokens. Queries alone do not suffice: a text's first token attends only to itself, so its query has no
gradient. The attacker is given the number of texts and tokens, which tensor sizes reveal anyway.

`audit` provides the boundaries, `subject` runs the candidates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from fusionai.primitives.errors import ModelError
from fusionai.privacy.subject import AttackedModel, Prefixes, chunks, descend

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class DepthComparison:
    """Comparison at one depth. `target` [texts, tokens, k] is compared with a candidate's boundary times `projection`
    [k, width]; with None, with the boundary itself."""

    depth: int
    target: Tensor
    projection: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Matcher:
    """Scores candidates: the sum of squared distances over all parts, lower is better. With `expected`, the score is
    half of that sum minus the log-probability that the model gives the candidate. For whitened parts the lowest is the
    most likely."""

    parts: tuple[DepthComparison, ...]
    expected: bool = False


def matched(
    attacked: AttackedModel,
    ids: Tensor,
    begin: int,
    matchers: Mapping[Name, Matcher],
    on_token: Callable[[int], None],
) -> dict[Name, Tensor]:
    """Return name of matcher -> tokens [texts, tokens - begin], each found given the true tokens before it. `ids` is
    [texts, tokens]; the first `begin` tokens of each text are known."""
    texts, tokens = ids.shape
    prefixes = Prefixes(attacked)
    prefixes.advance(ids[:, :begin])
    expected = attacked.expectations(ids) if any(matcher.expected for matcher in matchers.values()) else None
    found: dict[Name, list[Tensor]] = {name: [] for name in matchers}
    for place in range(begin, tokens):
        ahead = None if expected is None else expected[:, place]
        for name, best in _best(attacked, prefixes, matchers, place, texts, ahead).items():
            found[name].append(best)
        prefixes.advance(ids[:, place : place + 1])
        on_token(place - begin + 1)
    return {name: torch.stack(tokens_found, dim=1) for name, tokens_found in found.items()}


def reconstructed(attacked: AttackedModel, known: Tensor, length: int, matcher: Matcher) -> Tensor:
    """Return tokens [texts, length] found one after another, each given those found before it. `known` [texts, tokens]
    are the first tokens. A mistake partly spoils the tokens after it."""
    texts, begin = known.shape
    prefixes = Prefixes(attacked)
    prefixes.advance(known)
    found: list[Tensor] = []
    for place in range(begin, begin + length):
        best = _best(attacked, prefixes, {"": matcher}, place, texts, None)[""]
        found.append(best)
        prefixes.advance(best[:, None])
    return torch.stack(found, dim=1)


def _best(
    attacked: AttackedModel,
    prefixes: Prefixes,
    matchers: Mapping[Name, Matcher],
    place: int,
    texts: int,
    expected: Tensor | None,
) -> dict[Name, Tensor]:
    """Return name of matcher -> the best token of the vocabulary for each text, [texts]."""
    least = {name: torch.full((texts,), torch.inf, device=attacked.device) for name in matchers}
    best = {name: torch.zeros(texts, dtype=torch.long, device=attacked.device) for name in matchers}
    for chunk in chunks(attacked.vocabulary):
        candidates = torch.arange(chunk.start, chunk.stop, device=attacked.device).expand(texts, -1)
        boundaries = prefixes.tried(candidates)
        for name, matcher in matchers.items():
            badness = _badness(boundaries, matcher.parts, place)
            if matcher.expected and expected is not None:
                badness = badness / 2 - expected[:, chunk.start : chunk.stop]
            value, at = badness.min(dim=1)
            better = value < least[name]
            least[name] = torch.where(better, value, least[name])
            best[name] = torch.where(better, at + chunk.start, best[name])
    return best


def _badness(boundaries: Tensor, parts: Sequence[DepthComparison], place: int) -> Tensor:
    """Sum of squared distances, [texts, candidates]."""
    total = torch.zeros(boundaries.shape[1:3], device=boundaries.device)
    for part in parts:
        tried = boundaries[part.depth].float()
        if part.projection is not None:
            tried = tried @ part.projection.T
        total += (tried - part.target[:, place, None]).square().sum(-1)
    return total


_RIDGES: Final = (1e-4, 1e-2, 1.0, 1e2, 1e4, 1e8)
"""Candidate ridges, relative to the mean square of a boundary. The largest practically disables the correction."""
_HELD_OUT: Final = 5
"""Every n-th known row is held out to choose the ridge."""
_FLOOR: Final = 1e-8
"""Smallest variance, relative to the boundary's mean square: an exact correction would otherwise have covariance 0."""


def calibrated(depth: int, own: Tensor, seen: Tensor, target: Tensor) -> DepthComparison:
    """Return the part that compares the seen `target` [texts, tokens, width] with candidates, corrected and whitened.
    `own` and `seen` [rows, width]: boundaries of the known text, as computed and as seen."""
    x, y = own.double(), seen.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    correction = _correction(x, y - x)
    residual = y - x - x @ correction
    rows, width = x.shape
    floor = _FLOOR * float(x.square().mean()) + 1e-30
    covariance = residual.T @ residual / max(1, rows - 1)
    diagonal = torch.eye(width, dtype=x.dtype, device=x.device)
    # Few rows estimate the covariance badly, so it is shrunk towards a sphere of the same size.
    trust = rows / (rows + width)
    size = float(covariance.diagonal().mean())
    covariance = trust * covariance + ((1 - trust) * size + floor) * diagonal
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance))
    mapping = diagonal + correction.T
    projection = whitening @ mapping
    offset = whitening @ (mean_y - mapping @ mean_x)
    return DepthComparison(depth, (target.double() @ whitening.T - offset).float(), projection.float())


def regression(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Return the matrix that minimises the squares of `x @ matrix - y` plus `ridge` times those of its elements."""
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(gram, x.T @ y)


def _correction(x: Tensor, difference: Tensor) -> Tensor:
    """Return [width, width] such that `x @ correction` approximates `difference`, with the ridge that fits held-out
    rows."""
    held = torch.arange(len(x), device=x.device) % _HELD_OUT == 0
    scale = float(x.square().mean()) * len(x)

    def fitted(ridge: float, rows: Tensor) -> Tensor:
        return regression(x[rows], difference[rows], ridge * scale)

    def missed(ridge: float) -> float:
        return float((difference[held] - x[held] @ fitted(ridge, ~held)).square().sum())

    everything = torch.ones_like(held)
    return fitted(min(_RIDGES, key=missed), everything)


HEADS: Final = 4
ROWS: Final = 16
"""Texts per training batch of the small transformer."""
_RIDGE: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class InverterBudget:
    """Shape of the small transformer and its training: steps of 16 texts."""

    steps: int = 60
    width: int = 96
    blocks: int = 1
    learning_rate: float = 2e-3


def nearest(boundary: Tensor, embedding: Tensor) -> Tensor:
    """Return the token whose embedding [vocabulary, width] has the smallest angle to each row, [texts, tokens]."""
    rows = nn.functional.normalize(boundary.float(), dim=-1)
    return (rows @ nn.functional.normalize(embedding.float(), dim=-1).T).argmax(-1)


def ridge(seen: Tensor, tokens: Tensor, embedding: Tensor) -> Callable[[Tensor], Tensor]:
    """Fit on boundaries [texts, tokens, width] of known `tokens` [texts, tokens]; return a map to tokens."""
    x = seen.flatten(0, 1).double()
    mean, spread = x.mean(0), x.std(0) + 1e-9
    x = (x - mean) / spread
    y = embedding.double()[tokens.flatten()]
    centre = y.mean(0)
    weights = regression(x, y - centre, _RIDGE * len(x))

    def read(boundary: Tensor) -> Tensor:
        guessed = ((boundary.double() - mean) / spread) @ weights + centre
        return nearest(guessed, embedding)

    return read


class _Inverter(nn.Module):
    def __init__(self, width: int, vocabulary: int, budget: InverterBudget) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, budget.width)
        layer = nn.TransformerEncoderLayer(
            budget.width, HEADS, 4 * budget.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, budget.blocks, enable_nested_tensor=False)
        self.out = nn.Linear(budget.width, vocabulary)

    def forward(self, boundary: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(boundary.shape[1], device=boundary.device)
        return self.out(self.blocks(self.into(self.norm(boundary)), mask=mask, is_causal=True))


def train_inverter(
    seen: Tensor, tokens: Tensor, vocabulary: int, budget: InverterBudget, seed: int
) -> Callable[[Tensor], Tensor]:
    """Train on boundaries [texts, tokens, width] of known `tokens` [texts, tokens]; return a map to tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inverter = _Inverter(seen.shape[-1], vocabulary, budget).to(seen.device)
    generator = torch.Generator().manual_seed(seed)
    spread = seen.flatten(0, 1).std(0) + 1e-9
    optimizer = torch.optim.AdamW(inverter.parameters(), lr=budget.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, budget.steps)
    for _ in range(budget.steps):
        rows = torch.randint(len(tokens), (ROWS,), generator=generator).to(seen.device)
        logits = inverter(seen[rows].float() / spread)
        descend(optimizer, nn.functional.cross_entropy(logits.flatten(0, 1), tokens[rows].flatten()))
        schedule.step()
    inverter.eval().requires_grad_(False)
    return lambda boundary: inverter(boundary.float() / spread).argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBudget:
    """Budget of a fit: `steps` of Adam for all texts together, in two halves."""

    steps: int = 120
    learning_rate: float = 0.1
    """Learning rate relative to the embeddings' RMS."""


def fitted(attacked: AttackedModel, seen: Tensor, known: Tensor, depth: int, budget: FitBudget) -> Tensor:
    """Return the recovered tokens, [texts, tokens - known]. `seen` [texts, tokens, width] is the boundary at `depth`;
    `known` [texts, tokens] are the first tokens of the texts."""
    table = attacked.embedding.detach().float()
    fixed = table[known]
    rest = seen.shape[1] - known.shape[1]
    scale = float(table.square().mean().sqrt())
    size = seen.float().square().mean(-1, keepdim=True) + 1e-12
    free = table.mean(0).repeat(len(seen), rest, 1).requires_grad_(True)
    for half in range(2):
        if half:
            free = table[_nearest(free, table)].requires_grad_(True)
        steps = budget.steps // 2
        optimizer = torch.optim.Adam([free], lr=budget.learning_rate * scale)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            made = attacked.boundary_at(depth, inputs_embeds=torch.cat([fixed, free], dim=1))
            # Relative to each row's size, because the row of an attention sink would dominate all others.
            loss = ((made.float() - seen.float()).square() / size).mean()
            optimizer.zero_grad()
            (gradient,) = torch.autograd.grad(loss, [free])
            free.grad = gradient
            optimizer.step()
            schedule.step()
    return _nearest(free, table)


def _nearest(free: Tensor, table: Tensor) -> Tensor:
    return torch.cdist(free.detach().flatten(0, 1), table).argmin(-1).reshape(free.shape[:2])


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
    """Gradients of the query, key and value projections of the first and second block. Each is [outputs or fewer,
    inputs]."""

    first: Tensor
    second: Tensor

    def changed(self, change: Callable[[Tensor], Tensor]) -> Gradients:
        return Gradients(change(self.first), change(self.second))


def gradients_of(attacked: AttackedModel, ids: Tensor) -> Gradients:
    """Return the gradients of the language model's loss on `ids` [texts, tokens + 1]. The last is a label only."""
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
    """Return an orthonormal basis [rank, inputs] of the span of the rows behind the gradient, at most `tokens`."""
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
        attacked.boundary_at(2, input_ids=ids)
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
