"""What a placed stage costs on this peer or on that one: state, boundary, compute, links. Decides no placement.

Stages are taken as a plan has them (ranges of block numbers); prices are those of the problem the plan was made for.
A peer the problem does not know (it left before the job's owner came back) has no profile: its links count as no
bottleneck, and its speed is what the plan predicted.

Neighbours: `chain` has the sums; `guards`, `snapshots`, `takeover`, `prediction` and `straggling` ask here.
"""

from __future__ import annotations

import dataclasses
from math import inf

import msgspec

from fusionai.scheduling.chain import Chain, codecs_of
from fusionai.scheduling.levers import (
    NO_LEVERS,
    Levers,
    flops_per_s,
    levers_of_stage,
    offload_s,
    weights_s,
    weights_update_s,
)
from fusionai.scheduling.links import Hop, hop
from fusionai.scheduling.pace import paced
from fusionai.scheduling.serving_line import block_s
from fusionai.scheduling.types import PeerProfile, Plan, Problem, StagePlacement


class StageCosts:
    """The prices of `problem`, by stage instead of by block. `plan`: whose codecs count, where the job leaves them to
    its plans."""

    def __init__(self, problem: Problem, plan: Plan | None = None) -> None:
        self.problem = problem = paced(problem)
        everyone = [*([] if problem.owner is None else [problem.owner]), *problem.peers]
        self.profiles = {profile.peer: profile for profile in everyone}
        self._chain = Chain(problem, problem.blocks, None if plan is None else codecs_of(plan))
        """Of everything that is the same in all replicas, and of the first one's codecs."""
        others = range(0) if plan is None or not plan.codecs else range(1, plan.replicas)
        self._packed = {replica: self._chain.with_codecs(codecs_of(plan, replica)) for replica in others if plan}
        self._first = problem.blocks[0].block
        self._microbatches = -(-problem.microbatches // (1 if plan is None else plan.replicas))

    def state_bytes(self, stage: StagePlacement) -> int:
        """Parameters and optimizer slots. 0: a stage without state, which anybody can start anew."""
        return round(self._chain.state_bytes(*self._positions(stage)))

    def snapshot_bytes(self, stage: StagePlacement) -> int:
        """Of one snapshot, but for the first: what is frozen a guard gets once."""
        return round(self._chain.moving_bytes(*self._positions(stage)))

    def forward_bytes(self, stage: StagePlacement) -> float:
        """Sent downstream per microbatch."""
        _, end = self._positions(stage)
        return 0.0 if end == self._chain.length else self._chain_of(stage).forward_bytes[end]

    def gradient_bytes(self, stage: StagePlacement) -> float:
        """Sent upstream per microbatch."""
        start, _ = self._positions(stage)
        return self._chain_of(stage).gradient_bytes[start]

    def sent_bytes(self, stage: StagePlacement) -> float:
        """Both directions, per microbatch: what is retained for a neighbour's replay."""
        return self.forward_bytes(stage) + self.gradient_bytes(stage)

    def shared_bytes(self, one: StagePlacement, other: StagePlacement) -> float:
        """Gradients of what both train: of a stage's own, with itself."""
        (start, end), (others_start, others_end) = self._positions(one), self._positions(other)
        return self._chain.trained_bytes(max(start, others_start), min(end, others_end))

    def compute_s(self, stage: StagePlacement, peer: str) -> float:
        """Forward and backward of one microbatch on `peer`; in serving a pass of one position."""
        if self.problem.task == "serve":
            return self.decode_s(stage, peer, 1)
        profile = self.profiles.get(peer)
        if profile is None or not profile.effective_flops_per_s > 0:
            return stage.compute_s
        start, end = self._positions(stage)
        levers = levers_of_stage(stage)
        return self._chain.flops(start, end, levers) / flops_per_s(profile, levers) + self.weights_s(stage, peer)

    def weights_s(self, stage: StagePlacement, peer: str) -> float:
        """Of `compute_s`, reading weights that lie elsewhere."""
        if not stage.offload_weights:
            return 0.0
        return weights_s(self.profiles.get(peer), self._chain.weight_bytes(*self._positions(stage)))

    def update_s(self, stage: StagePlacement) -> float:
        """Of every step, what files of the stage's add to its update."""
        if not stage.offload_weights:
            return stage.offload_s
        trained_bytes = self._chain.trained_bytes(*self._positions(stage))
        return stage.offload_s + weights_update_s(self.profiles.get(stage.peer), trained_bytes)

    def held_bytes(self, stage: StagePlacement, levers: Levers) -> int:
        """Of the stage if it worked with `levers`, with its microbatches in flight."""
        start, end = self._positions(stage)
        flight_bytes = self._chain_of(stage).in_flight_bytes(start, end, levers)
        return round(self._chain.resident_bytes(start, end, levers) + stage.in_flight * flight_bytes)

    def with_levers(self, stage: StagePlacement, levers: Levers) -> StagePlacement:
        """The stage working with `levers`: what it takes then, and what each of them saves and costs."""
        start, end = self._positions(stage)
        held_bytes = self.held_bytes(stage, levers)
        kept = msgspec.structs.replace(
            stage,
            recompute=levers.recompute,
            offload=levers.offload,
            offload_weights=levers.offload_weights,
            offload_s=offload_s(self.profiles.get(stage.peer), self._chain.slot_bytes(start, end))
            if levers.offload
            else 0.0,
        )
        saved = {
            name: max(0, self.held_bytes(stage, dataclasses.replace(levers, **{name: False})) - held_bytes)
            for name in levers.names
        }
        reading_s = self._microbatches * self.weights_s(kept, stage.peer)
        return msgspec.structs.replace(
            kept,
            compute_s=self.compute_s(kept, stage.peer),
            memory_bytes=held_bytes,
            in_flight_bytes=round(self._chain_of(stage).in_flight_bytes(start, end, levers)),
            recompute_s=self.recompute_s(kept, stage.peer),
            recompute_saves_bytes=saved.get("recompute", 0),
            offload_saves_bytes=saved.get("offload", 0),
            offload_weights_s=reading_s + self.update_s(kept) - kept.offload_s,
            offload_weights_saves_bytes=saved.get("offload_weights", 0),
        )

    def decode_s(self, stage: StagePlacement, peer: str, rows: int) -> float:
        """Serving: a pass of `rows` positions on `peer`."""
        profile = self.profiles.get(peer)
        if profile is None or not profile.effective_flops_per_s > 0:
            return stage.compute_s
        start, end = self._positions(stage)
        return sum(block_s(block, profile, rows) for block in self._chain.blocks[start:end])

    def attention_s(self, stage: StagePlacement, before: int, rows: int) -> float:
        """Serving: what a piece of a prompt takes longer because of the `before` positions ahead of it and its own."""
        profile = self.profiles.get(stage.peer)
        if profile is None or not profile.effective_flops_per_s > 0:
            return 0.0
        start, end = self._positions(stage)
        attended_flops = sum(block.attended_flops for block in self._chain.blocks[start:end])
        speed = profile.attention_flops_per_s * profile.share or profile.effective_flops_per_s
        return attended_flops * rows * (before + (rows - 1) / 2) / speed

    def recompute_s(self, stage: StagePlacement, peer: str) -> float:
        """Of `compute_s`, what making activations again takes, and the sparing that goes with it."""
        profile = self.profiles.get(peer)
        if not stage.recompute:
            return 0.0
        if profile is None or not profile.effective_flops_per_s > 0:
            return stage.recompute_s
        kept_s = self._chain.flops(*self._positions(stage), NO_LEVERS) / profile.effective_flops_per_s
        return self.compute_s(stage, peer) - self.weights_s(stage, peer) - kept_s

    def operators(self, stage: StagePlacement) -> list[str]:
        start, end = self._positions(stage)
        return sorted({op for block in self._chain.blocks[start:end] for op in block.ops})

    def fingerprint(self, stage: StagePlacement) -> str:
        """Of the numerics the stage has been computed with; empty when nobody knows."""
        if stage.fingerprint:
            return stage.fingerprint
        profile = self.profiles.get(stage.peer)
        return "" if profile is None else profile.fingerprint

    def exact(self, stage: StagePlacement, peer: PeerProfile) -> bool:
        """Whether `peer` promises the stage's bits. What is not known promises nothing."""
        return peer.fingerprint != "" and peer.fingerprint == self.fingerprint(stage)

    def hop(self, sender: str, receiver: str) -> Hop:
        """One direction between two peers."""
        ends = self.profiles.get(sender), self.profiles.get(receiver)
        match ends:
            case PeerProfile() as one, PeerProfile() as other:
                return hop(one, other, self.problem.links)
            case _:
                known = [end for end in ends if end is not None]
                bandwidth = min((_slower(end) for end in known), default=inf)
                return Hop(bandwidth_bytes_per_s=bandwidth, latency_s=0.0, shared=False)

    def memory_bytes(self, stage: StagePlacement) -> int:
        """What the stage's peer lends."""
        profile = self.profiles.get(stage.peer)
        return stage.memory_limit_bytes if profile is None else profile.memory_bytes

    def snapshot_s(self, stage: StagePlacement, guard: str) -> float:
        """Transfer of one snapshot to `guard`, the link being free."""
        link = self.hop(stage.peer, guard)
        return self.snapshot_bytes(stage) / link.bandwidth_bytes_per_s + link.latency_s

    def guardable(self, plan: Plan, stage: StagePlacement) -> bool:
        """Stages with state outside the job owner's process: what that process holds dies with the writer itself."""
        return stage.peer != plan.feed and self.state_bytes(stage) > 0

    def name(self, peer: str) -> str:
        """For people: the peer's name, or its id."""
        profile = self.profiles.get(peer)
        return peer if profile is None or not profile.name else profile.name

    def _chain_of(self, stage: StagePlacement) -> Chain:
        return self._packed.get(stage.replica, self._chain)

    def _positions(self, stage: StagePlacement) -> tuple[int, int]:
        return stage.blocks[0] - self._first, stage.blocks[1] - self._first


def _slower(profile: PeerProfile) -> float:
    return min(profile.uplink.bandwidth_bytes_per_s, profile.downlink.bandwidth_bytes_per_s)
