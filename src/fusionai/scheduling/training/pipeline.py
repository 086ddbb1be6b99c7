"""The cost model of a training pipeline on unequal peers: how long a step takes. It chooses no placement.

A pipeline is built from its last stage towards its first, because a stage's costs depend only on what lies downstream:
the next peer, the round trip of a microbatch below it (which sets the memory for microbatches in flight) and the number
of stages that follow.

    step = (M - 1) * period + transit + commit + update (+ sync, 0 for one replica)
    transit  = sum of compute over stages + sum over hops of (activation + gradient transfer + both latencies)
    commit   = latency from the first stage to the job owner and back, to report the step complete (see `prediction`)
    period   = max over stages of compute, uplink and downlink occupancy, exceptional links' transfer, credit
    credit_k = round trip of stage k / microbatches its memory holds, where that is fewer than M (Little's law)
    update   = the longest time a stage reads and writes files after a step, if its savings keep data in files

Each stage has one of several variants, each a combination of techniques that save memory (`problem.memory_savings`).
The variant sets the stage's compute, memory and update.

The data feed's transfers and jitter are not modelled.

`problem.chain` has the costs of block ranges by variant; `search` builds pipelines with this model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor
from typing import Final, NamedTuple

import numpy as np

from fusionai.scheduling.kernels.training_pipeline import CostTables
from fusionai.scheduling.problem import memory_savings as saving
from fusionai.scheduling.problem.chain import Chain, stage_tables
from fusionai.scheduling.problem.constraints import Pins
from fusionai.scheduling.problem.embedding_and_head import embedding_and_head_of, front_of, tail_chain
from fusionai.scheduling.problem.types import DirectedLink, PeerProfile, Problem, hop
from fusionai.wire.codecs import Codec


def fastest_first(peers: Iterable[PeerProfile]) -> list[PeerProfile]:
    """Return the peers by descending speed, ties by id, whatever order they were listed in."""
    return sorted(peers, key=lambda p: (-p.effective_flops_per_s, p.peer))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCosts:
    """One usable peer, or the job owner's machine, as the pipeline's formulas need it."""

    profile: PeerProfile
    flops_per_s: float
    variant_flops_per_s: tuple[float, ...]
    """FLOP/s by variant."""
    able: tuple[bool, ...]
    """Whether the machine's backend supports each variant."""
    away_bytes_per_s: float
    """Speed at which offloaded weights are read."""
    file_bytes_per_s: float
    up: float
    """Uplink in bytes/s, without the part that the owner's other stage uses."""
    down: float
    memory_bytes: float
    """Memory left for a pool stage."""
    commit_s: float
    """Commit time if the machine holds the first stage."""
    busy_s: float = 0.0
    """Seconds per microbatch that the owner's loss stage takes on the same machine."""

    @property
    def cost_key(self) -> tuple[object, ...]:
        """Everything that determines the machine's costs if all its transfers use its access link."""
        return (
            self.variant_flops_per_s,
            self.memory_bytes,
            self.profile.uplink,
            self.profile.downlink,
            self.able,
            self.away_bytes_per_s,
            self.file_bytes_per_s,
            self.commit_s,
        )


class HopCosts(NamedTuple):
    """Transfers of one microbatch over one cut between two machines: activation forward, gradient back."""

    transfer_s: float
    """Both transfers, without latency."""
    latency_s: float
    """Both latencies."""
    trip_s: float
    """Transfers and latencies."""
    longest_s: float
    """Longest occupancy of a link or of the upstream machine's access link."""
    wait_s: float
    """Longest time both transfers wait on shared access links for those of the stage's other neighbour, which are
    assumed to be as large."""
    up_s: float
    """Occupancy of the upstream machine's uplink."""
    down_s: float
    head_up_s: float
    """Occupancy of the downstream machine's uplink."""
    head_down_s: float


class Suffix(NamedTuple):
    """The stages from block `start` to the end of the pipeline."""

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
    variant: int = 0
    """How the head fits its memory: index into `Pipeline.variants`."""


EMPTY_HEAD: Final = -1
"""Head of the empty suffix when the loss is in the pool: nothing lies downstream."""
LOSS_IN_FLIGHT: Final = 2
"""Microbatches in flight that the last stage needs: one computing, one waiting."""


class Pipeline:
    """Costs of a problem's stages and hops on the usable peers, in whatever order these were listed."""

    def __init__(self, problem: Problem, peers: Sequence[PeerProfile]) -> None:
        self.problem = problem
        self.microbatches = problem.microbatches
        self.peers = fastest_first(peers)
        self.owner = len(self.peers)
        """Index of the job owner's machine in `machines`, which lists it after the peers."""
        self._everyone = [*self.peers, *([] if problem.owner is None else [problem.owner])]
        ends = embedding_and_head_of(problem)
        blocks = problem.blocks[: len(problem.blocks) - ends.last]
        self.chain = Chain(problem, blocks)
        self.loss = tail_chain(problem)
        """Chain of the owner's last blocks; None if the loss is in the pool."""
        self.front = front_of(problem, self.peers)
        """Index of the peer that stands for the owner's machine with its first blocks; None if there is none."""
        self.pins = Pins(problem.pinned, blocks, self.peers, only=self.front)
        self.variants = saving.savings_choices(problem)
        """Techniques that a stage may combine to fit its memory."""
        self.tables = stage_tables(self.chain, self.variants)
        self.linked = problem.linked
        """Peers with links of their own."""
        self._hops: dict[tuple[int, int], DirectedLink] = {}
        self._hop_costs: dict[tuple[int, int, int], HopCosts] = {}
        self.tail = self._tail()
        self.machines = self._machines()
        # Python lists: single elements are read faster than from numpy arrays.
        self._resident: list[list[list[float]]] = self.tables.resident_bytes.tolist()
        self._flight: list[list[list[float]]] = self.tables.flight_bytes.tolist()
        self._flops: list[list[list[float]]] = self.tables.flops.tolist()

    def extend(self, suffix: Suffix, peer: int, start: int, variant: int) -> Suffix | None:
        """Return `suffix` with a stage [start, suffix.start) on `peer` before it; None if it does not fit."""
        end, machine = suffix.start, self.machines[peer]
        held = self.held(peer, start, end, variant)
        stages = suffix.stages + 1
        if held < min(self.microbatches, stages):
            return None
        compute_s = self.compute_s(peer, start, end, variant)
        transit_s = suffix.transit_s + compute_s
        period_s = max(suffix.period_s, compute_s + machine.busy_s)
        up_s = down_s = 0.0
        if suffix.head != EMPTY_HEAD:
            hop = self.hop_costs(peer, suffix.head, end)
            up_s, down_s = hop.up_s, hop.down_s
            transit_s += hop.trip_s
            period_s = max(period_s, hop.longest_s, suffix.up_s + hop.head_up_s, suffix.down_s + hop.head_down_s)
        if held < self.microbatches:
            period_s = max(period_s, transit_s / held)
        if start == 0:
            transit_s += machine.commit_s
        update_s = suffix.update_s
        if self.variants[variant].offload or self.variants[variant].offload_weights:
            update_s = max(update_s, self.update_s(peer, start, end, variant))
        return Suffix(
            start, peer, stages, period_s, transit_s, up_s, down_s, held, compute_s, suffix, update_s, variant
        )

    def longer(self, suffix: Suffix, peer: int, start: int) -> list[Suffix]:
        """Return `extend` for every variant that may pay off and fits the peer's memory."""
        found: list[Suffix] = []
        needless = 0
        for variant in range(len(self.variants)):
            if needless >> variant & 1:
                continue
            one = self.extend(suffix, peer, start, variant)
            if one is not None:
                found.append(one)
                if one.held >= self.microbatches:
                    needless |= int(self.tables.needless[variant])
        return found

    def fold(self, order: Sequence[int], cuts: Sequence[int]) -> Suffix | None:
        """Return the pipeline in which `order[k]` holds [cuts[k], cuts[k + 1]), with the variants that are best
        overall; None if some stage does not fit. `cuts` runs from 0 to the chain's length."""
        suffixes = [self.tail]
        for index in range(len(order) - 1, -1, -1):
            grown = [one for suffix in suffixes for one in self.longer(suffix, order[index], cuts[index])]
            suffixes = grown if len(grown) < 2 else _unbeaten(grown)
        return min(suffixes, key=self.step_s, default=None)

    def step_s(self, suffix: Suffix) -> float:
        return (self.microbatches - 1) * suffix.period_s + suffix.transit_s + suffix.update_s

    def compute_s(self, peer: int, start: int, end: int, variant: int = 0) -> float:
        """Return the seconds of forward and backward for one microbatch."""
        machine = self.machines[peer]
        seconds = self._flops[variant][start][end] / machine.variant_flops_per_s[variant]
        if not self.variants[variant].offload_weights:
            return seconds
        return seconds + float(self.tables.read_bytes[variant, start, end]) / machine.away_bytes_per_s

    def update_s(self, peer: int, start: int, end: int, variant: int) -> float:
        """Return the seconds that reading and writing files adds to an update of the stage."""
        machine = self.machines[peer]
        in_file = float(self.tables.slot_bytes[variant, start, end]) / machine.file_bytes_per_s
        return in_file + float(self.tables.trained_bytes[variant, start, end]) / machine.away_bytes_per_s

    def held(self, peer: int, start: int, end: int, variant: int) -> int:
        """Return how many microbatches in flight fit beside the stage, at most M. Negative if the stage alone doesn't
        fit, the peer does not support the variant, or a pin forbids the range."""
        machine = self.machines[peer]
        free = machine.memory_bytes - self._resident[variant][start][end]
        flight = self._flight[variant][start][end]
        if free < 0 or not machine.able[variant] or not self.pins.allow(peer, start, end):
            return -1
        return self.microbatches if flight * self.microbatches <= free else floor(free / flight)

    def stage_bytes(self, start: int, end: int, variant: int, in_flight: int) -> float:
        """Return the memory of a stage with `in_flight` microbatches in flight."""
        return self._resident[variant][start][end] + in_flight * self._flight[variant][start][end]

    def least_bytes(self, start: int, end: int, in_flight: int = 1) -> tuple[float, int]:
        """Return the smallest memory of a stage over all variants, and the variant."""
        return min((self.stage_bytes(start, end, variant, in_flight), variant) for variant in range(len(self.variants)))

    def in_flight(self, best: Suffix) -> tuple[int, ...]:
        """Return the microbatches in flight per stage, first to last, the owner's loss stage included: as many as
        sustain the closed form's period (`credits_needed`), at most M and at most what the memory holds."""
        stages = [*self.pool_stages(best), *([] if self.loss is None else [self.tail])]
        if not best.period_s > 0:
            return tuple(min(stage.held, self.microbatches) for stage in stages)
        compute_s = [stage.compute_s + self.machines[stage.head].busy_s for stage in stages]
        hops = [self.hop_costs(one.head, other.head, other.start) for one, other in pairwise(stages)]
        away_s = [hop.transfer_s + hop.latency_s + hop.wait_s for hop in hops]
        needed = credits_needed(compute_s, away_s, best.period_s)
        return tuple(min(stage.held, self.microbatches, count) for stage, count in zip(stages, needed, strict=True))

    def pool_stages(self, suffix: Suffix) -> Iterator[Suffix]:
        """Yield the stages from first to last, without the owner's loss stage."""
        stage: Suffix | None = suffix
        while stage is not None and stage is not self.tail:
            yield stage
            stage = stage.rest

    def with_codecs(self, codecs: Mapping[int, Codec]) -> Pipeline:
        """Return a copy in which the tensors sent after these blocks are packed with these codecs."""
        other = copy(self)
        other.chain = self.chain.with_codecs(codecs)
        other._hop_costs = {}
        access = zip(self.machines, *other._access(), strict=True)
        other.machines = [replace(machine, up=up, down=down) for machine, up, down in access]
        other.tables = self.tables.with_flight(other.chain)
        other._flight = other.tables.flight_bytes.tolist()
        return other

    def hop_costs(self, upstream: int, downstream: int, cut: int) -> HopCosts:
        """Return the costs of one microbatch between two machines over `cut`; cached: searches ask repeatedly."""
        found = self._hop_costs.get((upstream, downstream, cut))
        if found is None:
            forward, backward = self.hop(upstream, downstream), self.hop(downstream, upstream)
            one, other = self.machines[upstream], self.machines[downstream]
            forward_bytes, gradient_bytes = self.chain.forward_bytes[cut], self.chain.gradient_bytes[cut]
            forward_s = forward_bytes / forward.bandwidth_bytes_per_s
            backward_s = gradient_bytes / backward.bandwidth_bytes_per_s
            up_s = forward_bytes / one.up if forward.shared else 0.0
            down_s = gradient_bytes / one.down if backward.shared else 0.0
            found = self._hop_costs[upstream, downstream, cut] = HopCosts(
                transfer_s=forward_s + backward_s,
                latency_s=forward.latency_s + backward.latency_s,
                trip_s=forward_s + backward_s + forward.latency_s + backward.latency_s,
                longest_s=max(forward_s, backward_s, up_s, down_s),
                wait_s=2 * min(forward_s, backward_s) if forward.shared and backward.shared else 0.0,
                up_s=up_s,
                down_s=down_s,
                head_up_s=gradient_bytes / other.up if backward.shared else 0.0,
                head_down_s=forward_bytes / other.down if forward.shared else 0.0,
            )
        return found

    def hop(self, sender: int, receiver: int) -> DirectedLink:
        """Return the hop between two machines; cached on first use, because a large pool needs few of its pairs."""
        found = self._hops.get((sender, receiver))
        if found is None:
            one, other = self._everyone[sender], self._everyone[receiver]
            found = self._hops[sender, receiver] = hop(one, other, self.problem.links)
        return found

    def access_s(self, peer: int, start: int, end: int) -> float:
        """Return the seconds per microbatch in which stage [start, end) occupies its access link's busier direction."""
        chain = self.chain
        # If the owner has no loss stage, nothing crosses the last cut.
        last = end == chain.length and self.loss is None
        up = chain.gradient_bytes[start] + (0.0 if last else chain.forward_bytes[end])
        down = chain.forward_bytes[start] + (0.0 if last else chain.gradient_bytes[end])
        return max(up / self.machines[peer].up, down / self.machines[peer].down)

    def access_only(self, peer: int) -> bool:
        """Return whether every transfer of the peer uses its access link, whichever machine is its neighbour."""
        return self.peers[peer].peer not in self.linked and self.peers[peer].peer != self.problem.owner_id

    def exchangeable(self, peer: int) -> bool:
        """Return whether the peer differs from others in its costs alone: no links of its own, no pins."""
        return self.access_only(peer) and peer not in self.pins.peers

    def alike(self, one: int, other: int) -> bool:
        """Return whether two peers can be exchanged without changing any cost."""
        same = self.machines[one].cost_key == self.machines[other].cost_key
        return same and self.exchangeable(one) and self.exchangeable(other)

    def loss_bytes(self, in_flight: int) -> float:
        """Return the memory of the owner's loss stage; its input (usually the logits) is the largest part."""
        if self.loss is None:
            return 0.0
        return self.loss.resident_bytes(0, self.loss.length) + in_flight * self._loss_flight_bytes(self.loss)

    def _loss_flight_bytes(self, loss: Chain) -> float:
        cut = self.chain.length
        return loss.in_flight_bytes(0, loss.length) + self.chain.forward_bytes[cut] + self.chain.gradient_bytes[cut]

    def _access(self) -> tuple[list[float], list[float]]:
        """Return every machine's uplink and downlink bandwidth. The owner's access link carries the tensors of both
        model ends, so the bandwidth for its first stage is reduced by the share that the last stage uses."""
        up = [profile.uplink.bandwidth_bytes_per_s for profile in self._everyone]
        down = [profile.downlink.bandwidth_bytes_per_s for profile in self._everyone]
        if self.front is not None and self.loss is not None:
            forward, gradient = self.chain.forward_bytes, self.chain.gradient_bytes
            first, last = embedding_and_head_of(self.problem).first, self.chain.length
            if forward[first] > 0:
                up[self.front] *= forward[first] / (forward[first] + gradient[last])
            if gradient[first] > 0:
                down[self.front] *= gradient[first] / (gradient[first] + forward[last])
        return up, down

    def _machines(self) -> list[MachineCosts]:
        """Return the peers, fastest first, and the owner's machine, which may also be a peer: then the loss stage takes
        part of that peer's time and memory."""
        owner = self.problem.owner
        commits_s = [
            0.0 if owner is None else self.hop(index, self.owner).latency_s + self.hop(self.owner, index).latency_s
            for index in range(len(self._everyone))
        ]
        machines = [
            MachineCosts(
                profile=profile,
                flops_per_s=profile.effective_flops_per_s,
                variant_flops_per_s=tuple(saving.flops_per_s(profile, variant) for variant in self.variants),
                able=tuple(saving.inability(variant, profile) is None for variant in self.variants),
                away_bytes_per_s=saving.weights_bytes_per_s(profile),
                file_bytes_per_s=saving.file_bytes_per_s(profile),
                up=up,
                down=down,
                memory_bytes=float(profile.memory_bytes),
                commit_s=commit_s,
            )
            for profile, up, down, commit_s in zip(self._everyone, *self._access(), commits_s, strict=True)
        ]
        if self.loss is None or owner is None:
            return machines
        for index, peer in enumerate(self.peers):
            if peer.peer == owner.peer:
                kept = self.tail.held if index == self.front else min(self.tail.held, LOSS_IN_FLIGHT)
                taken_bytes = self.loss_bytes(min(kept, self.microbatches))
                room_bytes = machines[index].memory_bytes - taken_bytes
                machines[index] = replace(machines[index], busy_s=self.tail.compute_s, memory_bytes=room_bytes)
        return machines

    def _loss_held(self, loss: Chain) -> int:
        """Return the microbatches in flight for which the owner's loss stage has room."""
        free = float(self._everyone[self.owner].memory_bytes) - self.loss_bytes(0)
        flight = self._loss_flight_bytes(loss)
        held = self.microbatches if flight * self.microbatches <= free else floor(free / flight)
        # The owner's first stage gets the rest.
        return held if self.front is None else min(held, LOSS_IN_FLIGHT + SPARE)

    def _tail(self) -> Suffix:
        end = self.chain.length
        if self.loss is None:
            return Suffix(end, EMPTY_HEAD, 0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, None)
        compute_s = self.loss.flops(0, self.loss.length) / self._everyone[self.owner].effective_flops_per_s
        held = self._loss_held(self.loss)
        return Suffix(end, self.owner, 1, compute_s, compute_s, 0.0, 0.0, held, compute_s, None)


def cost_tables(pipeline: Pipeline, peers: Sequence[int]) -> CostTables:
    """Return the costs of stages on `peers` as arrays. Pins name peers by their number in `pipeline`."""
    stages = pipeline.tables
    machines = [pipeline.machines[peer] for peer in peers]
    pinned, only, only_blocks = pipeline.pins.table(pipeline.chain.length)
    return CostTables(
        flops=stages.flops,
        read_bytes=stages.read_bytes,
        slot_bytes=stages.slot_bytes,
        trained_bytes=stages.trained_bytes,
        stage_bytes=stages.resident_bytes,
        flight_bytes=stages.flight_bytes,
        needless=stages.needless,
        able=np.array([machine.able for machine in machines], dtype=np.bool_),
        pinned=np.array(pinned, dtype=np.int64),
        only=only,
        only_blocks=only_blocks,
        speed=np.array([machine.variant_flops_per_s for machine in machines]),
        away_bytes_per_s=np.array([machine.away_bytes_per_s for machine in machines]),
        file_bytes_per_s=np.array([machine.file_bytes_per_s for machine in machines]),
        memory_bytes=np.array([machine.memory_bytes for machine in machines]),
        busy_s=np.array([machine.busy_s for machine in machines]),
        commit_s=np.array([machine.commit_s for machine in machines]),
        microbatches=pipeline.microbatches,
        tail_stages=pipeline.tail.stages,
    )


def _unbeaten(suffixes: list[Suffix]) -> list[Suffix]:
    """Return the suffixes, of equal machines and cuts, that no other one equals or beats in its three times."""
    kept: list[Suffix] = []
    for one in sorted(suffixes, key=lambda s: (s.period_s, s.transit_s, s.update_s)):
        if not any(other.transit_s <= one.transit_s and other.update_s <= one.update_s for other in kept):
            kept.append(one)
    return kept


TARGET: Final = 0.97
"""Fraction of the closed form's speed that is aimed at: the idle time in a period saves credits if delays are short."""
SPARE: Final = 1
"""Credits beyond what the timetable needs."""
_EXACT: Final = 1e-9


def credits_needed(compute_s: Sequence[float], round_trip_s: Sequence[float], period_s: float) -> tuple[int, ...]:
    """Return the microbatches each stage must have in flight so that links and neighbours don't delay it, first to
    last.

    `compute_s`: forward and backward time of each stage; `round_trip_s[k]`: both transfers, latencies and waits between
    stages k and k + 1; `period_s`: period of the closed form, above 0. Stage k gets at least as many credits as there
    are stages from k on, and as Little's law needs for that period; a longer round trip never gives fewer.

    Little's law alone (round trip / period, + 2) gives too few: a microbatch that comes back a little late waits for
    the next period, and all stages before it wait too. In a schedule of period T stage k begins the backward of a
    microbatch x_k = x_(k+1) + c_(k+1) + r_k after the end of its forward (c: forward and backward of a microbatch, r:
    round trip between both stages). If the time left before the next forward is too short for the backward
    (x_k mod T > T - c_k), it begins at the next multiple of T. Then floor(x_k / T) + 1 microbatches are in flight. One
    credit is added because the stage machine takes the next microbatch that has arrived instead of following a
    timetable. The last stage needs one: its backward follows its forward at once.
    """
    slot_s = period_s / TARGET
    needed = [1]
    since_s = trip_s = 0.0  # From the end of a forward to the begin of its backward, with waits and without.
    for stage in range(len(compute_s) - 2, -1, -1):
        away_s = compute_s[stage + 1] + round_trip_s[stage]
        trip_s += away_s
        slots, late_s = divmod(since_s + away_s, slot_s)
        since_s += away_s
        if late_s > slot_s - compute_s[stage] + _EXACT * slot_s:
            slots += 1
            since_s = slots * slot_s
        least = max(len(needed) + 1, ceil((trip_s + compute_s[stage]) / period_s - _EXACT))
        needed.append(max(least, int(slots) + 1 + SPARE))
    return tuple(reversed(needed))
