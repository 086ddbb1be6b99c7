"""What an audit found, as data: figures per boundary, defence and attack. Decides which figures may stand alone: none
but the white-box one. Loads no framework.

A weak attack proves nothing: a learned probe may find a tenth where all is there to be found. So `Boundary` can't be
made without its white-box recovery, and everything else stands beside that. Neighbours: the attacks make these,
`measured` reads the shipped ones, `cli.audit_view` prints them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

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
"""White-box: every token of the vocabulary tried after the true text before it. Recovered prefix: the same after the
tokens found so far. Template, known text: the same, with what the peer learned from a text it knows, by Mahalanobis
distance and with the model's own expectation. Nearest: the embedding that is most alike. Ridge, inverter: learned, in
closed form and by a small transformer. Optimisation: embeddings fitted by gradient descent. Pooled: as template, with
the boundaries of all depths. Gradients: which tokens a weight's update was made of."""
AuditAttack = Literal["nearest", "inverter", "prefix", "calibrated", "optimisation", "pooled", "gradients"]
"""What can be asked for; the white-box attack always runs."""
Share = Annotated[float, Meta(ge=0, le=1)]
CONTROL: Final = 0.99
"""A positive control must recover so much."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What an attack took. `forward_tokens`: tokens through the model, or a part of it, tried or differentiated;
    `auxiliary_tokens`: text of the attacker's own, to learn from; `known_tokens`: of the victim's text, known."""

    forward_tokens: int
    seconds: float
    auxiliary_tokens: int = 0
    known_tokens: int = 0


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What one attack recovered. `low`, `high`: 95 % interval of `top1` (Wilson, over tokens). `secrets`: planted
    strings, of which `secrets_found` came back exactly."""

    attack: Attack
    tokens: int
    top1: Share
    low: Share
    high: Share
    rouge_l: Share
    secrets: int
    secrets_found: int
    budget: Budget


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer sees after `depth` blocks where `defence` is in force, and what it recovered. `loss`: of the model
    on held-out text, in nats a token, with the boundary so."""

    depth: int
    defence: str
    loss: float
    white_box: Recovery
    others: tuple[Recovery, ...] = ()

    def __post_init__(self) -> None:
        if self.white_box.attack != "white-box" or any(one.attack == "white-box" for one in self.others):
            raise ValueError("a boundary has one white-box recovery, and others beside it")

    @property
    def worst(self) -> Recovery:
        """The attack that recovered most."""
        return max((self.white_box, *self.others), key=lambda one: one.top1)


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What was recovered of the texts that an update of a weight was made from. `width`: inputs of that weight; of
    more tokens than that, its gradient does not say which they were."""

    texts: int
    tokens: int
    width: int
    form: str
    recovery: Recovery


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """An attack where it can't fail: if it does, the audit says nothing."""

    name: str
    got: Share
    wanted: Share = CONTROL

    @property
    def passed(self) -> bool:
        return self.got >= self.wanted


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The model that was attacked. `loss`: on held-out text, nats a token."""

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
    """The texts that were to be recovered: each begins with a known template of `template_tokens`, then come
    `private_tokens`. `chance`: top-1 of always saying the commonest token."""

    texts: int
    template_tokens: int
    private_tokens: int
    chance: Share


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """A whole audit. `local_blocks`: so many of the first stayed at home where a secret prefix was audited."""

    date: str
    command: str
    versions: dict[str, str]
    machine: str
    seconds: float
    subject: Subject
    trial: Trial
    local_blocks: int
    boundaries: tuple[Boundary, ...]
    updates: tuple[Update, ...]
    controls: tuple[Control, ...]

    @property
    def void(self) -> bool:
        """A positive control failed, or there was none: no figure of this audit counts."""
        return not self.controls or not all(control.passed for control in self.controls)

    @property
    def defences(self) -> tuple[str, ...]:
        """In the order of the audit."""
        return tuple(dict.fromkeys(boundary.defence for boundary in self.boundaries))

    @property
    def depths(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({boundary.depth for boundary in self.boundaries}))

    def at(self, defence: str, depth: int) -> Boundary | None:
        """None where nothing leaves the job owner, or was not audited."""
        return next((one for one in self.boundaries if one.defence == defence and one.depth == depth), None)
