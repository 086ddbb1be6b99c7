"""The step under way at a training stage: what has arrived for it, how far it is, and which work it can do next.

`Microbatches` orders forwards, backwards and postponed weight gradients (1F1B with credit). `SharedSums` adds gradients
of parameters that several stages hold, once all microbatches are summed. `RetainedSteps` is what neighbours may need
for a replay. None of them holds a tensor.

Neighbours: `stage` is the machine that they are parts of; `exchanges` has the exchange with other jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.training.exchanges import NO_EXCHANGES, Exchanges
from fusionai.coordination.training.stage_interface import (
    BackwardArrived,
    DropRetained,
    ForwardArrived,
    SharedArrived,
    StageCommand,
    StageWork,
)
from fusionai.wire.messages import Mode

MAX_SIDE_HELD: Final = 1024
"""Most microbatches of evaluation and inference that may wait at once (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The stage's place in the pipeline."""

    stage: int
    microbatches: int
    """Microbatches of a step that cross this stage."""
    in_flight: int
    producers: Mapping[Mode, frozenset[int]]
    """Stages that must deliver before a forward may run, per mode; -1 is the data feed."""
    consumers: frozenset[int]
    """Stages that must return gradients before a backward may run: stages that read this one's values, and later stages
    to whose gradient sums it adds. Empty: the backward follows its forward at once."""
    gradients_to: frozenset[int] = frozenset()
    """Stages that receive gradients from this stage."""
    weight_lag: int = 0
    """Microbatches whose weight gradients may be postponed until this stage would otherwise be idle."""
    sums_of: frozenset[int] = frozenset()
    """Other stages holding a parameter (tied weights, replicas) whose gradients this stage adds once per step."""
    totals_to: frozenset[int] = frozenset()
    """Other stages holding a parameter whose gradients are summed here, once per step or with each microbatch."""
    summed_by: frozenset[int] = frozenset()
    """Stages that sum gradients of parameters held here, and send the totals."""
    parts_to: frozenset[int] = frozenset()
    """Stages of `summed_by` that wait for this stage's sums once per step."""
    replica: int = 0
    replicas: int = 1
    """Microbatch m of a step crosses the stages of replica m mod `replicas`."""
    exchanges: Exchanges = NO_EXCHANGES
    """Exchanges with other jobs that train the same model (local updates)."""

    @property
    def shares_with(self) -> frozenset[int]:
        return self.totals_to | self.summed_by

    @property
    def neighbours(self) -> frozenset[int]:
        """Stages that exchange tensors with this one, and the data feed."""
        return self.consumers.union(*self.producers.values(), self.gradients_to, self.shares_with)

    def local_index(self, microbatch: int) -> int | None:
        """Return the position of a microbatch among those that cross this stage; None if it crosses another replica."""
        index, foreign = divmod(microbatch - self.replica, self.replicas)
        return index if not foreign and 0 <= index < self.microbatches else None

    def microbatch(self, local_index: int) -> int:
        """Return the number in the step of the microbatch at this position."""
        return local_index * self.replicas + self.replica


@dataclass(slots=True)
class Microbatches:
    """Tensors received for the step under way and later ones, and the work on the step's microbatches. They are done in
    order, so that counts say which ones are."""

    shape: StageShape
    inputs: dict[tuple[Mode, int, int], set[int]] = field(default_factory=dict[tuple[Mode, int, int], set[int]])
    """(mode, step, microbatch) -> producers whose tensors have arrived, until the forward is done."""
    gradients: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])
    """(step, microbatch) -> consumers whose gradients have arrived, until the backward is done."""
    forwarded: int = 0
    returned: int = 0
    weighted: int = 0
    """Microbatches whose weight gradients are summed; equal to `returned` when none are postponed."""
    is_backward_last: bool = False
    """Whether the last forward or backward of this step was a backward."""

    @property
    def in_flight(self) -> int:
        """Microbatches forwarded and not yet returned, which the credit limits."""
        return self.forwarded - self.returned

    @property
    def are_summed(self) -> bool:
        return self.returned == self.weighted == self.shape.microbatches

    def lacks_input(self, event: ForwardArrived) -> bool:
        known = self.inputs.get((event.mode, event.step, event.microbatch), set())
        return event.producer in self.shape.producers.get(event.mode, ()) and event.producer not in known

    def lacks_gradient(self, event: BackwardArrived) -> bool:
        known = self.gradients.get((event.step, event.microbatch), set())
        return event.consumer in self.shape.consumers and event.consumer not in known

    def is_full(self, event: ForwardArrived | BackwardArrived) -> bool:
        """Return whether this begins another microbatch of evaluation or inference, and too many wait already."""
        if isinstance(event, BackwardArrived) or event.mode == "train":
            return False
        waiting = [key for key in self.inputs if key[0] != "train"]
        return (event.mode, event.step, event.microbatch) not in waiting and len(waiting) >= MAX_SIDE_HELD

    def keep(self, event: ForwardArrived | BackwardArrived) -> None:
        if isinstance(event, ForwardArrived):
            self.inputs.setdefault((event.mode, event.step, event.microbatch), set()).add(event.producer)
        else:
            self.gradients.setdefault((event.step, event.microbatch), set()).add(event.consumer)

    def begin(self, done: int) -> None:
        """Begin a step in which `done` microbatches are summed already: all after an attach that keeps them, or none.
        Nothing received is forgotten."""
        self.forwarded = self.returned = self.weighted = done
        self.is_backward_last = False

    def did(self, work: StageWork) -> None:
        match work.kind:
            case "forward":
                self.inputs.pop((work.mode, work.step, work.microbatch), None)
                self.forwarded += work.mode == "train"
                self.is_backward_last = False
            case "backward":
                self.gradients.pop((work.step, work.microbatch), None)
                self.returned += 1
                self.is_backward_last = True
                self.weighted += self.shape.weight_lag == 0
            case _:
                self.weighted += 1

    def next_work(self, step: int) -> StageWork | None:
        """Return a forward, a backward or postponed weight gradients. Backwards and forwards alternate as far as their
        inputs are there, within the credit. Otherwise a burst of backwards would delay what later stages wait for."""
        postponed, forward = self.returned - self.weighted, self.side_forward(step) or self._forward(step)
        number = self.shape.microbatch(self.weighted)
        weights = StageWork("weights", step=step, microbatch=number) if postponed else None
        if forward is not None and self.is_backward_last:
            return weights if postponed > self.shape.weight_lag else forward
        if backward := self._backward(step):
            return backward
        if postponed > self.shape.weight_lag or self.returned == self.shape.microbatches:
            return weights or forward
        return forward or weights

    def side_forward(self, step: int) -> StageWork | None:
        """Return evaluation or inference work for the present state, oldest first. It does not change the state."""
        for (mode, at_step, microbatch), arrived in self.inputs.items():
            if mode != "train" and at_step == step and self.shape.producers[mode] <= arrived:
                return StageWork("forward", step=step, microbatch=microbatch, mode=mode)
        return None

    def _forward(self, step: int) -> StageWork | None:
        """Return the next microbatch's forward, if its inputs are here and the credit is not used up."""
        if self.forwarded == self.shape.microbatches or self.in_flight >= self.shape.in_flight:
            return None
        number = self.shape.microbatch(self.forwarded)
        whole = self.shape.producers["train"] <= self.inputs.get(("train", step, number), set())
        return StageWork("forward", step=step, microbatch=number) if whole else None

    def _backward(self, step: int) -> StageWork | None:
        number = self.shape.microbatch(self.returned)
        whole = self.shape.consumers <= self.gradients.get((step, number), set())
        return StageWork("backward", step=step, microbatch=number) if self.in_flight and whole else None

    def forget_gradients(self, applied: int) -> None:
        """Drop gradients of steps that are applied."""
        self.gradients = {key: by for key, by in self.gradients.items() if key[0] >= applied}

    def forget_inputs(self, applied: int) -> bool:
        """Drop evaluation and inference requests for a state that no longer exists; return whether there were any."""
        past = [key for key in self.inputs if key[1] < applied]
        for key in past:
            del self.inputs[key]
        return bool(past)


@dataclass(slots=True)
class SharedSums:
    """Gradient sums of parameters that several stages hold: each sends its part to one stage, which returns totals."""

    shape: StageShape
    partials: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Step -> stages that have sent their part."""
    totals: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Step -> stages whose totals have arrived, including this stage once it has summed."""
    is_sent: bool = False
    """Whether this stage's part of the step under way is sent."""

    def lacks(self, event: SharedArrived) -> bool:
        totals = self.totals.get(event.step, set())
        if event.phase == "total":
            return event.sender in self.shape.summed_by - totals
        known = self.partials.get(event.step, set())
        return event.sender in self.shape.sums_of - known and self.shape.stage not in totals

    def keep(self, event: SharedArrived) -> None:
        received = self.partials if event.phase == "partial" else self.totals
        received.setdefault(event.step, set()).add(event.sender)

    def next_work(self, step: int) -> StageWork | None:
        """When all microbatches are summed: add up shared gradients, then compute norms."""
        if self.shape.parts_to and not self.is_sent:
            return StageWork("share", step=step)
        totals = self.totals.get(step, set())
        if self.shape.totals_to and self.shape.stage not in totals:
            complete = self.partials.get(step, set()) >= self.shape.sums_of
            return StageWork("total", step=step) if complete else None
        return StageWork("norms", step=step) if totals >= self.shape.summed_by else None

    def begin(self, applied: int, *, keep_sums: bool) -> None:
        """Begin a step, with all its sums complete after an attach that keeps them."""
        self.partials = {step: by for step, by in self.partials.items() if step >= applied}
        self.totals = {step: by for step, by in self.totals.items() if step >= applied}
        if keep_sums:
            self.totals[applied] = {self.shape.stage, *self.shape.summed_by}
        self.is_sent = keep_sums


@dataclass(slots=True)
class RetainedSteps:
    """Steps whose sent tensors are kept for a neighbour's replay."""

    is_wanted: bool = False
    """Whether tensors are retained when they are sent."""
    watermark: int = 0
    """What was sent in earlier steps is dropped."""
    whole_from: int = 0
    """Everything sent in this step and later ones is retained."""

    def sent(self, step: int) -> None:
        """A training forward of this step has sent its tensors on."""
        if not self.is_wanted:
            self.whole_from = max(self.whole_from, step + 1)

    def raise_watermark(self, watermark: int) -> list[StageCommand]:
        if watermark <= self.watermark:
            return []
        self.watermark = watermark
        self.whole_from = max(self.whole_from, watermark)
        return [DropRetained(watermark)]
