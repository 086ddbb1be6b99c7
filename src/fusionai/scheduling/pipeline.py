"""The cost model of a pipeline on unequal peers. Decides how long a step takes; chooses nothing.

A pipeline is grown from its last stage towards its first, because all that a stage needs to know lies downstream: the
next peer, the round trip of a microbatch below it (its memory for microbatches in flight) and how many stages follow.

    step = (M - 1) * period + transit + commit (+ sync, 0 for one replica)
    transit  = sum of compute over stages + sum over hops of (activation + gradient transfer + both latencies)
    commit   = from the first stage to the job owner and back: the word that the step is complete (see `commit`)
    period   = max over stages of compute, uplink and downlink occupancy, exceptional links' transfer, credit
    credit_k = round trip of stage k / microbatches its memory holds, where that is fewer than M (Little's law)

For equal stages this is M*tau + (P-1)(t_c + t_n + 2a), and the commit. Microbatches in flight at stage k: what
`credits` says, at most M and what memory holds. Not modelled: what the feed sends, jitter.

Neighbours: `chain` (costs of ranges), `links` (hops), `credits`, `search` and `improvement` (grow pipelines),
`planner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from math import floor
from typing import Final, NamedTuple

from fusionai.scheduling.chain import Chain
from fusionai.scheduling.credits import SPARE, credits_needed
from fusionai.scheduling.ends import ends_of, front_of, tail_chain
from fusionai.scheduling.levers import flops_per_s
from fusionai.scheduling.links import Hop, hops
from fusionai.scheduling.pins import Pins
from fusionai.scheduling.types import PeerProfile, Problem
from fusionai.wire.codecs import Codec


class Suffix(NamedTuple):
    """The stages from `start` to the end. Smaller is better in each of the four times, all else equal."""

    start: int
    """Position of the first block."""
    head: int
    """Index of the first stage's peer; `Pipeline.owner` for the owner's loss stage."""
    stages: int
    """With the owner's."""
    period_s: float
    transit_s: float
    """With the commit, where it is the whole pipeline."""
    up_s: float
    """Occupancy of the head's uplink so far (its downstream side)."""
    down_s: float
    held: int
    """Microbatches the head's memory holds, at most M."""
    compute_s: float
    """Of the head."""
    rest: Suffix | None


EMPTY_HEAD: Final = -1
"""Head of the empty suffix when the loss is in the pool: nothing lies downstream."""
LOSS_IN_FLIGHT: Final = 2
"""What the last stage needs: one microbatch in work, one waiting."""


def fastest_first(peers: Iterable[PeerProfile]) -> list[PeerProfile]:
    """An order that does not depend on how they were listed."""
    return sorted(peers, key=lambda p: (-p.effective_flops_per_s, p.peer))


class Pipeline:
    """Problem restricted to usable peers, in an order that does not depend on how they were listed."""

    def __init__(self, problem: Problem, peers: Sequence[PeerProfile]) -> None:
        owner = problem.owner
        self.problem = problem
        self.microbatches = problem.microbatches
        self.peers = fastest_first(peers)
        self.owner = len(self.peers)
        self.everyone = [*self.peers, *([] if owner is None else [owner])]
        everyone = self.everyone
        ends = ends_of(problem)
        blocks = problem.blocks[: len(problem.blocks) - ends.last]
        self.chain = Chain(problem, blocks)
        self.loss = tail_chain(problem)
        """The owner's last blocks."""
        self.front = front_of(problem, self.peers)
        """The peer that is the owner's machine with its first blocks."""
        self._front_cut = ends.first
        # The owner's last stage keeps what it has.
        self.speed = [flops_per_s(p, self.chain.levers) for p in self.peers]
        self.speed += [p.effective_flops_per_s for p in everyone[self.owner :]]
        self.up, self.down = self._access()
        self._hops = hops(everyone, problem.links)
        self.commit_s = [
            0.0 if owner is None else row[self.owner].latency_s + self._hops[self.owner][index].latency_s
            for index, row in enumerate(self._hops)
        ]
        """Of a pipeline whose first stage is there."""
        self.memory_bytes = [float(p.memory_bytes) for p in everyone]
        self._pins = Pins(problem.pinned, blocks, self.peers, only=self.front)
        # The owner's machine may lend itself as a peer too: then the loss stage takes its part of both.
        self._busy_s = [0.0] * len(everyone)
        self.owner_id = None if owner is None else owner.peer
        self.owner_memory_bytes = 0 if owner is None else owner.memory_bytes
        self.tail = self._tail()
        chain = self.chain
        length = chain.length
        self.resident = [
            [chain.resident_bytes(a, b) if a < b else 0.0 for b in range(length + 1)] for a in range(length)
        ]
        self.flight = [
            [chain.in_flight_bytes(a, b) if a < b else 0.0 for b in range(length + 1)] for a in range(length)
        ]
        self._flops = [[chain.flops(a, b) if a < b else 0.0 for b in range(length + 1)] for a in range(length)]

    def extend(self, suffix: Suffix, peer: int, start: int) -> Suffix | None:
        """Put a stage [start, suffix.start) on `peer` before `suffix`. None if its memory can't hold it."""
        end, head = suffix.start, suffix.head
        held = self.held(peer, start, end)
        if held < min(self.microbatches, suffix.stages + 1):
            return None
        compute_s = self.compute_s(peer, start, end)
        transit_s = suffix.transit_s + compute_s
        period_s = max(suffix.period_s, compute_s + self._busy_s[peer])
        up_s = down_s = 0.0
        if head != EMPTY_HEAD:
            forward, backward = self._hops[peer][head], self._hops[head][peer]
            forward_bytes, gradient_bytes = self.chain.forward_bytes[end], self.chain.gradient_bytes[end]
            forward_s = forward_bytes / forward.bandwidth_bytes_per_s
            backward_s = gradient_bytes / backward.bandwidth_bytes_per_s
            transit_s += forward_s + backward_s + forward.latency_s + backward.latency_s
            head_up_s, head_down_s = suffix.up_s, suffix.down_s
            if forward.shared:
                up_s = forward_bytes / self.up[peer]
                head_down_s += forward_bytes / self.down[head]
            if backward.shared:
                down_s = gradient_bytes / self.down[peer]
                head_up_s += gradient_bytes / self.up[head]
            period_s = max(period_s, forward_s, backward_s, up_s, down_s, head_up_s, head_down_s)
        if held < self.microbatches:
            period_s = max(period_s, transit_s / held)
        if start == 0:
            transit_s += self.commit_s[peer]
        return Suffix(start, peer, suffix.stages + 1, period_s, transit_s, up_s, down_s, held, compute_s, suffix)

    def fold(self, order: Sequence[int], cuts: Sequence[int]) -> Suffix | None:
        """The pipeline of `order[k]` holding [cuts[k], cuts[k + 1]); `cuts` runs from 0 to the chain's length."""
        suffix: Suffix | None = self.tail
        for index in range(len(order) - 1, -1, -1):
            suffix = self.extend(suffix, order[index], cuts[index])
            if suffix is None:
                return None
        return suffix

    def step_s(self, suffix: Suffix) -> float:
        return (self.microbatches - 1) * suffix.period_s + suffix.transit_s

    def compute_s(self, peer: int, start: int, end: int) -> float:
        return self._flops[start][end] / self.speed[peer]

    def held(self, peer: int, start: int, end: int) -> int:
        """Microbatches in flight that fit beside the stage's resident bytes, at most M; negative if not even those, or
        if a pin is in the way."""
        free = self.memory_bytes[peer] - self.resident[start][end]
        flight = self.flight[start][end]
        if free < 0 or not self._pins.allow(peer, start, end):
            return -1
        return self.microbatches if flight * self.microbatches <= free else floor(free / flight)

    @property
    def pinned(self) -> bool:
        """Whether any block must lie with a certain peer."""
        return bool(self._pins.peers)

    def allowed(self, peer: int, start: int, end: int) -> bool:
        """Whether no pin is in the way."""
        return self._pins.allow(peer, start, end)

    def in_flight(self, best: Suffix) -> tuple[int, ...]:
        """Microbatches in flight per stage, first to last, the owner's among them: as many as keep the closed form's
        period (see `credits`), as far as there are so many and memory holds them."""
        stages = [*self.pool_stages(best), *([] if self.loss is None else [self.tail])]
        if not best.period_s > 0:
            return tuple(min(stage.held, self.microbatches) for stage in stages)
        compute_s = [stage.compute_s + self._busy_s[stage.head] for stage in stages]
        away_s = [
            self.hop_s(one.head, other.head, other.start) + self._crossing_s(one.head, other.head, other.start)
            for one, other in pairwise(stages)
        ]
        needed = credits_needed(compute_s, away_s, best.period_s)
        return tuple(min(stage.held, self.microbatches, count) for stage, count in zip(stages, needed, strict=True))

    def pool_stages(self, suffix: Suffix) -> Iterator[Suffix]:
        """First stage first, without the owner's."""
        stage: Suffix | None = suffix
        while stage is not None and stage is not self.tail:
            yield stage
            stage = stage.rest

    def transfer_s(self, upstream: int, downstream: int, cut: int) -> float:
        """Activation and gradient of one microbatch over `cut`, without latency."""
        forward, backward = self._hops[upstream][downstream], self._hops[downstream][upstream]
        seconds = self.chain.forward_bytes[cut] / forward.bandwidth_bytes_per_s
        return seconds + self.chain.gradient_bytes[cut] / backward.bandwidth_bytes_per_s

    def with_codecs(self, codecs: Mapping[int, Codec], cuts: Sequence[int]) -> Pipeline:
        """The same for stages between `cuts`, what crosses behind these blocks packed so."""
        other = copy(self)
        other.chain = self.chain.with_codecs(codecs)
        other.up, other.down = other._access()
        other.flight = [row[:] for row in self.flight]
        for start, end in pairwise(cuts):
            other.flight[start][end] = other.chain.in_flight_bytes(start, end)
        return other

    def _crossing_s(self, upstream: int, downstream: int, cut: int) -> float:
        """What both transfers wait at most for others on shared access links, which serve all evenly: activations and
        gradients of the stage's other neighbour, taken to be as large as these."""
        forward, backward = self._hops[upstream][downstream], self._hops[downstream][upstream]
        if not (forward.shared and backward.shared):
            return 0.0
        return 2 * min(
            self.chain.forward_bytes[cut] / forward.bandwidth_bytes_per_s,
            self.chain.gradient_bytes[cut] / backward.bandwidth_bytes_per_s,
        )

    def hop_s(self, upstream: int, downstream: int, cut: int) -> float:
        """`transfer_s` and both latencies."""
        latency_s = self._hops[upstream][downstream].latency_s + self._hops[downstream][upstream].latency_s
        return self.transfer_s(upstream, downstream, cut) + latency_s

    def hop(self, sender: int, receiver: int) -> Hop:
        return self._hops[sender][receiver]

    def busy_s(self, peer: int) -> float:
        """Of the peer's time per microbatch, what the owner's loss stage on the same machine takes."""
        return self._busy_s[peer]

    def access_s(self, peer: int, start: int, end: int) -> float:
        """Occupancy of the busier direction of the peer's access link by stage [start, end)."""
        chain = self.chain
        # Without an owner's loss stage nothing crosses the last cut.
        last = end == chain.length and self.loss is None
        up = chain.gradient_bytes[start] + (0.0 if last else chain.forward_bytes[end])
        down = chain.forward_bytes[start] + (0.0 if last else chain.gradient_bytes[end])
        return max(up / self.up[peer], down / self.down[peer])

    def access_only(self, peer: int) -> bool:
        """Whether every transfer of the peer takes its access link, whoever is next to it."""
        others = [i for i in range(len(self._hops)) if i != peer]
        return all(self._hops[peer][i].shared and self._hops[i][peer].shared for i in others)

    def alike(self, one: int, other: int) -> bool:
        """Whether two peers can be exchanged without changing any cost."""
        if not (self.access_only(one) and self.access_only(other)) or self._pins.peers & {one, other}:
            return False
        a, b = self.peers[one], self.peers[other]
        speed = self.speed[one] == self.speed[other]
        return speed and (a.memory_bytes, a.uplink, a.downlink) == (b.memory_bytes, b.uplink, b.downlink)

    def loss_bytes(self, in_flight: int) -> float:
        """Memory of the owner's loss stage; its input (usually the logits) is what counts."""
        if self.loss is None:
            return 0.0
        return self.loss.resident_bytes(0, self.loss.length) + in_flight * self._loss_flight_bytes(self.loss)

    def _loss_flight_bytes(self, loss: Chain) -> float:
        cut = self.chain.length
        return loss.in_flight_bytes(0, loss.length) + self.chain.forward_bytes[cut] + self.chain.gradient_bytes[cut]

    def _access(self) -> tuple[list[float], list[float]]:
        """Bandwidth of everybody's access link, up and down, for what its stage sends. The owner's line carries both
        ends' tensors: for its first stage it is by so much narrower as the last one takes of it."""
        up = [p.uplink.bandwidth_bytes_per_s for p in self.everyone]
        down = [p.downlink.bandwidth_bytes_per_s for p in self.everyone]
        if self.front is not None and self.loss is not None:
            forward, gradient = self.chain.forward_bytes, self.chain.gradient_bytes
            first, last = self._front_cut, self.chain.length
            if forward[first] > 0:
                up[self.front] *= forward[first] / (forward[first] + gradient[last])
            if gradient[first] > 0:
                down[self.front] *= gradient[first] / (gradient[first] + forward[last])
        return up, down

    def _tail(self) -> Suffix:
        end = self.chain.length
        if self.loss is None:
            return Suffix(end, EMPTY_HEAD, 0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, None)
        compute_s = self.loss.flops(0, self.loss.length) / self.speed[self.owner]
        free = self.memory_bytes[self.owner] - self.loss_bytes(0)
        flight = self._loss_flight_bytes(self.loss)
        held = self.microbatches if flight * self.microbatches <= free else floor(free / flight)
        if self.front is not None:
            held = min(held, LOSS_IN_FLIGHT + SPARE)  # what is more is the first stage's
        for index, peer in enumerate(self.peers):
            if peer.peer == self.owner_id:
                self._busy_s[index] = compute_s
                kept = held if index == self.front else min(held, LOSS_IN_FLIGHT)
                self.memory_bytes[index] -= self.loss_bytes(min(kept, self.microbatches))
        return Suffix(end, self.owner, 1, compute_s, compute_s, 0.0, 0.0, held, compute_s, None)
