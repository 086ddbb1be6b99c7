"""What a training stage may do to fit a small memory, at the price of time. Decides which of it a problem fixes.

None of it changes a bit of any result, so the planner may choose. Neighbours: `chain` prices ranges of blocks with it,
`small_memory` chooses stage by stage, `wire.messages.StageOptions` tells the stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from fusionai.scheduling.types import Lever, PeerProfile, Problem, StagePlacement
from fusionai.wire.messages import Saving


@dataclass(frozen=True, slots=True)
class Levers:
    """`recompute`: what enters a block is kept, the rest is made again in backward, for one more forward pass.
    `offload`: optimizer state lies in a file, which every update reads and writes. `offload_weights`: so do weights
    (beside an accelerator: in the host's memory), which every microbatch reads block by block, forward and backward;
    only with `recompute`."""

    recompute: bool = False
    offload: bool = False
    offload_weights: bool = False

    @property
    def names(self) -> tuple[Saving, ...]:
        """Of those that are done."""
        done: dict[Saving, bool] = {
            "recompute": self.recompute,
            "offload": self.offload,
            "offload_weights": self.offload_weights,
        }
        return tuple(name for name, does in done.items() if does)

    def words(self) -> str:
        """For a sentence on what something needs: `, its activations made again in backward`, or nothing."""
        done = [_WORDS[name] for name in self.names]
        if len(done) < 2:
            return "".join(f", its {one}" for one in done)
        return f", its {', '.join(done[:-1])} and {done[-1]}"


_WORDS: Final[dict[Saving, str]] = {
    "recompute": "activations made again in backward",
    "offload": "optimizer state in a file",
    "offload_weights": "weights away between uses",
}
_CANT: Final[dict[Saving, str]] = {
    "recompute": "make activations again",
    "offload": "put optimizer state into a file",
    "offload_weights": "have weights lie elsewhere between uses",
}
NO_LEVERS: Final = Levers()
DISK_BYTES_PER_S: Final = 500e6
"""What reading and writing optimizer state is counted with where nobody measured: a SATA SSD's."""
COPY_BYTES_PER_S: Final = 6e9
"""What an accelerator's copies from and to the host's memory are counted with: half of 16 lanes of PCIe 3.0. Nobody
measures them."""
SPARING: Final = 1.2
"""So many times longer a CPU computes that gives freed tensors back to the system at once (`execution.allocator`), as a
stage with levers has it do: of 33 million parameters, 4 x 512 tokens a microbatch, 1.20 to 1.28 times were measured."""
UPDATE_BYTES: Final = 3 * 2**20
"""The pieces of an update whose state lies in a file."""
_CHOICES: Final = {"never": (False,), "always": (True,), "auto": (False, True)}


def flops_per_s(peer: PeerProfile, levers: Levers) -> float:
    """What `peer` reaches with `levers`."""
    spared = levers != NO_LEVERS and peer.device == "cpu"
    return peer.effective_flops_per_s / SPARING if spared else peer.effective_flops_per_s


def offload_s(peer: PeerProfile | None, slot_bytes: float) -> float:
    """Of every update, where optimizer state lies in a file of `peer`'s."""
    return 2 * slot_bytes / file_bytes_per_s(peer)


def file_bytes_per_s(peer: PeerProfile | None) -> float:
    """How fast a file of `peer`'s is read or written."""
    measured = 0.0 if peer is None else peer.scratch_bytes_per_s
    return measured if measured > 0 else DISK_BYTES_PER_S


def weights_s(peer: PeerProfile | None, weight_bytes: float) -> float:
    """Of every microbatch, where weights lie elsewhere: forward and backward read them."""
    return 2 * weight_bytes / weights_bytes_per_s(peer)


def weights_update_s(peer: PeerProfile | None, trained_bytes: float) -> float:
    """Of every update, where weights lie elsewhere: it reads and writes those that are trained."""
    return 2 * trained_bytes / weights_bytes_per_s(peer)


def weights_bytes_per_s(peer: PeerProfile | None) -> float:
    """How fast weights come from where they lie between uses."""
    if peer is not None and peer.device != "cpu":
        return COPY_BYTES_PER_S
    return peer.scratch_bytes_per_s if peer is not None and peer.scratch_bytes_per_s > 0 else DISK_BYTES_PER_S


def inability(levers: Levers, peer: PeerProfile) -> str | None:
    """What `peer` would have to do and can't, in words; None where it can."""
    if levers == NO_LEVERS:
        return None
    missing = [_CANT[name] for name in levers.names if name not in peer.savings]
    return f"its backend {peer.backend!r} can't {' or '.join(missing)}" if missing else None


def levers_of_problem(problem: Problem) -> Levers:
    """What all stages do. What is left to the plan counts as not done."""
    if problem.task != "train":
        return NO_LEVERS
    return Levers(
        recompute=problem.recompute == "always",
        offload=problem.offload == "always",
        offload_weights=problem.offload_weights == "always",
    )


def choices_of_problem(problem: Problem) -> tuple[Levers, ...]:
    """What a stage may do, what costs least first: where it depends on the disk, a file comes last. Weights that come
    and go ask for activations made again."""
    if problem.task != "train":
        return (NO_LEVERS,)
    return _choices(problem.recompute, problem.offload, problem.offload_weights)


@cache
def _choices(recompute: Lever, offload: Lever, offload_weights: Lever) -> tuple[Levers, ...]:
    return tuple(
        Levers(recompute=again, offload=away, offload_weights=weights)
        for weights in _CHOICES[offload_weights]
        for away in _CHOICES[offload]
        for again in _CHOICES[recompute]
        if again or not weights
    )


def unable_to_save(stage: StagePlacement, peer: PeerProfile) -> str | None:
    """Why `peer` can't stand in for the stage, which saves memory as the plan says; None if it can."""
    unable = inability(levers_of_stage(stage), peer)
    return None if unable is None else f"{unable}, as the stage does."


def levers_of_stage(stage: StagePlacement) -> Levers:
    return Levers(recompute=stage.recompute, offload=stage.offload, offload_weights=stage.offload_weights)
