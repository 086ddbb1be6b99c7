"""Closed-form time of a training step and of a serving pass over equal stages, from plain numbers.

    hop  = compute + transfer + 2 * latency
    step = M * (compute + transfer) + (P - 1) * hop + sync         if sending and computing alternate
    step = the longest of these, if sending overlaps computing:
           M * compute + (P - 1) * hop                             the last stage is never idle
           (M - 1) * larger + (P - 1) * hop + compute              the first uplink, or the last
           M * transfer + (P - 2) * hop + forward - gradient       an inner uplink
           sync

An inner stage's uplink carries the activation of one microbatch and the gradient of another: `transfer` is both, and
`larger` the larger of them. It begins a hop earlier than the last stage, and ends with the gradient that it sends last.
If sending is hidden, so is the synchronisation of replicas: it counts only if it takes longer than the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

Limit = Literal["compute", "links", "latency", "synchronisation", "memory bandwidth", "one trip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTerms:
    """One training step of `replicas` equal pipelines. Seconds are per microbatch on one stage or hop."""

    stages: int
    replicas: int
    microbatches: int
    """Microbatches of one replica in a step."""
    forward_s: float
    backward_s: float
    """Backward pass, including recomputation if there is any."""
    activation_s: float
    gradient_s: float
    latency_s: float
    """Latency in one direction."""
    sync_s: float
    """Time per step in which replicas exchange a stage's gradients (or the tensors of local updates)."""
    overlapped: bool

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def transfer_s(self) -> float:
        return self.activation_s + self.gradient_s

    @property
    def uplink_s(self) -> float:
        """Sending time of one microbatch on the busiest uplink."""
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
        """Time the first microbatch needs to the last stage and back, without the last stage's computing."""
        return (self.stages - 1) * self.hop_s

    @property
    def pipeline_s(self) -> float:
        """Duration of a step without synchronisation."""
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
        """Microbatches the first stage must keep in flight for the formulas to hold. One round trip's worth plus two
        hides the links if nothing queues. If links or stages are nearly equally slow, microbatches do queue: in
        discrete-event runs twice the round trip's worth stayed within 4 % of the formula, a single round trip's worth
        was up to half slower."""
        return min(self.microbatches, 2 * ceil(self.fill_s / self.period_s) + 2)

    @property
    def limit(self) -> Limit:
        """The resource that takes the largest part of a step."""
        parts: dict[Limit, float] = {
            "synchronisation": self.sync_s,
            "compute": self.microbatches * self.compute_s,
            "links": self.microbatches * (self.uplink_s if self.overlapped else self.transfer_s),
            "latency": self.fill_s,
        }
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTerms:
    """Decoding round of `replicas` equal pipelines, in which every resident session gets one token. `passes` passes are
    in flight, each with `rows` sessions (or `rows` positions of a sequence). Seconds are per pass on one stage or hop.
    `hops`: hops of a pass, including the one back to the first stage if there is one."""

    stages: int
    replicas: int
    passes: int
    rows: float
    weights_s: float
    """Time to read the stage's weights and the cache of the pass from memory."""
    compute_s: float
    overhead_s: float
    transfer_s: float
    latency_s: float
    hops: int

    @property
    def sessions(self) -> int:
        """Resident sessions of one replica."""
        return round(self.passes * self.rows)

    @property
    def returns(self) -> bool:
        """True if the first stage gets the last stage's result; a single stage has it already."""
        return self.hops >= self.stages or self.stages == 1

    @property
    def stage_s(self) -> float:
        return max(self.weights_s, self.compute_s) + self.overhead_s

    @property
    def trip_s(self) -> float:
        """Time of one pass through all stages and back: the least time between two tokens of a session."""
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
