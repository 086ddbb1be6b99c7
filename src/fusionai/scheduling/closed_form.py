"""Steps and passes of equal stages in closed form, from plain numbers. Decides nothing; knows no device and no model.

    hop  = compute + transfer + 2 * latency
    step = M * (compute + transfer) + (P - 1) * hop + sync         sending and computing in turn
    step = the longest of, sending beside computing:
           M * compute + (P - 1) * hop                             the last stage never rests
           (M - 1) * larger + (P - 1) * hop + compute              the first uplink, or the last
           M * transfer + (P - 2) * hop + forward - gradient       an inner uplink
           sync

An inner stage's uplink carries the activation of one microbatch and the gradient of another: `transfer` is both, and
`larger` the larger of them. It begins a hop earlier than the last stage, and ends with the gradient that it sends last.
Where sending is hidden, so is the synchronisation of replicas: it then counts only where it takes longer than the rest.
The terms are public so that a discrete-event run can be given the same numbers and held against the same result.

Neighbours: `analysis` derives the terms from models, devices and links; `pipeline` has the formulas of unequal stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

Limit = Literal["compute", "links", "latency", "synchronisation", "memory bandwidth", "one trip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTerms:
    """One training step of `replicas` equal pipelines. Seconds are those of one microbatch on one stage or hop."""

    stages: int
    replicas: int
    microbatches: int
    """Of one replica."""
    forward_s: float
    backward_s: float
    """With the recomputation, if there is one."""
    activation_s: float
    gradient_s: float
    latency_s: float
    """One way."""
    sync_s: float
    """Of a stage's gradients (or of what local updates exchange) among replicas, per step."""
    overlapped: bool

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def transfer_s(self) -> float:
        return self.activation_s + self.gradient_s

    @property
    def uplink_s(self) -> float:
        """What the busiest uplink carries of one microbatch."""
        return self.transfer_s if self.stages > 2 else max(self.activation_s, self.gradient_s)

    @property
    def hop_s(self) -> float:
        return self.compute_s + self.transfer_s + 2 * self.latency_s

    @property
    def period_s(self) -> float:
        if self.overlapped:
            return max(self.compute_s, self.uplink_s)
        return self.compute_s + self.transfer_s

    @property
    def fill_s(self) -> float:
        """The first microbatch's way there and back, over what the last stage computes of it."""
        return (self.stages - 1) * self.hop_s

    @property
    def pipeline_s(self) -> float:
        """A step without synchronisation."""
        if not self.overlapped:
            return self.microbatches * self.period_s + self.fill_s
        larger_s = max(self.activation_s, self.gradient_s)
        found_s = (
            max(self.microbatches * self.compute_s, (self.microbatches - 1) * larger_s + self.compute_s) + self.fill_s
        )
        if self.stages > 2:
            nearer_s = self.fill_s - self.hop_s + self.forward_s - self.gradient_s
            found_s = max(found_s, self.microbatches * self.transfer_s + nearer_s)
        return found_s

    @property
    def step_s(self) -> float:
        return max(self.pipeline_s, self.sync_s) if self.overlapped else self.pipeline_s + self.sync_s

    @property
    def in_flight(self) -> int:
        """Microbatches the first stage must keep for the formulas to hold. A round trip's worth and two hide the links
        as long as nothing waits in turn; where links or stages are nearly as slow as each other, much does, and twice
        the round trip's worth is what discrete-event runs need to stay within 4 % of the formula (once: up to
        half slower)."""
        return min(self.microbatches, 2 * ceil(self.fill_s / self.period_s) + 2)

    @property
    def limit(self) -> Limit:
        """What the largest part of a step is spent on."""
        parts: dict[Limit, float] = {
            "synchronisation": self.sync_s,
            "compute": self.microbatches * self.compute_s,
            "links": self.microbatches * (self.uplink_s if self.overlapped else self.transfer_s),
            "latency": self.fill_s,
        }
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTerms:
    """All resident sessions of `replicas` equal pipelines get one token a round. `passes` of `rows` sessions (or of
    so many positions of a sequence) are in flight; seconds are those of one pass on one stage or hop. `hops`: with the
    way back to the first stage, one fewer where nothing goes back."""

    stages: int
    replicas: int
    passes: int
    rows: float
    weights_s: float
    """Reading the stage's weights and the cache of the pass from memory."""
    compute_s: float
    overhead_s: float
    transfer_s: float
    latency_s: float
    hops: int

    @property
    def sessions(self) -> int:
        """Of one replica."""
        return round(self.passes * self.rows)

    @property
    def returns(self) -> bool:
        """Whether the last stage's result goes to the first one. A lone stage has it already."""
        return self.hops >= self.stages or self.stages == 1

    @property
    def stage_s(self) -> float:
        return max(self.weights_s, self.compute_s) + self.overhead_s

    @property
    def trip_s(self) -> float:
        """Of one pass through all stages and back: no session gets a token sooner (Little's law)."""
        return self.stages * self.stage_s + self.hops * (self.latency_s + self.transfer_s)

    @property
    def round_s(self) -> float:
        return max(self.trip_s, self.passes * max(self.stage_s, self.transfer_s))

    @property
    def tokens_per_s(self) -> float:
        return self.replicas * self.passes * self.rows / self.round_s

    @property
    def limit(self) -> Limit:
        if self.hops and self.passes * max(self.stage_s, self.transfer_s) <= self.trip_s * (1 + 1e-9):
            hop_parts: dict[Limit, float] = {
                "latency": self.hops * self.latency_s,
                "links": self.hops * self.transfer_s,
                "one trip": self.stages * self.stage_s,
            }
            return max(hop_parts, key=lambda part: hop_parts[part])
        if self.transfer_s > self.stage_s:
            return "links"
        return "compute" if self.compute_s > self.weights_s else "memory bandwidth"
