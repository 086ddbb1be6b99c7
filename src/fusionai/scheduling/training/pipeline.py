"""The cost model of a training pipeline on unequal peers: how long a step takes. It chooses no placement.

A pipeline is built from its last stage towards its first, because a stage's costs depend only on what lies downstream:
the next peer, the round trip of a microbatch below it (which sets the memory for microbatches in flight) and the number
of stages that follow.

    step = (M - 1) * period + transit + commit + update (+ sync, 0 for one replica)
    transit  = sum of compute over stages + sum over hops of (activation + gradient transfer + both latencies)
    commit   = latency from the first stage to the job owner and back, to report the step complete (see `prediction`)
    period   = max over stages of compute, uplink and downlink occupancy, exceptional links' transfer, credit
    credit_k = round trip of stage k / microbatches its memory holds, where that is fewer than M (Little's law)
    update   = the longest time a stage reads and writes files after a step, if its levers keep data in files

Each stage works in one of several ways (`levers`: recomputing activations, optimizer state or weights in files). The
way sets the stage's compute, memory and update. `fold` finds the ways that make the step of given stages shortest.

For equal stages the step is M*tau + (P-1)(t_c + t_n + 2a), plus the commit. The microbatches in flight at stage k are
those that `credits_needed` computes, at most M and at most what memory holds. The data feed's transfers and jitter are
not modelled.

`problem.chain` has the costs of block ranges by way, and `problem.links` the hops. `search` and `improvement` build
pipelines with this model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from math import ceil, floor
from typing import Final, NamedTuple

import numpy as np

from fusionai.scheduling.kernels.training_pipeline import CostTables
from fusionai.scheduling.problem.chain import Chain, stage_tables
from fusionai.scheduling.problem.constraints import Pins
from fusionai.scheduling.problem.embedding_and_head import embedding_and_head_of, front_of, tail_chain
from fusionai.scheduling.problem.levers import (
    choices_of_problem,
    file_bytes_per_s,
    flops_per_s,
    inability,
    weights_bytes_per_s,
)
from fusionai.scheduling.problem.links import DirectedLink, hop
from fusionai.scheduling.problem.types import PeerProfile, Problem
from fusionai.wire.codecs import Codec


class Suffix(NamedTuple):
    """The stages from block `start` to the end of the pipeline. Of two suffixes with equal other fields, the one with
    the smaller period, transit, update and link occupancies is better."""

    start: int
    """Position of the first block."""
    head: int
    """Index of the first stage's peer; `Pipeline.owner` for the owner's loss stage."""
    stages: int
    """Number of stages, the owner's loss stage included."""
    period_s: float
    transit_s: float
    """Includes the commit if the suffix is the whole pipeline."""
    up_s: float
    """Seconds per microbatch that the head's uplink is occupied by its downstream side."""
    down_s: float
    held: int
    """Microbatches in flight that fit into the head's memory, at most M."""
    compute_s: float
    """Compute time of the head stage, in seconds per microbatch."""
    rest: Suffix | None
    update_s: float = 0.0
    """Longest time any stage reads and writes files after a step."""
    way: int = 0
    """How the head fits its memory: index into `Pipeline.ways`."""


EMPTY_HEAD: Final = -1
"""Head of the empty suffix when the loss is in the pool: nothing lies downstream."""
LOSS_IN_FLIGHT: Final = 2
"""Microbatches in flight that the last stage needs: one computing, one waiting."""


def fastest_first(peers: Iterable[PeerProfile]) -> list[PeerProfile]:
    """Return the peers by descending speed, ties by id, whatever order they were listed in."""
    return sorted(peers, key=lambda p: (-p.effective_flops_per_s, p.peer))


class Pipeline:
    """Costs of a problem's stages and hops on the usable peers, in an order that does not depend on how they were
    listed."""

    def __init__(self, problem: Problem, peers: Sequence[PeerProfile]) -> None:
        owner = problem.owner
        self.problem = problem
        self.microbatches = problem.microbatches
        self.peers = fastest_first(peers)
        self.owner = len(self.peers)
        self.everyone = [*self.peers, *([] if owner is None else [owner])]
        everyone = self.everyone
        ends = embedding_and_head_of(problem)
        blocks = problem.blocks[: len(problem.blocks) - ends.last]
        self.chain = Chain(problem, blocks)
        self.loss = tail_chain(problem)
        """Chain of the owner's last blocks; None if the loss is in the pool."""
        self.front = front_of(problem, self.peers)
        """Index of the peer that stands for the owner's machine with its first blocks; None if there is none."""
        self._front_cut = ends.first
        self.ways = choices_of_problem(problem)
        """Ways a stage may use to fit its memory."""
        self.tables = stage_tables(self.chain, self.ways)
        self.able = [[inability(way, peer) is None for way in self.ways] for peer in self.peers]
        self.speed = [peer.effective_flops_per_s for peer in everyone]
        self.pace = [[flops_per_s(peer, way) for way in self.ways] for peer in self.peers]
        """FLOP/s by peer and way."""
        self.away_bytes_per_s = [weights_bytes_per_s(peer) for peer in self.peers]
        self.file_bytes_per_s = [file_bytes_per_s(peer) for peer in self.peers]
        self.owner_id = None if owner is None else owner.peer
        self.up, self.down = self._access()
        self._hops: dict[tuple[int, int], DirectedLink] = {}
        self._special = {end for key in problem.links for end in key.split(">")}
        self.commit_s = [
            0.0 if owner is None else self.hop(index, self.owner).latency_s + self.hop(self.owner, index).latency_s
            for index in range(len(everyone))
        ]
        """Commit time by the machine that holds the first stage."""
        self.memory_bytes = [float(p.memory_bytes) for p in everyone]
        self._pins = Pins(problem.pinned, blocks, self.peers, only=self.front)
        # The owner's machine may also be a peer. The loss stage then takes part of its time and memory.
        self._busy_s = [0.0] * len(everyone)
        self.owner_memory_bytes = 0 if owner is None else owner.memory_bytes
        self.tail = self._tail()
        tables = self.tables
        # Python lists: single elements are read faster than from numpy arrays.
        self._resident: list[list[list[float]]] = tables.resident_bytes.tolist()
        self._flight: list[list[list[float]]] = tables.flight_bytes.tolist()
        self._flops: list[list[list[float]]] = tables.flops.tolist()
        self._needless = [int(mask) for mask in tables.needless]

    def extend(self, suffix: Suffix, peer: int, start: int, way: int) -> Suffix | None:
        """Return `suffix` with a stage [start, suffix.start) on `peer` before it; None if it does not fit its memory
        that way."""
        end, head = suffix.start, suffix.head
        held = self.held(peer, start, end, way)
        if held < min(self.microbatches, suffix.stages + 1):
            return None
        compute_s = self.compute_s(peer, start, end, way)
        transit_s = suffix.transit_s + compute_s
        period_s = max(suffix.period_s, compute_s + self._busy_s[peer])
        up_s = down_s = 0.0
        if head != EMPTY_HEAD:
            forward, backward = self.hop(peer, head), self.hop(head, peer)
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
        update_s = suffix.update_s
        if self.ways[way].offload or self.ways[way].offload_weights:
            update_s = max(update_s, self.update_s(peer, start, end, way))
        return Suffix(
            start, peer, suffix.stages + 1, period_s, transit_s, up_s, down_s, held, compute_s, suffix, update_s, way
        )

    def longer(self, suffix: Suffix, peer: int, start: int) -> list[Suffix]:
        """Return `extend` for every way that may pay off; empty if the peer's memory can't hold the stage in any
        way."""
        found: list[Suffix] = []
        needless = 0
        for way in range(len(self.ways)):
            if needless >> way & 1:
                continue
            one = self.extend(suffix, peer, start, way)
            if one is not None:
                found.append(one)
                if one.held >= self.microbatches:
                    needless |= self._needless[way]
        return found

    def best_longer(self, suffix: Suffix, peer: int, start: int) -> Suffix | None:
        """Return the suffix from `longer` with the shortest step so far."""
        return min(self.longer(suffix, peer, start), key=self.step_s, default=None)

    def fold(self, order: Sequence[int], cuts: Sequence[int]) -> Suffix | None:
        """Return the pipeline in which `order[k]` holds [cuts[k], cuts[k + 1]), each stage in the way that is best
        overall. `cuts` runs from 0 to the chain's length. Returns None if some stage does not fit."""
        suffixes = [self.tail]
        for index in range(len(order) - 1, -1, -1):
            grown = [one for suffix in suffixes for one in self.longer(suffix, order[index], cuts[index])]
            suffixes = grown if len(grown) < 2 else _unbeaten(grown)
        return min(suffixes, key=self.step_s, default=None)

    def step_s(self, suffix: Suffix) -> float:
        return (self.microbatches - 1) * suffix.period_s + suffix.transit_s + suffix.update_s

    def compute_s(self, peer: int, start: int, end: int, way: int = 0) -> float:
        """Return the seconds of forward and backward for one microbatch."""
        seconds = self._flops[way][start][end] / self.pace[peer][way]
        if not self.ways[way].offload_weights:
            return seconds
        return seconds + float(self.tables.read_bytes[way, start, end]) / self.away_bytes_per_s[peer]

    def update_s(self, peer: int, start: int, end: int, way: int) -> float:
        """Return the seconds that reading and writing files adds to an update of the stage."""
        in_file = float(self.tables.slot_bytes[way, start, end]) / self.file_bytes_per_s[peer]
        return in_file + float(self.tables.trained_bytes[way, start, end]) / self.away_bytes_per_s[peer]

    def held(self, peer: int, start: int, end: int, way: int) -> int:
        """Return how many microbatches in flight fit beside the stage's resident bytes, at most M. Negative if the
        resident bytes alone don't fit, the peer can't work that way, or a pin forbids the range."""
        free = self.memory_bytes[peer] - self._resident[way][start][end]
        flight = self._flight[way][start][end]
        if free < 0 or not self.able[peer][way] or not self._pins.allow(peer, start, end):
            return -1
        return self.microbatches if flight * self.microbatches <= free else floor(free / flight)

    def stage_bytes(self, start: int, end: int, way: int, in_flight: int) -> float:
        """Return the memory of a stage with `in_flight` microbatches in flight."""
        return self._resident[way][start][end] + in_flight * self._flight[way][start][end]

    def flight_bytes(self, start: int, end: int, way: int) -> float:
        """Return the memory of one microbatch in flight."""
        return self._flight[way][start][end]

    def least_bytes(self, start: int, end: int, in_flight: int = 1) -> tuple[float, int]:
        """Return the smallest memory of a stage over all ways, with `in_flight` microbatches in flight, and that way's
        index."""
        return min((self.stage_bytes(start, end, way, in_flight), way) for way in range(len(self.ways)))

    @property
    def pins(self) -> Pins:
        return self._pins

    def allowed(self, peer: int, start: int, end: int) -> bool:
        """Return whether the pins allow `peer` to hold [start, end)."""
        return self._pins.allow(peer, start, end)

    def in_flight(self, best: Suffix) -> tuple[int, ...]:
        """Return the microbatches in flight per stage, first to last, the owner's loss stage included. Each stage gets
        as many as sustain the closed form's period (see `credits`), at most M and at most what its memory holds."""
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
        """Yield the stages from first to last, without the owner's loss stage."""
        stage: Suffix | None = suffix
        while stage is not None and stage is not self.tail:
            yield stage
            stage = stage.rest

    def transfer_s(self, upstream: int, downstream: int, cut: int) -> float:
        """Return the transfer seconds of one microbatch's activation and gradient over `cut`, without latency."""
        forward, backward = self.hop(upstream, downstream), self.hop(downstream, upstream)
        seconds = self.chain.forward_bytes[cut] / forward.bandwidth_bytes_per_s
        return seconds + self.chain.gradient_bytes[cut] / backward.bandwidth_bytes_per_s

    def with_codecs(self, codecs: Mapping[int, Codec]) -> Pipeline:
        """Return a copy in which the tensors sent after these blocks are packed with these codecs."""
        other = copy(self)
        other.chain = self.chain.with_codecs(codecs)
        other.up, other.down = other._access()
        other.tables = self.tables.with_flight(other.chain)
        other._flight = other.tables.flight_bytes.tolist()
        return other

    def _crossing_s(self, upstream: int, downstream: int, cut: int) -> float:
        """Return the longest time both transfers wait for others on shared access links. Links serve all transfers
        evenly. The others are the activations and gradients of the stage's other neighbour, assumed to be as large as
        these."""
        forward, backward = self.hop(upstream, downstream), self.hop(downstream, upstream)
        if not (forward.shared and backward.shared):
            return 0.0
        return 2 * min(
            self.chain.forward_bytes[cut] / forward.bandwidth_bytes_per_s,
            self.chain.gradient_bytes[cut] / backward.bandwidth_bytes_per_s,
        )

    def hop_s(self, upstream: int, downstream: int, cut: int) -> float:
        """Return `transfer_s` plus both latencies."""
        latency_s = self.hop(upstream, downstream).latency_s + self.hop(downstream, upstream).latency_s
        return self.transfer_s(upstream, downstream, cut) + latency_s

    def hop(self, sender: int, receiver: int) -> DirectedLink:
        """Return the hop from `sender` to `receiver`; cached on first use, because a large pool needs few of its
        pairs."""
        found = self._hops.get((sender, receiver))
        if found is None:
            found = self._hops[sender, receiver] = hop(
                self.everyone[sender], self.everyone[receiver], self.problem.links
            )
        return found

    def busy_s(self, peer: int) -> float:
        """Return the seconds per microbatch that the owner's loss stage takes on the same machine."""
        return self._busy_s[peer]

    def access_s(self, peer: int, start: int, end: int) -> float:
        """Return the occupancy, in seconds per microbatch, of the busier direction of the access link by stage [start,
        end)."""
        chain = self.chain
        # If the owner has no loss stage, nothing crosses the last cut.
        last = end == chain.length and self.loss is None
        up = chain.gradient_bytes[start] + (0.0 if last else chain.forward_bytes[end])
        down = chain.forward_bytes[start] + (0.0 if last else chain.gradient_bytes[end])
        return max(up / self.up[peer], down / self.down[peer])

    def access_only(self, peer: int) -> bool:
        """Return whether every transfer of the peer uses its access link, whichever machine is its neighbour."""
        return not self.has_own_links(peer) and self.peers[peer].peer != self.owner_id

    def has_own_links(self, peer: int) -> bool:
        """Return whether the problem names a link between the peer and another machine."""
        return self.peers[peer].peer in self._special

    def alike(self, one: int, other: int) -> bool:
        """Return whether two peers can be exchanged without changing any cost."""
        if not (self.exchangeable(one) and self.exchangeable(other)):
            return False
        return self.cost_key(one) == self.cost_key(other)

    def exchangeable(self, peer: int) -> bool:
        """Return whether the peer differs from others in its costs alone: no links of its own, no pins."""
        return self.access_only(peer) and peer not in self._pins.peers

    def cost_key(self, peer: int) -> tuple[object, ...]:
        """Return everything that determines a peer's costs if all its transfers use its access link."""
        one = self.peers[peer]
        return (
            tuple(self.pace[peer]),
            self.memory_bytes[peer],
            one.uplink,
            one.downlink,
            tuple(self.able[peer]),
            self.away_bytes_per_s[peer],
            self.file_bytes_per_s[peer],
            self.commit_s[peer],
        )

    def loss_bytes(self, in_flight: int) -> float:
        """Return the memory of the owner's loss stage; its input (usually the logits) is the largest part."""
        if self.loss is None:
            return 0.0
        return self.loss.resident_bytes(0, self.loss.length) + in_flight * self._loss_flight_bytes(self.loss)

    def _loss_flight_bytes(self, loss: Chain) -> float:
        cut = self.chain.length
        return loss.in_flight_bytes(0, loss.length) + self.chain.forward_bytes[cut] + self.chain.gradient_bytes[cut]

    def _access(self) -> tuple[list[float], list[float]]:
        """Return the uplink and downlink bandwidth of every machine that is left for its own stage. The owner's line
        carries the tensors of both model ends. The bandwidth for its first stage is reduced by the share that the last
        stage uses."""
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
            held = min(held, LOSS_IN_FLIGHT + SPARE)  # the first stage gets the rest
        for index, peer in enumerate(self.peers):
            if peer.peer == self.owner_id:
                self._busy_s[index] = compute_s
                kept = held if index == self.front else min(held, LOSS_IN_FLIGHT)
                self.memory_bytes[index] -= self.loss_bytes(min(kept, self.microbatches))
        return Suffix(end, self.owner, 1, compute_s, compute_s, 0.0, 0.0, held, compute_s, None)


def cost_tables(pipeline: Pipeline, peers: Sequence[int]) -> CostTables:
    """Return the costs of stages on `peers` as arrays. Pins name peers by their number in `pipeline`."""
    stages = pipeline.tables
    pinned, only, only_blocks = pipeline.pins.table(pipeline.chain.length)
    return CostTables(
        flops=stages.flops,
        read_bytes=stages.read_bytes,
        slot_bytes=stages.slot_bytes,
        trained_bytes=stages.trained_bytes,
        stage_bytes=stages.resident_bytes,
        flight_bytes=stages.flight_bytes,
        needless=stages.needless,
        able=np.array([pipeline.able[peer] for peer in peers], dtype=np.bool_),
        pinned=np.array(pinned, dtype=np.int64),
        only=only,
        only_blocks=only_blocks,
        speed=np.array([pipeline.pace[peer] for peer in peers]),
        away_bytes_per_s=np.array([pipeline.away_bytes_per_s[peer] for peer in peers]),
        file_bytes_per_s=np.array([pipeline.file_bytes_per_s[peer] for peer in peers]),
        memory_bytes=np.array([pipeline.memory_bytes[peer] for peer in peers]),
        busy_s=np.array([pipeline.busy_s(peer) for peer in peers]),
        commit_s=np.array([pipeline.commit_s[peer] for peer in peers]),
        microbatches=pipeline.microbatches,
        tail_stages=pipeline.tail.stages,
    )


def _unbeaten(suffixes: list[Suffix]) -> list[Suffix]:
    """Return the suffixes that no other one equals or beats in period, transit and update. All have the same machines
    and cuts and differ in those three times alone."""
    kept: list[Suffix] = []
    for one in sorted(suffixes, key=lambda s: (s.period_s, s.transit_s, s.update_s)):
        if not any(other.transit_s <= one.transit_s and other.update_s <= one.update_s for other in kept):
            kept.append(one)
    return kept


TARGET: Final = 0.97
"""Fraction of the closed form's speed that is aimed at: the idle time this leaves in a period saves credits if delays
are short."""
SPARE: Final = 1
"""Credits beyond what the timetable needs."""
_EXACT: Final = 1e-9


def credits_needed(compute_s: Sequence[float], round_trip_s: Sequence[float], period_s: float) -> tuple[int, ...]:
    """Return the microbatches each stage must have in flight so that links and neighbours don't delay it, first to
    last.

    `compute_s`: forward and backward time of each stage; `round_trip_s[k]`: both transfers, latencies and waits between
    stages k and k + 1; `period_s`: period of the closed form, above 0. Stage k gets at least as many credits as there
    are stages from k on, and as Little's law needs for the closed form's period; a longer round trip never gives fewer.

    Little's law alone (round trip / period, + 2) gives too few: a stage that is rarely idle can begin a backward only
    when its forwards leave room. So a microbatch that comes back a little late waits for the next period, and all
    stages before it wait too. In a schedule of period T stage k begins the backward of a microbatch

        x_k = x_(k+1) + c_(k+1) + r_k        c: forward and backward of a microbatch, r: round trip between both stages

    after the end of its forward. If the time left before the next forward is too short for the backward
    (x_k mod T > T - c_k), it begins at the next multiple of T. Then floor(x_k / T) + 1 microbatches are in flight at
    stage k. With free links that is the number of stages from k on, as in 1F1B; with an r that is small against T, but
    larger than the idle time, it is twice that number. One credit is added because the stage machine takes the next
    microbatch that has arrived instead of following a timetable. The last stage needs one: its backward follows its
    forward at once. Stages that defer weight gradients need fewer, and get the same number.
    """
    turn_s = period_s / TARGET
    needed = [1]
    since_s = trip_s = 0.0  # From the end of a forward to the begin of its backward, with waits and without.
    for stage in range(len(compute_s) - 2, -1, -1):
        away_s = compute_s[stage + 1] + round_trip_s[stage]
        trip_s += away_s
        turns, late_s = divmod(since_s + away_s, turn_s)
        since_s += away_s
        if late_s > turn_s - compute_s[stage] + _EXACT * turn_s:
            turns += 1
            since_s = turns * turn_s
        least = max(len(needed) + 1, ceil((trip_s + compute_s[stage]) / period_s - _EXACT))
        needed.append(max(least, int(turns) + 1 + SPARE))
    return tuple(reversed(needed))
