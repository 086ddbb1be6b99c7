"""The model as a chain of blocks with prefix sums. Decides what a range of blocks costs and keeps; knows no peer.

Cut `c` lies before the block at position `c`: cut 0 is the feed's side, cut `length` the loss's side. Ranges are
half-open positions into the chain. Neighbours: `pipeline` adds peers and links, `levers` says how memory may be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.levers import UPDATE_BYTES, Levers, levers_of_problem
from fusionai.scheduling.types import BlockCost, Plan, Problem
from fusionai.wire.codecs import FOR_PLANS, Codec, bytes_on_link, gently, packing

Floats = npt.NDArray[np.float64]


class Chain:
    """`blocks` in order, costs of `problem.task` at its batch sizes. `codecs`: block -> how what crosses behind it is
    packed, where that is not as the problem says for all; what is left to the plan counts as small as can be. `levers`:
    how memory is saved, where that is not as the problem says; a question may name others."""

    def __init__(
        self,
        problem: Problem,
        blocks: tuple[BlockCost, ...],
        codecs: Mapping[int, Codec] | None = None,
        levers: Levers | None = None,
    ) -> None:
        training = problem.task == "train"
        slots = 1.0 + problem.optimizer_bytes_per_trainable_byte
        self.blocks = blocks
        self.length = len(blocks)
        self.levers = levers_of_problem(problem) if levers is None else levers
        self._flops = _sums([b.forward_flops + (b.backward_flops if training else 0.0) for b in blocks])
        held = slots + problem.reduction_bytes_per_trainable_byte
        self._state = _sums([b.parameter_bytes + (held * b.trainable_bytes if training else 0.0) for b in blocks])
        self._trained = _sums([float(b.trainable_bytes) if training else 0.0 for b in blocks])
        self._saved = _sums([b.parameter_bytes + (slots - 1.0) * b.trainable_bytes for b in blocks])
        self._moving = _sums([slots * b.trainable_bytes for b in blocks])
        self._again = _sums([b.forward_flops if training else 0.0 for b in blocks])
        self._activations = [float(b.activation_bytes) if training else 0.0 for b in blocks]
        self._kept = _sums(self._activations)
        self._slots = _sums([(slots - 1.0) * b.trainable_bytes if training else 0.0 for b in blocks])
        self._updates = [min(6.0 * b.trainable_bytes, float(UPDATE_BYTES)) for b in blocks]
        # What enters the first block of all are inputs of the model, such as token ids: too small to count.
        self._entering = _sums([0.0, *(float(b.output_bytes) if training else 0.0 for b in blocks[:-1])])
        self._weights = [float(b.parameter_bytes) for b in blocks]
        self._all_weights = _sums(self._weights)
        self._workspace = [float(b.workspace_bytes) for b in blocks]
        self._usual: Codec = FOR_PLANS[-1] if problem.compression == "adaptive" else problem.compression
        self._logits = logits_block(problem)
        self._training = training
        self._pack(codecs or {})

    def with_codecs(self, codecs: Mapping[int, Codec]) -> Chain:
        """The same, what crosses behind these blocks packed so."""
        other = copy(self)
        other._pack(codecs)
        return other

    def _pack(self, codecs: Mapping[int, Codec]) -> None:
        # Nothing of the pipeline crosses cut 0; what the feed sends (token ids) is too small to count.
        self.forward_bytes, self.gradient_bytes = [0.0], [0.0]
        for block in self.blocks:
            usual = gently(self._usual) if block.block == self._logits else self._usual
            codec = codecs.get(block.block, usual) if self._training else "none"
            self.forward_bytes.append(bytes_on_link(packing(codec, forward=True), float(block.output_bytes)))
            back = bytes_on_link(packing(codec, forward=False), float(block.gradient_bytes))
            self.gradient_bytes.append(back if self._training else 0.0)

    def flops(self, start: int, end: int, levers: Levers | None = None) -> float:
        flops = self._flops[end] - self._flops[start]
        return flops + self._again[end] - self._again[start] if (levers or self.levers).recompute else flops

    def state_bytes(self, start: int, end: int) -> float:
        """Parameters and optimizer slots: what a snapshot or a checkpoint of the range holds."""
        return self._saved[end] - self._saved[start]

    def moving_bytes(self, start: int, end: int) -> float:
        """Of that, what steps change: a later snapshot has no more."""
        return self._moving[end] - self._moving[start]

    def resident_bytes(self, start: int, end: int, levers: Levers | None = None) -> float:
        """Parameters, their gradients and optimizer slots, other replicas' gradients, the largest workspace, and the
        activations of the block that is made again, if any is: there whatever is in flight. Slots in a file leave the
        pieces of an update, weights that lie elsewhere one block's."""
        levers = levers or self.levers
        held = self._state[end] - self._state[start] + max(self._workspace[start:end])
        if levers.recompute:
            held += max(self._activations[start:end])
        if levers.offload_weights:
            held += max(self._weights[start:end]) - self.weight_bytes(start, end)
        if levers.offload:
            held -= self.slot_bytes(start, end)
        return held + max(self._updates[start:end]) if levers.offload or levers.offload_weights else held

    def weight_bytes(self, start: int, end: int) -> float:
        """Parameters, trained or not."""
        return self._all_weights[end] - self._all_weights[start]

    def trained_bytes(self, start: int, end: int) -> float:
        """Parameters that are trained, and as much again their gradients; 0 for no blocks."""
        return self._trained[end] - self._trained[start] if start < end else 0.0

    def slot_bytes(self, start: int, end: int) -> float:
        """Optimizer state."""
        return self._slots[end] - self._slots[start]

    def in_flight_bytes(self, start: int, end: int, levers: Levers | None = None) -> float:
        """What one microbatch in flight takes: activations kept for backward (or what enters the blocks, where they are
        made again), and both directions of both cuts."""
        boundary = self.forward_bytes[start] + self.gradient_bytes[start]
        boundary += self.forward_bytes[end] + self.gradient_bytes[end]
        kept = self._entering if (levers or self.levers).recompute else self._kept
        return kept[end] - kept[start] + boundary

    def flops_table(self, levers: Levers) -> Floats:
        """[L, L + 1]: as `flops`, of all ranges; like the other tables 0 for empty ones."""
        flops = _differences(self._flops)
        if levers.recompute:
            sums = np.array(self._again)
            flops = flops + sums[None, :] - sums[:-1, None]
        return _upper(flops)

    def weights_table(self) -> Floats:
        return _upper(_differences(self._all_weights))

    def slots_table(self) -> Floats:
        return _upper(_differences(self._slots))

    def trained_table(self) -> Floats:
        return _upper(_differences(self._trained))

    def resident_table(self, levers: Levers) -> Floats:
        """As `resident_bytes`, in the same order of sums."""
        held = _differences(self._state) + _longest(self._workspace)
        if levers.recompute:
            held = held + _longest(self._activations)
        if levers.offload_weights:
            held = held + (_longest(self._weights) - _differences(self._all_weights))
        if levers.offload:
            held = held - _differences(self._slots)
        if levers.offload or levers.offload_weights:
            held = held + _longest(self._updates)
        return _upper(held)

    def flight_table(self, levers: Levers) -> Floats:
        """As `in_flight_bytes`."""
        sides = np.array(self.forward_bytes) + np.array(self.gradient_bytes)
        kept = _differences(self._entering if levers.recompute else self._kept)
        return _upper(kept + (sides[:-1, None] + sides[None, :]))

    def numbers(self, start: int, end: int) -> tuple[int, int]:
        """Half-open range of block numbers for a range of positions."""
        return self.blocks[start].block, self.blocks[end - 1].block + 1


def codecs_of(plan: Plan, replica: int = 0) -> dict[int, Codec]:
    """Last block of a stage of `replica` -> how what crosses behind it is packed."""
    return {
        stage.blocks[1] - 1: codec
        for stage, codec in zip(plan.stages, plan.codecs, strict=False)
        if stage.replica == replica
    }


def logits_block(problem: Problem) -> int | None:
    """The block behind which logits go to the job owner, who has the loss; None where nobody sends any: they stay in
    the pool, or are made by the owner."""
    place = next((role.place for role in problem.roles if role.role == "loss"), "owner")
    sent = place == "owner" and problem.kept_last < 2
    return problem.blocks[-2].block if sent and len(problem.blocks) > 1 else None


def check_blocks(blocks: tuple[BlockCost, ...]) -> None:
    """Blocks must be numbered without holes, so that a range of numbers says exactly which blocks a stage holds."""
    if not blocks:
        raise PlanError("expected at least one block to place, got none.", hint="Capture a model first.")
    for before, after in pairwise(blocks):
        if after.block != before.block + 1:
            raise PlanError(f"expected consecutive block numbers, got block {after.block} after block {before.block}.")


def _sums(values: list[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _differences(sums: list[float]) -> Floats:
    """[L, L + 1]: of each range."""
    values = np.array(sums)
    return values[None, :] - values[:-1, None]


def _longest(values: list[float]) -> Floats:
    """[L, L + 1]: the largest of each range, 0 of an empty one."""
    length = len(values)
    found = np.zeros((length, length + 1))
    for start in range(length):
        found[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return found


def _upper(table: Floats) -> Floats:
    """0 where the range is empty."""
    return np.triu(table, 1)
