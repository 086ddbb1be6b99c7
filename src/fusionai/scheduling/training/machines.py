"""The machines of a training pipeline and the hops between them, reduced to what the formulas of `pipeline` need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fusionai.scheduling.problem.links import DirectedLink
from fusionai.scheduling.problem.memory_savings import (
    MemorySavings,
    file_bytes_per_s,
    flops_per_s,
    inability,
    weights_bytes_per_s,
)
from fusionai.scheduling.problem.types import PeerProfile


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

    @classmethod
    def of(
        cls, profile: PeerProfile, variants: Sequence[MemorySavings], up: float, down: float, commit_s: float
    ) -> MachineCosts:
        return cls(
            profile=profile,
            flops_per_s=profile.effective_flops_per_s,
            variant_flops_per_s=tuple(flops_per_s(profile, variant) for variant in variants),
            able=tuple(inability(variant, profile) is None for variant in variants),
            away_bytes_per_s=weights_bytes_per_s(profile),
            file_bytes_per_s=file_bytes_per_s(profile),
            up=up,
            down=down,
            memory_bytes=float(profile.memory_bytes),
            commit_s=commit_s,
        )

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
    """Longest time both transfers wait for others on shared access links. Links serve all transfers evenly. The others
    are the activations and gradients of the stage's other neighbour, assumed to be as large as these."""
    up_s: float
    """Occupancy of the upstream machine's uplink."""
    down_s: float
    head_up_s: float
    """Occupancy of the downstream machine's uplink."""
    head_down_s: float

    @classmethod
    def of(
        cls,
        hops: tuple[DirectedLink, DirectedLink],
        machines: tuple[MachineCosts, MachineCosts],
        sizes: tuple[float, float],
    ) -> HopCosts:
        """Return the costs for hops forward and back, the upstream and the downstream machine, and the bytes of the
        activation and the gradient."""
        (forward, backward), (one, other), (forward_bytes, gradient_bytes) = hops, machines, sizes
        forward_s = forward_bytes / forward.bandwidth_bytes_per_s
        backward_s = gradient_bytes / backward.bandwidth_bytes_per_s
        up_s = forward_bytes / one.up if forward.shared else 0.0
        down_s = gradient_bytes / one.down if backward.shared else 0.0
        return cls(
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
