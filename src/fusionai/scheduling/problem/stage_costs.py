"""Costs of a placed stage on a given peer: state, boundary, compute, links.

A peer that is not in the problem (it left before the job's owner came back) has no profile. Its links are assumed to be
no bottleneck, and its speed is what the plan predicted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import msgspec

from fusionai.scheduling.problem import memory_savings as saving
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.chain import Chain, codecs_of
from fusionai.scheduling.problem.constraints import refusal
from fusionai.scheduling.problem.types import DirectedLink, PeerProfile, Plan, Problem, StagePlacement, Standby, hop
from fusionai.scheduling.serving.pipeline import block_s


class StageCosts:
    """The costs of `problem` by stage. `plan`: its codecs apply, if the job leaves the choice to its plans."""

    def __init__(self, problem: Problem, plan: Plan | None = None) -> None:
        self.problem = problem = paced(problem)
        everyone = [*([] if problem.owner is None else [problem.owner]), *problem.peers]
        self.profiles = {profile.peer: profile for profile in everyone}
        self._chain = Chain(problem, problem.blocks, None if plan is None else codecs_of(plan))
        """Chain of everything that is equal in all replicas, with the first replica's codecs."""
        others = range(0) if plan is None or not plan.codecs else range(1, plan.replicas)
        self._packed = {replica: self._chain.with_codecs(codecs_of(plan, replica)) for replica in others if plan}
        self._operators: dict[tuple[int, int], list[str]] = {}
        self._hops: dict[tuple[str, str], DirectedLink] = {}
        self._first = problem.blocks[0].block
        self._microbatches = -(-problem.microbatches // (1 if plan is None else plan.replicas))

    def state_bytes(self, stage: StagePlacement) -> int:
        """Return the bytes of parameters and optimizer slots; 0 if any peer can start the stage without a snapshot."""
        return round(self._chain.state_bytes(*self._positions(stage)))

    def snapshot_bytes(self, stage: StagePlacement) -> int:
        """Return the bytes of one snapshot after the first; a standby receives frozen parameters only once."""
        return round(self._chain.moving_bytes(*self._positions(stage)))

    def forward_bytes(self, stage: StagePlacement) -> float:
        """Return the bytes sent downstream per microbatch."""
        _, end = self._positions(stage)
        return 0.0 if end == self._chain.length else self._chain_of(stage).forward_bytes[end]

    def gradient_bytes(self, stage: StagePlacement) -> float:
        """Return the bytes sent upstream per microbatch."""
        start, _ = self._positions(stage)
        return self._chain_of(stage).gradient_bytes[start]

    def sent_bytes(self, stage: StagePlacement) -> float:
        """Return the bytes sent in both directions per microbatch, which are retained for a neighbour's replay."""
        return self.forward_bytes(stage) + self.gradient_bytes(stage)

    def shared_bytes(self, one: StagePlacement, other: StagePlacement) -> float:
        """Return the gradient bytes of the parameters that both stages train."""
        (start, end), (others_start, others_end) = self._positions(one), self._positions(other)
        return self._chain.trained_bytes(max(start, others_start), min(end, others_end))

    def compute_s(self, stage: StagePlacement, peer: str) -> float:
        """Return the seconds of a microbatch's forward and backward on `peer`; in serving, of a pass of one row."""
        if self.problem.task == "serve":
            return self.decode_s(stage, peer, 1)
        profile = self.profiles.get(peer)
        if profile is None or not profile.effective_flops_per_s > 0:
            return stage.compute_s
        start, end = self._positions(stage)
        savings = saving.savings_of_stage(stage)
        return self._chain.flops(start, end, savings) / saving.flops_per_s(profile, savings) + self.weights_s(
            stage, peer
        )

    def weights_s(self, stage: StagePlacement, peer: str) -> float:
        """Return the part of `compute_s` for reading weights from a file or host memory."""
        if not stage.offload_weights:
            return 0.0
        return saving.weights_s(self.profiles.get(peer), self._chain.weight_bytes(*self._positions(stage)))

    def update_s(self, stage: StagePlacement) -> float:
        """Return the seconds per step that files add to the stage's update."""
        if not stage.offload_weights:
            return stage.offload_s
        trained_bytes = self._chain.trained_bytes(*self._positions(stage))
        return stage.offload_s + saving.weights_s(self.profiles.get(stage.peer), trained_bytes)

    def held_bytes(self, stage: StagePlacement, savings: saving.MemorySavings) -> int:
        """Return the memory of the stage with `savings`, its microbatches in flight included."""
        start, end = self._positions(stage)
        flight_bytes = self._chain_of(stage).in_flight_bytes(start, end, savings)
        return round(self._chain.resident_bytes(start, end, savings) + stage.in_flight * flight_bytes)

    def with_savings(self, stage: StagePlacement, savings: saving.MemorySavings) -> StagePlacement:
        """Return the stage with `savings`: its compute and memory, and what each technique saves and costs."""
        start, end = self._positions(stage)
        held_bytes = self.held_bytes(stage, savings)
        kept = msgspec.structs.replace(
            stage,
            recompute=savings.recompute,
            offload=savings.offload,
            offload_weights=savings.offload_weights,
            offload_s=saving.offload_s(self.profiles.get(stage.peer), self._chain.slot_bytes(start, end))
            if savings.offload
            else 0.0,
        )
        saved = {
            name: max(0, self.held_bytes(stage, dataclasses.replace(savings, **{name: False})) - held_bytes)
            for name in savings.names
        }
        reading_s = self._microbatches * self.weights_s(kept, stage.peer)
        return msgspec.structs.replace(
            kept,
            compute_s=self.compute_s(kept, stage.peer),
            memory_bytes=held_bytes,
            in_flight_bytes=round(self._chain_of(stage).in_flight_bytes(start, end, savings)),
            recompute_s=self.recompute_s(kept, stage.peer),
            recompute_saves_bytes=saved.get("recompute", 0),
            offload_saves_bytes=saved.get("offload", 0),
            offload_weights_s=reading_s + self.update_s(kept) - kept.offload_s,
            offload_weights_saves_bytes=saved.get("offload_weights", 0),
        )

    def decode_s(self, stage: StagePlacement, peer: str, rows: int) -> float:
        """Return the seconds of a serving pass of `rows` positions on `peer`."""
        profile = self.profiles.get(peer)
        if profile is None or not profile.effective_flops_per_s > 0:
            return stage.compute_s
        return sum(block_s(block, profile, rows) for block in self.problem.blocks_of(stage))

    def attention_s(self, stage: StagePlacement, before: int, rows: int) -> float:
        """Return the seconds of attention of `rows` prompt positions to `before` earlier ones and each other."""
        profile = self.profiles.get(stage.peer)
        if profile is None or not profile.effective_flops_per_s > 0:
            return 0.0
        attended_flops = sum(block.attended_flops for block in self.problem.blocks_of(stage))
        speed = profile.attention_flops_per_s * profile.share or profile.effective_flops_per_s
        return attended_flops * rows * (before + (rows - 1) / 2) / speed

    def recompute_s(self, stage: StagePlacement, peer: str) -> float:
        """Return the part of `compute_s` for recomputing activations, as a difference to the time without savings."""
        profile = self.profiles.get(peer)
        if not stage.recompute:
            return 0.0
        if profile is None or not profile.effective_flops_per_s > 0:
            return stage.recompute_s
        kept_s = self._chain.flops(*self._positions(stage), saving.NO_SAVINGS) / profile.effective_flops_per_s
        return self.compute_s(stage, peer) - self.weights_s(stage, peer) - kept_s

    def refusal(self, stage: StagePlacement, peer: PeerProfile, *, exact: bool) -> str | None:
        """Return why `peer` can't run the stage, regardless of memory; None if it can. `exact`: only with equal
        numerics."""
        if stage.blocks not in self._operators:
            operators = {op for block in self.problem.blocks_of(stage) for op in block.ops}
            self._operators[stage.blocks] = sorted(operators)
        reason = refusal(self.problem, peer, self._operators[stage.blocks])
        if reason is None and (unable := saving.inability(saving.savings_of_stage(stage), peer)) is not None:
            return f"{unable}, as the stage does."
        if reason is None and exact and not self.exact(stage, peer):
            return "it computes other bits (its fingerprint differs)."
        return reason

    def fingerprint(self, stage: StagePlacement) -> str:
        """Return the fingerprint of the numerics that computed the stage; empty if unknown."""
        if stage.fingerprint:
            return stage.fingerprint
        profile = self.profiles.get(stage.peer)
        return "" if profile is None else profile.fingerprint

    def exact(self, stage: StagePlacement, peer: PeerProfile) -> bool:
        """Return whether `peer` computes the stage's bits; False if a fingerprint is unknown."""
        return peer.fingerprint != "" and peer.fingerprint == self.fingerprint(stage)

    def beside(self, stage: StagePlacement, peer: str) -> bool:
        """Return whether `peer` is another device of the machine that runs the stage; False if a profile is unknown."""
        one, other = self.profiles.get(stage.peer), self.profiles.get(peer)
        return one is not None and other is not None and one.is_beside(other)

    def standby(self, stage: StagePlacement, peer: str) -> Standby:
        """Return `peer`, which is in the problem, as the standby of `stage`."""
        exact, beside = self.exact(stage, self.profiles[peer]), self.beside(stage, peer)
        return Standby(stage=stage.stage, peer=peer, exact=exact, beside=beside)

    def hop(self, sender: str, receiver: str) -> DirectedLink:
        """Return the hop in one direction between two peers; cached, because simulations ask for every message."""
        found = self._hops.get((sender, receiver))
        if found is None:
            one, other = self.profiles.get(sender), self.profiles.get(receiver)
            if one is not None and other is not None:
                found = hop(one, other, self.problem.links)
            else:
                bandwidth = min((_slower(end) for end in (one, other) if end is not None), default=inf)
                found = DirectedLink(bandwidth_bytes_per_s=bandwidth, latency_s=0.0, shared=False)
            self._hops[sender, receiver] = found
        return found

    def memory_bytes(self, stage: StagePlacement) -> int:
        """Return the memory that the stage's peer lends."""
        profile = self.profiles.get(stage.peer)
        return stage.memory_limit_bytes if profile is None else profile.memory_bytes

    def snapshot_s(self, stage: StagePlacement, standby: str) -> float:
        """Return the transfer seconds of one snapshot to `standby` over an otherwise unused link."""
        link = self.hop(stage.peer, standby)
        return self.snapshot_bytes(stage) / link.bandwidth_bytes_per_s + link.latency_s

    def needs_standby(self, plan: Plan, stage: StagePlacement) -> bool:
        """Return whether a standby is useful for the stage: it has state and runs outside the job owner's process.
        State in the owner's process is lost together with the process that writes checkpoints."""
        return stage.peer != plan.feed and self.state_bytes(stage) > 0

    def name(self, peer: str) -> str:
        """Return the peer's display name, or its id."""
        profile = self.profiles.get(peer)
        return peer if profile is None or not profile.name else profile.name

    def _chain_of(self, stage: StagePlacement) -> Chain:
        return self._packed.get(stage.replica, self._chain)

    def _positions(self, stage: StagePlacement) -> tuple[int, int]:
        return stage.blocks[0] - self._first, stage.blocks[1] - self._first


def _slower(profile: PeerProfile) -> float:
    return min(profile.uplink.bandwidth_bytes_per_s, profile.downlink.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Transfer between one stage and the next, per microbatch; in serving per position of a pass, forward only."""

    from_stage: int
    to_stage: int
    forward_bytes: float
    forward_s: float
    gradient_bytes: float
    gradient_s: float
    latency_s: float
    """Sum of both directions; in serving of the forward direction."""

    @property
    def transfer_s(self) -> float:
        return self.forward_s + self.gradient_s


def crossings(plan: Plan, costs: StageCosts) -> tuple[Crossing, ...]:
    """Crossings in pipeline order; replicas have none between them. Seconds of transfers exclude latency."""
    found: list[Crossing] = []
    for one, other in pairwise(plan.stages):
        if one.replica != other.replica:
            continue
        forward = costs.hop(one.peer, other.peer)
        forward_bytes = costs.forward_bytes(one)
        gradient_bytes = gradient_s = 0.0
        latency_s = forward.latency_s
        if plan.task == "train":
            back = costs.hop(other.peer, one.peer)
            gradient_bytes = costs.gradient_bytes(other)
            gradient_s = gradient_bytes / back.bandwidth_bytes_per_s
            latency_s += back.latency_s
        found.append(
            Crossing(
                from_stage=one.stage,
                to_stage=other.stage,
                forward_bytes=forward_bytes,
                forward_s=forward_bytes / forward.bandwidth_bytes_per_s,
                gradient_bytes=gradient_bytes,
                gradient_s=gradient_s,
                latency_s=latency_s,
            )
        )
    return tuple(found)
