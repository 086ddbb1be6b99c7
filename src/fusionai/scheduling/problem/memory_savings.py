"""The techniques by which a training stage saves memory at the price of time, and which of them a problem allows.

No technique changes a bit of any result, so the planner may choose. `chain` prices ranges of blocks with savings, the
search chooses stage by stage, and `wire.messages.StageOptions` carries the choice to the stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, SavingMode, StagePlacement
from fusionai.wire.messages import Saving


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """One combination of techniques that save memory.

    `recompute`: only the inputs of a block are kept; backward computes the other activations again, which costs one
    more forward pass. `offload`: optimizer state lies in a file, which every update reads and writes.
    `offload_weights`: weights lie in a file too (with an accelerator: in the host's memory), and every microbatch reads
    them block by block, forward and backward; only with `recompute`."""

    recompute: bool = False
    offload: bool = False
    offload_weights: bool = False

    @property
    def names(self) -> tuple[Saving, ...]:
        """Names of the techniques that are used."""
        return tuple(name for name in _CLAUSES if getattr(self, name))

    def includes(self, other: MemorySavings) -> bool:
        """Whether all techniques of `other` and more are used."""
        return other != self and set(other.names) <= set(self.names)

    def clause(self) -> str:
        """Clause for a sentence about memory, such as `, its activations recomputed in backward`; may be empty."""
        done = [_CLAUSES[name] for name in self.names]
        if len(done) < 2:
            return "".join(f", its {one}" for one in done)
        return f", its {', '.join(done[:-1])} and {done[-1]}"


_CLAUSES: Final[dict[Saving, str]] = {
    "recompute": "activations recomputed in backward",
    "offload": "optimizer state in a file",
    "offload_weights": "weights offloaded between uses",
}
_CANT: Final[dict[Saving, str]] = {
    "recompute": "recompute activations",
    "offload": "put optimizer state into a file",
    "offload_weights": "offload weights between uses",
}
NO_SAVINGS: Final = MemorySavings()
DISK_BYTES_PER_S: Final = 500e6
"""Speed of reading and writing optimizer state if the peer's was not measured: that of a SATA SSD."""
COPY_BYTES_PER_S: Final = 6e9
"""Speed of an accelerator's copies from and to the host's memory if the peer's was not measured: less than half of 16
lanes of PCIe 3.0."""
SPARING: Final = 1.2
"""Slowdown of a CPU that returns freed tensors to the system at once (`backends.memory`), as in a stage with
savings. Measured with 33 million parameters and 4 x 512 tokens a microbatch: 1.20 to 1.28."""
UPDATE_BYTES: Final = 3 * 2**20
"""Memory for the chunk that is being updated if optimizer state lies in a file."""
_CHOICES: Final = {"never": (False,), "always": (True,), "auto": (False, True)}


def flops_per_s(peer: PeerProfile, savings: MemorySavings) -> float:
    """Speed of `peer` with `savings`."""
    spared = savings != NO_SAVINGS and peer.device == "cpu"
    return peer.effective_flops_per_s / SPARING if spared else peer.effective_flops_per_s


def offload_s(peer: PeerProfile | None, slot_bytes: float) -> float:
    """Seconds per update to read and write optimizer state in a file of `peer`."""
    return 2 * slot_bytes / file_bytes_per_s(peer)


def file_bytes_per_s(peer: PeerProfile | None) -> float:
    """Speed at which a file of `peer` is read or written."""
    measured = 0.0 if peer is None else peer.scratch_bytes_per_s
    return measured if measured > 0 else DISK_BYTES_PER_S


def weights_s(peer: PeerProfile | None, weight_bytes: float) -> float:
    """Seconds to read offloaded weights twice (per microbatch: in forward and in backward), or to read and write them
    once (per update: the trained ones)."""
    return 2 * weight_bytes / weights_bytes_per_s(peer)


def weights_bytes_per_s(peer: PeerProfile | None) -> float:
    """Speed at which offloaded weights are read."""
    if peer is None or peer.device == "cpu":
        return file_bytes_per_s(peer)
    return peer.host_copy_bytes_per_s or COPY_BYTES_PER_S


def inability(savings: MemorySavings, peer: PeerProfile) -> str | None:
    """The reason why the backend of `peer` can't apply `savings`; None if it can."""
    if savings == NO_SAVINGS:
        return None
    missing = [_CANT[name] for name in savings.names if name not in peer.savings]
    return f"its backend {peer.backend!r} can't {' or '.join(missing)}" if missing else None


def savings_of_problem(problem: Problem) -> MemorySavings:
    """Techniques that the problem prescribes for all stages; one that is left to the plan counts as unused."""
    if problem.task != "train":
        return NO_SAVINGS
    return MemorySavings(
        recompute=problem.recompute == "always",
        offload=problem.offload == "always",
        offload_weights=problem.offload_weights == "always",
    )


def savings_choices(problem: Problem) -> tuple[MemorySavings, ...]:
    """Combinations of savings that a stage may use, the cheapest first. `offload_weights` requires `recompute`."""
    if problem.task != "train":
        return (NO_SAVINGS,)
    return _choices(problem.recompute, problem.offload, problem.offload_weights)


@cache
def _choices(recompute: SavingMode, offload: SavingMode, offload_weights: SavingMode) -> tuple[MemorySavings, ...]:
    return tuple(
        MemorySavings(recompute=again, offload=away, offload_weights=weights)
        for weights in _CHOICES[offload_weights]
        for away in _CHOICES[offload]
        for again in _CHOICES[recompute]
        if again or not weights
    )


def savings_of_stage(stage: StagePlacement) -> MemorySavings:
    return MemorySavings(recompute=stage.recompute, offload=stage.offload, offload_weights=stage.offload_weights)


def describe_savings(plan: Plan) -> Iterator[str]:
    """Yield a sentence per technique and stage: what it does, what it saves and what it costs."""
    for stage in plan.stages:
        if stage.recompute:
            times = stage.compute_s / (stage.compute_s - stage.recompute_s) - 1 if stage.recompute_s else 0.0
            yield (
                f"Stage {stage.stage} recomputes activations in backward: saves "
                f"{format_bytes(stage.recompute_saves_bytes)}, costs {times:.0%} more compute."
            )
        if stage.offload:
            yield (
                f"Stage {stage.stage} keeps its optimizer state in a file: saves "
                f"{format_bytes(stage.offload_saves_bytes)}, costs {format_seconds(stage.offload_s)} a step."
            )
        if stage.offload_weights:
            yield (
                f"Stage {stage.stage} keeps its weights in a file until a block needs them: saves "
                f"{format_bytes(stage.offload_weights_saves_bytes)}, costs "
                f"{format_seconds(stage.offload_weights_s)} a step."
            )
