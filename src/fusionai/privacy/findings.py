"""Results of an audit as data, and what they mean for each privacy level. Loads no framework.

A weak attack proves nothing: a learned probe may find a tenth of what can be found. So a `BoundaryFindings` can't be
constructed without its white-box recovery, and all other figures are shown beside that one. A level is represented by
the most that any attack recovered from what peers see at it, in the audit of a small real model that ships with the
product (`shipped`; made by `fusion audit`, see `docs/privacy.md`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import sqrt
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from fusionai.primitives.errors import StorageError
from fusionai.primitives.privacy import PrivacyLevel

Attack = Literal[
    "white-box",
    "recovered prefix",
    "template",
    "known text",
    "nearest",
    "ridge",
    "inverter",
    "inverter, known text",
    "optimisation",
    "pooled",
    "gradients",
]
"""Attacks.

White-box: tries every token of the vocabulary after the true text before it. Recovered prefix: the same, after the
tokens found so far. Template, known text: the same, with what the peer learned from a text it knows, by Mahalanobis
distance and with the model's own predictions. Nearest: the most similar embedding. Ridge, inverter: learned, in closed
form and by a small transformer. Optimisation: embeddings fitted by gradient descent. Pooled: as template, with the
boundaries of all depths. Gradients: which tokens produced a weight's update.
"""
AuditAttack = Literal["nearest", "inverter", "prefix", "calibrated", "optimisation", "pooled", "gradients"]
"""Attacks that can be selected. The white-box attack always runs."""
Share = Annotated[float, Meta(ge=0, le=1)]
CONTROL: Final = 0.99
"""Smallest share that a positive control must recover."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of an attack. `forward_tokens`: tokens that passed through the model or a part of it, tried or
    differentiated. `auxiliary_tokens`: tokens of the attacker's own training text. `known_tokens`: of the victim's."""

    forward_tokens: int
    seconds: float
    auxiliary_tokens: int = 0
    known_tokens: int = 0


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What one attack recovered. `low`, `high`: 95 % confidence interval of `top1` (Wilson, over tokens). `secrets`:
    number of planted strings, of which `secrets_found` were recovered exactly."""

    attack: Attack
    tokens: int
    top1: Share
    low: Share
    high: Share
    rouge_l: Share
    secrets: int
    secrets_found: int
    budget: Budget


class BoundaryFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer sees after `depth` blocks under `defence`, and what it recovered. `loss`: loss of the model on
    held-out text with this boundary, in nats per token."""

    depth: int
    defence: str
    loss: float
    white_box: Recovery
    others: tuple[Recovery, ...] = ()

    def __post_init__(self) -> None:
        if self.white_box.attack != "white-box" or any(one.attack == "white-box" for one in self.others):
            raise ValueError("expected one white-box recovery and other attacks beside it")

    @property
    def worst(self) -> Recovery:
        """The attack that recovered most."""
        return max((self.white_box, *self.others), key=lambda one: one.top1)


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What was recovered of the texts from which a weight's update was computed. `width`: number of inputs of that
    weight. The gradient of more tokens than that does not determine them."""

    texts: int
    tokens: int
    width: int
    form: str
    recovery: Recovery


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """An attack in a setting where it must succeed. If it fails, the audit is void."""

    name: str
    got: Share
    wanted: Share = CONTROL

    @property
    def passed(self) -> bool:
        return self.got >= self.wanted


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The attacked model. `loss` is on held-out text, in nats per token."""

    name: str
    parameters: int
    layers: int
    width: int
    vocabulary: int
    trained_tokens: int | None
    data: str
    loss: float
    perplexity: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The texts to recover. Each begins with a known template of `template_tokens`, followed by `private_tokens`.
    `chance`: top-1 of always guessing the most common token."""

    texts: int
    template_tokens: int
    private_tokens: int
    chance: Share


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """A complete audit. `local_blocks`: first blocks that stayed with the owner, if a secret prefix was audited."""

    date: str
    command: str
    versions: dict[str, str]
    machine: str
    seconds: float
    subject: Subject
    trial: Trial
    local_blocks: int
    boundaries: tuple[BoundaryFindings, ...]
    updates: tuple[Update, ...]
    controls: tuple[Control, ...]

    @property
    def void(self) -> bool:
        """Whether a positive control failed or there was none: then no figure of this audit counts."""
        return not self.controls or not all(control.passed for control in self.controls)

    @property
    def defences(self) -> tuple[str, ...]:
        """Names of the defences in the order of the audit."""
        return tuple(dict.fromkeys(boundary.defence for boundary in self.boundaries))

    @property
    def depths(self) -> tuple[int, ...]:
        """Audited depths, ascending."""
        return tuple(sorted({boundary.depth for boundary in self.boundaries}))

    def at(self, defence: str, depth: int) -> BoundaryFindings | None:
        """The boundary of this defence and depth; None if nothing leaves the job owner there or it was not audited."""
        return next((one for one in self.boundaries if one.defence == defence and one.depth == depth), None)


Z_95: Final = 1.959964


@dataclass(frozen=True, slots=True)
class Truth:
    """The texts to recover, as token numbers. `secrets`: the planted string of each text, "" if it has none."""

    texts: tuple[tuple[int, ...], ...]
    secrets: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def first(self, count: int) -> Truth:
        """Return the truth of the first `count` texts."""
        return Truth(self.texts[:count], self.secrets[:count], self.decode)


def recovery(attack: Attack, guesses: Sequence[Sequence[int]], truth: Truth, budget: Budget) -> Recovery:
    """Score the guesses of an attack: one per text, in order. A guess may be shorter or longer than its text."""
    pairs = list(zip(guesses, truth.texts, strict=True))
    right = sum(one == other for guess, text in pairs for one, other in zip(guess, text, strict=False))
    total = sum(len(text) for text in truth.texts)
    low, high = wilson(right, total)
    planted = [(guess, secret) for guess, secret in zip(guesses, truth.secrets, strict=True) if secret]
    return Recovery(
        attack=attack,
        tokens=total,
        top1=right / total,
        low=low,
        high=high,
        rouge_l=sum(rouge_l(guess, text) for guess, text in pairs) / len(pairs),
        secrets=len(planted),
        secrets_found=sum(secret in truth.decode(guess) for guess, secret in planted),
        budget=budget,
    )


def chance(known: Sequence[int], truth: Truth) -> float:
    """Return the top-1 accuracy of always guessing the most common token of the `known` text."""
    commonest = Counter(known).most_common(1)[0][0]
    tokens = [token for text in truth.texts for token in text]
    return tokens.count(commonest) / len(tokens)


def wilson(right: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson 1927), also valid at 0 and 1."""
    if not total:
        return 0.0, 1.0
    share, square = right / total, Z_95 * Z_95
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = Z_95 * sqrt(share * (1 - share) / total + square / (4 * total * total)) / (1 + square / total)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def rouge_l(guess: Sequence[int], text: Sequence[int]) -> float:
    """F1 of the longest common subsequence (Lin 2004), over tokens."""
    if not guess or not text:
        return 0.0
    common = longest_common(guess, text)
    return 2 * common / (len(guess) + len(text))


def longest_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for place, candidate in enumerate(other, start=1):
            above = row[place]
            row[place] = diagonal + 1 if token == candidate else max(above, row[place - 1])
            diagonal = above
    return row[-1]


_SHIPPED: Final = "data/audit.json"
SENT: Final = ("clean", "int8", "int4")
"""How boundaries leave a job owner: unchanged, or packed by links."""


@dataclass(frozen=True, slots=True)
class MeasuredLeakage:
    """The boundaries that peers see at a level where the best attack recovered most and least."""

    most: BoundaryFindings
    least: BoundaryFindings

    @property
    def spelled(self) -> str:
        """The recovered share, or the range of shares."""
        low, high = f"{self.least.worst.top1:.0%}", f"{self.most.worst.top1:.0%}"
        return high if low == high else f"{low} to {high}"


@cache
def shipped() -> Findings:
    """Return the audit shipped with this version. Raises `StorageError` for a damaged installation."""
    try:
        return read((resources.files("fusionai.privacy") / _SHIPPED).read_bytes())
    except (OSError, msgspec.MsgspecError) as problem:
        raise StorageError(
            f"the measured audit of this installation can't be read: {problem}.", hint="Install fusionai again."
        ) from problem


def read(text: bytes) -> Findings:
    """Decode the output of `fusion audit --json`. Raises `msgspec.MsgspecError`."""
    written: dict[str, Any] = msgspec.json.decode(text)
    return msgspec.convert({name: value for name, value in written.items() if name != "schema"}, Findings)


def measured_leakage(level: PrivacyLevel, findings: Findings, packed: str = "clean") -> MeasuredLeakage:
    """Return the extreme boundaries at a level. `packed`: one of `SENT`. At `split-k` the first depths are not seen."""
    first = findings.local_blocks if level == "split-k" else 0
    seen = [one for one in findings.boundaries if one.defence == packed and one.depth >= first]
    return MeasuredLeakage(max(seen, key=lambda one: one.worst.top1), min(seen, key=lambda one: one.worst.top1))


def sentence(level: PrivacyLevel) -> str:
    """Return a warning for a user about to send text to peers at `level`, with the figure of the shipped audit."""
    if level in ("open", "encrypted"):
        return "peers can read your text: one of them receives its token ids"
    found = measured_leakage(level, shipped())
    whom = "trusted peers" if level == "trusted" else "peers"
    return (
        f"{whom} can reconstruct your text: measured {found.spelled} of tokens ({found.most.worst.attack}, at depths "
        f"{found.least.depth if level == 'split-k' else 0} to {shipped().depths[-1]}); see `fusion privacy`"
    )


Adversary = Literal["A0", "A1", "A2", "A3", "A4", "A5"]
ADVERSARIES: Final[dict[Adversary, str]] = {
    "A0": "an attacker on the network, who reads, delays and changes traffic",
    "A1": "a curious peer, which computes as agreed, and keeps and reads all that it receives",
    "A2": "several peers that pool what they receive",
    "A3": "a malicious peer, which computes something else, and reads as A1 does",
    "A4": "a curious broker, which reads all data it stores",
    "A5": "a malicious broker, which lies about which peers are present and which are members",
}
Stand = Literal["promises nothing", "holds", "reads tokens", "reconstructs", "only those trusted"]
"""What a level promises against one adversary. "reads tokens": the adversary receives token ids. "reconstructs": what
it receives can be inverted to the extent that was measured. "only those trusted": as "reconstructs", but limited to
peers whose keys are signed by keys that the job owner trusts."""

_PEERS: Final[tuple[Adversary, ...]] = ("A1", "A2", "A3")


def _stands(network: Stand, peers: Stand, curious: Stand, lying: Stand) -> dict[Adversary, Stand]:
    return {"A0": network, **dict.fromkeys(_PEERS, peers), "A4": curious, "A5": lying}


STANDS: Final[dict[PrivacyLevel, dict[Adversary, Stand]]] = {
    "open": _stands("promises nothing", "reads tokens", "promises nothing", "promises nothing"),
    "encrypted": _stands("holds", "reads tokens", "holds", "reads tokens"),
    "split": _stands("holds", "reconstructs", "holds", "reconstructs"),
    "split-k": _stands("holds", "reconstructs", "holds", "reconstructs"),
    "trusted": _stands("holds", "only those trusted", "holds", "holds"),
}
"""A malicious broker can add a peer of its own, and then has what that peer has, unless peers must be endorsed."""
assert set(get_args(Adversary)) == set(ADVERSARIES)
