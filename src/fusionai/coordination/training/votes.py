"""Losses and gradient norms that the driver of a training job collects until a step can be committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusionai.wire.messages import CommitRecord


@dataclass(slots=True)
class Votes:
    """A vote is the gradient norms of one stage for one step. It can't be changed."""

    losses: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    """Step -> microbatch -> loss."""
    norms: dict[int, dict[int, Mapping[str, float]]] = field(default_factory=dict[int, dict[int, Mapping[str, float]]])
    """Step -> stage -> norm by parameter."""
    history: dict[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    """Gradient norms of official steps that may be replayed, to check the replay against."""
    deciding: bool = False
    """Whether the scale of the present step is being computed from the votes."""
    journalling: CommitRecord | None = None
    """Commit that is on its way to the journal."""

    def all_norms(self, step: int) -> dict[str, float]:
        return {key: norm for norms in self.norms[step].values() for key, norm in norms.items()}

    def step_losses(self, step: int) -> tuple[float, ...]:
        """Return the losses of a complete step in the order of its microbatches."""
        losses = self.losses[step]
        return tuple(losses[index] for index in range(len(losses)))

    def discard(self) -> None:
        """Drop the votes of all steps except for a commit that is being journalled, because a round begins."""
        kept = set[int]() if self.journalling is None else {self.journalling.step}
        self.losses = {step: losses for step, losses in self.losses.items() if step in kept}
        self.norms = {step: norms for step, norms in self.norms.items() if step in kept}
        self.deciding = False

    def make_official(self, step: int) -> None:
        """Keep the norms of a committed step for a replay, and drop its votes."""
        self.history[step] = self.all_norms(step)
        self.losses.pop(step, None)
        self.norms.pop(step, None)
