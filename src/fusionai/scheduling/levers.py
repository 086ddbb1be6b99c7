"""What a training stage may do to fit a small memory, at the price of time. Decides which of it a problem fixes.

None of it changes a bit of any result, so the planner may choose. Neighbours: `chain` prices ranges of blocks with it,
`small_memory` chooses stage by stage, `wire.messages.StageOptions` tells the stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fusionai.scheduling.types import PeerProfile, Problem, StagePlacement


@dataclass(frozen=True, slots=True)
class Levers:
    """`recompute`: what enters a block is kept, the rest is made again in backward, for one more forward pass.
    `offload`: optimizer state lies in a file, which every update reads and writes."""

    recompute: bool = False
    offload: bool = False

    def words(self) -> str:
        """For a sentence on what something needs: `, its activations made again in backward`, or nothing."""
        done = [
            *(["activations made again in backward"] if self.recompute else []),
            *(["optimizer state in a file"] if self.offload else []),
        ]
        return f", its {' and '.join(done)}" if done else ""


NO_LEVERS: Final = Levers()
DISK_BYTES_PER_S: Final = 500e6
"""What reading and writing optimizer state is counted with where nobody measured: a SATA SSD's."""
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
    measured = 0.0 if peer is None else peer.scratch_bytes_per_s
    return 2 * slot_bytes / (measured if measured > 0 else DISK_BYTES_PER_S)


def levers_of_problem(problem: Problem) -> Levers:
    """What all stages do. What is left to the plan counts as not done."""
    if problem.task != "train":
        return NO_LEVERS
    return Levers(recompute=problem.recompute == "always", offload=problem.offload == "always")


def choices_of_problem(problem: Problem) -> tuple[Levers, ...]:
    """What a stage may do, what costs least first: where it depends on the disk, a file comes last."""
    if problem.task != "train":
        return (NO_LEVERS,)
    return tuple(
        Levers(recompute=again, offload=away)
        for away in _CHOICES[problem.offload]
        for again in _CHOICES[problem.recompute]
    )


def levers_of_stage(stage: StagePlacement) -> Levers:
    return Levers(recompute=stage.recompute, offload=stage.offload)
