"""A complete audit: every attack on every boundary of every defence, with controls that decide whether it counts.

The order is: compute the boundaries as peers see them, run one pass over the vocabulary for all matchers, then run the
attacks that work on one boundary at a time. Decides which attacks run where and what they know; the attacks are in
their own modules. `client.audit` prepares the model and the text, `findings` has the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fusionai.privacy import attacks as attacker
from fusionai.privacy import findings as results
from fusionai.privacy.subject import AttackedModel, Change, Defence

Key = tuple[str, int, results.Attack]
"""Defence, depth, attack."""
LORA_RANK: Final = 8
"""Rank of the adapter whose update is attacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Token numbers for an audit. `trial` [texts, tokens] begin with `template_tokens` known tokens; `truth` has the
    rest. The attacker has `auxiliary`, text of its own, and `known`, some of the victim's text; losses are measured on
    `held_out`. Each is [rows, tokens]."""

    trial: Tensor
    template_tokens: int
    truth: results.Truth
    auxiliary: Tensor
    known: Tensor
    held_out: Tensor


@dataclass(frozen=True, slots=True)
class Victim:
    """A way in which a job may send its boundaries. `model` computes them (not the public model if there is a secret
    prefix), `defence` changes them. They leave the owner at depth `first` and later."""

    defence: Defence
    model: AttackedModel
    first: int = 0


@dataclass(frozen=True, slots=True)
class UpdateCase:
    """A gradient of `texts` texts of `tokens` tokens, sent in `form`."""

    texts: int
    tokens: int
    form: str
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """What an audit runs. `few`: number of texts for the slow attacks, which run on one boundary at a time."""

    depths: tuple[int, ...]
    attacks: frozenset[results.AuditAttack]
    updates: tuple[UpdateCase, ...] = ()
    few: int = 3
    inverter: attacker.InverterBudget = field(default_factory=attacker.InverterBudget)
    fit: attacker.FitBudget = field(default_factory=attacker.FitBudget)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Doing:
    """Progress of the current activity: `done` of `total`."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Result of `run`: `findings.Findings` without the circumstances of the run."""

    boundaries: tuple[results.BoundaryFindings, ...]
    updates: tuple[results.Update, ...]
    controls: tuple[results.Control, ...]


def run(
    public: AttackedModel,
    victims: Sequence[Victim],
    texts: Texts,
    plan: AuditPlan,
    on_doing: Callable[[Doing], None],
) -> AuditResult:
    """Attack every victim with the weights of `public`. The first must be clean, for the controls."""
    seen = [_seen(public, victim, texts) for victim in victims]
    by_matching = _by_matching(public, seen, texts, plan, on_doing)
    cells = [(one, depth) for one in seen for depth in plan.depths if depth >= one.victim.first]
    boundaries: list[results.BoundaryFindings] = []
    for number, (one, depth) in enumerate(cells):
        name = one.victim.defence.name
        on_doing(Doing(f"{name} at depth {depth}", number, len(cells)))
        matches = {key[2]: found for key, found in by_matching.items() if key[:2] == (name, depth)}
        others = [found for attack, found in matches.items() if attack != "white-box"]
        boundaries.append(
            results.BoundaryFindings(
                depth=depth,
                defence=name,
                loss=one.victim.model.loss(texts.held_out, depth, one.victim.defence.change),
                white_box=matches["white-box"],
                others=(*others, *_one_by_one(public, one, texts, plan, depth)),
            )
        )
    cases = plan.updates if "gradients" in plan.attacks else ()
    updates = tuple(_update(public, case, texts) for case in cases)
    return AuditResult(tuple(boundaries), updates, tuple(_controls(victims[0].defence.name, boundaries, updates)))


@dataclass(frozen=True, slots=True)
class _Seen:
    """Boundaries [depth + 1, rows, tokens, width]. `trial` and `known` are as peers see them, `own_...` as the attacker
    computes them. `auxiliary`: the attacker's own text as peers would see it if the victim used the public weights."""

    victim: Victim
    trial: Tensor
    known: Tensor
    own_known: Tensor
    own_trial: Tensor
    auxiliary: Tensor


def _seen(public: AttackedModel, victim: Victim, texts: Texts) -> _Seen:
    change = victim.defence.change
    return _Seen(
        victim,
        change(victim.model.boundaries(texts.trial)),
        change(victim.model.boundaries(texts.known)),
        public.boundaries(texts.known),
        public.boundaries(texts.trial),
        change(public.boundaries(texts.auxiliary)),
    )


def _by_matching(
    public: AttackedModel,
    seen: Sequence[_Seen],
    texts: Texts,
    plan: AuditPlan,
    on_doing: Callable[[Doing], None],
) -> dict[Key, results.Recovery]:
    """Run all attacks that share one pass over the vocabulary."""
    matchers: dict[Key, attacker.Matcher] = {}
    for one in seen:
        name, first = one.victim.defence.name, one.victim.first
        depths = [depth for depth in plan.depths if depth >= first]
        by_template: list[attacker.DepthComparison] = []
        for depth in depths:
            matchers[name, depth, "white-box"] = attacker.Matcher(
                (attacker.DepthComparison(depth, one.trial[depth].float()),)
            )
            if {"calibrated", "pooled"} & plan.attacks:
                by_template.append(_known_part(depth, one.own_trial, one.trial, one.trial, texts.template_tokens))
            if "calibrated" in plan.attacks:
                matchers[name, depth, "template"] = attacker.Matcher((by_template[-1],), expected=True)
                by_text = _known_part(depth, one.own_known, one.known, one.trial)
                matchers[name, depth, "known text"] = attacker.Matcher((by_text,), expected=True)
        if "pooled" in plan.attacks and depths:
            matchers[name, depths[0], "pooled"] = attacker.Matcher(tuple(by_template), expected=True)
    private = texts.trial.shape[1] - texts.template_tokens
    begun_s = time.perf_counter()
    found = attacker.matched(
        public,
        texts.trial,
        texts.template_tokens,
        matchers,
        lambda done: on_doing(Doing("white-box, every token tried", done, private)),
    )
    seconds = time.perf_counter() - begun_s
    known_tokens: dict[results.Attack, int] = {
        "template": len(texts.trial) * texts.template_tokens,
        "pooled": len(texts.trial) * texts.template_tokens,
        "known text": texts.known.numel(),
    }
    return {
        key: results.recovery(
            key[2],
            guess.tolist(),
            texts.truth,
            results.Budget(
                forward_tokens=guess.numel() * public.vocabulary,
                seconds=seconds,
                known_tokens=known_tokens.get(key[2], 0),
            ),
        )
        for key, guess in found.items()
    }


def _known_part(
    depth: int, own: Tensor, seen: Tensor, target: Tensor, tokens: int | None = None
) -> attacker.DepthComparison:
    """Return the comparison calibrated on the first `tokens` tokens of known texts, by default all."""
    # Without the first position, where most models put an attention sink many times larger than any token's row.
    own, seen = (boundary[depth][:, 1:tokens].flatten(0, 1) for boundary in (own, seen))
    return attacker.calibrated(depth, own, seen, target[depth])


def _one_by_one(
    public: AttackedModel, one: _Seen, texts: Texts, plan: AuditPlan, depth: int
) -> Iterator[results.Recovery]:
    """Run the attacks that work on one boundary at a time."""
    begin, trial = texts.template_tokens, one.trial[depth]
    length = trial.shape[1] - begin

    def found(
        attack: results.Attack, guess: Callable[[], Tensor], truth: results.Truth, **budget: int
    ) -> results.Recovery:
        begun_s = time.perf_counter()
        tokens = guess().tolist()
        taken = results.Budget(seconds=time.perf_counter() - begun_s, **{"forward_tokens": 0, **budget})
        return results.recovery(attack, tokens, truth, taken)

    if "nearest" in plan.attacks:
        yield found("nearest", lambda: attacker.nearest(trial, public.embedding)[:, begin:], texts.truth)
    if "inverter" in plan.attacks:
        auxiliary = one.auxiliary[depth]
        learned = texts.auxiliary.numel()
        trained = plan.inverter.steps * attacker.ROWS * texts.auxiliary.shape[1]
        train = partial(attacker.train_inverter, vocabulary=public.vocabulary, budget=plan.inverter, seed=plan.seed)
        yield found(
            "ridge",
            lambda: attacker.ridge(auxiliary, texts.auxiliary, public.embedding)(trial)[:, begin:],
            texts.truth,
            auxiliary_tokens=learned,
        )
        yield found(
            "inverter",
            lambda: train(auxiliary, texts.auxiliary)(trial)[:, begin:],
            texts.truth,
            auxiliary_tokens=learned,
            forward_tokens=trained,
        )
        if one.victim.model is not public:  # an attacker that knows text need not know the secret weights
            yield found(
                "inverter, known text",
                lambda: train(one.known[depth], texts.known)(trial)[:, begin:],
                texts.truth,
                known_tokens=texts.known.numel(),
                forward_tokens=trained,
            )
    few, truth = trial[: plan.few], texts.truth.first(plan.few)
    known = texts.trial[: plan.few, :begin]
    if "prefix" in plan.attacks and depth == max(plan.depths):  # as expensive as all others; run at the hardest depth
        matcher = attacker.Matcher((attacker.DepthComparison(depth, few.float()),))
        yield found(
            "recovered prefix",
            lambda: attacker.reconstructed(public, known, length, matcher),
            truth,
            forward_tokens=len(few) * length * public.vocabulary,
        )
    if "optimisation" in plan.attacks:
        yield found(
            "optimisation",
            lambda: attacker.fitted(public, few, known, depth, plan.fit),
            truth,
            forward_tokens=plan.fit.steps * few.shape[0] * few.shape[1],
        )


def _update(public: AttackedModel, case: UpdateCase, texts: Texts) -> results.Update:
    begin = texts.template_tokens
    rows = texts.held_out if case.texts > len(texts.trial) else texts.trial[:, begin:]
    ids = rows[: case.texts, : case.tokens + 1]
    truth = results.Truth(tuple(tuple(row) for row in ids[:, :-1].tolist()), ("",) * len(ids), texts.truth.decode)
    begun_s = time.perf_counter()
    gradients: attacker.Gradients = attacker.gradients_of(public, ids).changed(case.change)
    guesses = attacker.in_order(attacker.texts_of(public, gradients, case.texts, case.tokens), truth.texts)
    budget = results.Budget(forward_tokens=public.vocabulary, seconds=time.perf_counter() - begun_s)
    return results.Update(
        texts=case.texts,
        tokens=case.texts * case.tokens,
        width=gradients.first.shape[1],
        form=case.form,
        recovery=results.recovery("gradients", guesses, truth, budget),
    )


def low_rank(rank: int, seed: int) -> Change:
    """Return what an adapter of this rank sends of a gradient [1, outputs, inputs]: its rows mixed into `rank` rows."""
    generator = torch.Generator().manual_seed(seed)

    def mixed(gradient: Tensor) -> Tensor:
        return torch.randn(rank, gradient.shape[-2], generator=generator).to(gradient) @ gradient

    return mixed


def _controls(
    clean: str, boundaries: Sequence[results.BoundaryFindings], updates: Sequence[results.Update]
) -> Iterator[results.Control]:
    """Yield each attack on a clean boundary, where it must succeed. The white-box attack must succeed at all depths,
    attacks that learn or fit at the shallowest, which is the easiest."""
    mine = sorted((one for one in boundaries if one.defence == clean), key=lambda one: one.depth)
    for one in mine:
        yield results.Control(name=f"white-box, {clean}, depth {one.depth}", got=one.white_box.top1)
    anywhere: tuple[results.Attack, ...] = ("recovered prefix", "template", "known text", "pooled")
    at_depth_0: tuple[results.Attack, ...] = ("nearest", "ridge", "optimisation")
    for one in mine:
        for other in one.others:
            if other.attack in anywhere or (other.attack in at_depth_0 and one.depth == 0):
                yield results.Control(name=f"{other.attack}, {clean}, depth {one.depth}", got=other.top1)
    within = [one for one in updates if one.form == "fp32" and one.tokens * 2 <= one.width]
    for one in within:
        yield results.Control(name=f"gradients, {one.tokens} tokens", got=one.recovery.top1)
