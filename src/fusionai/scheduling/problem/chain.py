"""Prices ranges of blocks: FLOPs, memory and boundary bytes of the model as a chain of blocks, by prefix sums.

Cut `c` lies before the block at position `c`: cut 0 is the feed's side, cut `length` the loss's side. Ranges are
half-open positions into the chain. `StageTables` has the costs of all ranges with every variant, as arrays.
`pipeline` adds peers and links; `memory_savings` defines how memory may be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.kernels.compiled import Floats, Integers
from fusionai.scheduling.problem.memory_savings import UPDATE_BYTES, MemorySavings, savings_of_problem
from fusionai.scheduling.problem.types import BlockCost, Plan, Problem
from fusionai.wire.codecs import FOR_PLANS, Codec, bytes_on_link, gently, packing


class Chain:
    """Costs of `blocks`, in order, for `problem.task` at its batch sizes.

    `codecs`: block -> codec of the boundary after it, see `boundary_bytes`. `savings`: how stages save memory; None
    takes the problem's. A method's `savings` argument replaces them for one call."""

    def __init__(
        self,
        problem: Problem,
        blocks: tuple[BlockCost, ...],
        codecs: Mapping[int, Codec] | None = None,
        savings: MemorySavings | None = None,
    ) -> None:
        training = problem.task == "train"
        slots = 1.0 + problem.optimizer_bytes_per_trainable_byte
        self.problem = problem
        self.blocks = blocks
        self.length = len(blocks)
        self.savings = savings_of_problem(problem) if savings is None else savings
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
        # The first block's inputs are the model's, such as token ids: too small to count.
        self._entering = _sums([0.0, *(float(b.output_bytes) if training else 0.0 for b in blocks[:-1])])
        self._weights = [float(b.parameter_bytes) for b in blocks]
        self._all_weights = _sums(self._weights)
        self._workspace = [float(b.workspace_bytes) for b in blocks]
        self.forward_bytes, self.gradient_bytes = boundary_bytes(problem, blocks, codecs or {})

    def with_codecs(self, codecs: Mapping[int, Codec]) -> Chain:
        """A copy in which the boundary after each block of `codecs` is packed with its codec."""
        other = copy(self)
        other.forward_bytes, other.gradient_bytes = boundary_bytes(self.problem, self.blocks, codecs)
        return other

    def flops(self, start: int, end: int, savings: MemorySavings | None = None) -> float:
        flops = self._flops[end] - self._flops[start]
        return flops + self._again[end] - self._again[start] if (savings or self.savings).recompute else flops

    def state_bytes(self, start: int, end: int) -> float:
        """Parameters and optimizer slots: the content of a snapshot or a checkpoint of the range."""
        return self._saved[end] - self._saved[start]

    def moving_bytes(self, start: int, end: int) -> float:
        """The part of `state_bytes` that steps change, which is all that a later snapshot has to carry."""
        return self._moving[end] - self._moving[start]

    def resident_bytes(self, start: int, end: int, savings: MemorySavings | None = None) -> float:
        """Memory of the range with no microbatch in flight: parameters, their gradients and optimizer slots, gradients
        of other replicas, the largest workspace and, with `recompute`, the largest activations of one block. With
        `offload` only the chunk of an update stays of the slots, with `offload_weights` one block of the weights."""
        savings = savings or self.savings
        held = self._state[end] - self._state[start] + max(self._workspace[start:end])
        if savings.recompute:
            held += max(self._activations[start:end])
        if savings.offload_weights:
            held += max(self._weights[start:end]) - self.weight_bytes(start, end)
        if savings.offload:
            held -= self.slot_bytes(start, end)
        return held + max(self._updates[start:end]) if savings.offload or savings.offload_weights else held

    def weight_bytes(self, start: int, end: int) -> float:
        """Bytes of the parameters, trained or not."""
        return self._all_weights[end] - self._all_weights[start]

    def trained_bytes(self, start: int, end: int) -> float:
        """Bytes of the trained parameters, which is also the size of their gradients; 0 for no blocks."""
        return self._trained[end] - self._trained[start] if start < end else 0.0

    def slot_bytes(self, start: int, end: int) -> float:
        """Bytes of the optimizer slots."""
        return self._slots[end] - self._slots[start]

    def in_flight_bytes(self, start: int, end: int, savings: MemorySavings | None = None) -> float:
        """Memory of one microbatch in flight: activations kept for backward (with `recompute`, the blocks' inputs
        only), and the boundary tensors of both cuts in both directions."""
        boundary = self.forward_bytes[start] + self.gradient_bytes[start]
        boundary += self.forward_bytes[end] + self.gradient_bytes[end]
        kept = self._entering if (savings or self.savings).recompute else self._kept
        return kept[end] - kept[start] + boundary

    def flops_table(self, savings: MemorySavings) -> Floats:
        """`flops` of every range as [L, L + 1], [start, end]. Like all tables here it is 0 for empty ranges."""
        flops = _differences(self._flops)
        if savings.recompute:
            sums = np.array(self._again)
            flops = flops + sums[None, :] - sums[:-1, None]
        return _upper(flops)

    def file_tables(self) -> tuple[Floats, Floats, Floats]:
        """`weight_bytes`, `slot_bytes` and `trained_bytes` of every range."""
        weights, slots, trained = (_upper(_differences(s)) for s in (self._all_weights, self._slots, self._trained))
        return weights, slots, trained

    def resident_table(self, savings: MemorySavings) -> Floats:
        """`resident_bytes` of every range, added in the same order so that the bits are equal."""
        held = _differences(self._state) + _longest(self._workspace)
        if savings.recompute:
            held = held + _longest(self._activations)
        if savings.offload_weights:
            held = held + (_longest(self._weights) - _differences(self._all_weights))
        if savings.offload:
            held = held - _differences(self._slots)
        if savings.offload or savings.offload_weights:
            held = held + _longest(self._updates)
        return _upper(held)

    def flight_table(self, savings: MemorySavings) -> Floats:
        """`in_flight_bytes` of every range."""
        sides = np.array(self.forward_bytes) + np.array(self.gradient_bytes)
        kept = _differences(self._entering if savings.recompute else self._kept)
        return _upper(kept + (sides[:-1, None] + sides[None, :]))

    def numbers(self, start: int, end: int) -> tuple[int, int]:
        """Half-open range of block numbers for a range of positions."""
        return self.blocks[start].block, self.blocks[end - 1].block + 1


def boundary_bytes(
    problem: Problem, blocks: tuple[BlockCost, ...], codecs: Mapping[int, Codec]
) -> tuple[list[float], list[float]]:
    """Bytes of activations and of gradients that cross each cut, packed with the codecs. A block without an entry in
    `codecs` uses `problem.compression`, and `adaptive` counts as the smallest codec of a plan."""
    training, logits = problem.task == "train", logits_block(problem)
    usual: Codec = FOR_PLANS[-1] if problem.compression == "adaptive" else problem.compression
    # No stage sends over cut 0; the token ids that the feed sends are too small to count.
    forward_bytes, gradient_bytes = [0.0], [0.0]
    for block in blocks:
        default = gently(usual) if block.block == logits else usual
        codec = codecs.get(block.block, default) if training else "none"
        forward_bytes.append(bytes_on_link(packing(codec, forward=True), float(block.output_bytes)))
        back_bytes = bytes_on_link(packing(codec, forward=False), float(block.gradient_bytes))
        gradient_bytes.append(back_bytes if training else 0.0)
    return forward_bytes, gradient_bytes


def codecs_of(plan: Plan, replica: int = 0) -> dict[int, Codec]:
    """Last block of a stage of `replica` -> codec of the boundary after it."""
    return {
        stage.blocks[1] - 1: codec
        for stage, codec in zip(plan.stages, plan.codecs, strict=False)
        if stage.replica == replica
    }


def logits_block(problem: Problem) -> int | None:
    """The block after which logits go to the job owner, who has the loss. None if no logits are sent: they stay in the
    pool, or the owner computes them."""
    place = next((role.place for role in problem.roles if role.role == "loss"), "owner")
    sent = place == "owner" and problem.kept_last < 2
    return problem.blocks[-2].block if sent and len(problem.blocks) > 1 else None


def check_blocks(blocks: tuple[BlockCost, ...]) -> None:
    """Raise `PlanError` unless block numbers are consecutive, so that a range of them identifies a stage's blocks."""
    if not blocks:
        raise PlanError("expected at least one block to place, got none.", hint="Capture a model first.")
    for before, after in pairwise(blocks):
        if after.block != before.block + 1:
            raise PlanError(f"expected consecutive block numbers, got block {after.block} after block {before.block}.")


def _sums(values: list[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _differences(sums: list[float]) -> Floats:
    """[L, L + 1]: the sum over each range."""
    values = np.array(sums)
    return values[None, :] - values[:-1, None]


def _longest(values: list[float]) -> Floats:
    """[L, L + 1]: the largest value of each range, 0 for an empty one."""
    length = len(values)
    found = np.zeros((length, length + 1))
    for start in range(length):
        found[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return found


def _upper(table: Floats) -> Floats:
    """The table with 0 for empty ranges."""
    return np.triu(table, 1)


@dataclass(frozen=True, slots=True)
class StageTables:
    """Costs for W variants (how a stage saves memory) and L blocks. Arrays are [W, L, L + 1], 0 for an empty range."""

    variants: tuple[MemorySavings, ...]
    flops: Floats
    """Operations of forward and backward of one microbatch."""
    read_bytes: Floats
    """Weights that one microbatch reads from a file or host memory."""
    slot_bytes: Floats
    """Optimizer state that an update reads and writes in a file."""
    trained_bytes: Floats
    """Weights that an update reads and writes in a file or host memory."""
    resident_bytes: Floats
    flight_bytes: Floats
    """Memory of one microbatch in flight."""
    needless: Integers
    """[W]: mask of the variants with all techniques of this variant and more. They are useless if this variant has room
    for all microbatches."""

    def with_flight(self, chain: Chain) -> StageTables:
        """Return a copy with the boundary sizes of `chain`."""
        return replace(self, flight_bytes=np.array([chain.flight_table(variant) for variant in self.variants]))


def stage_tables(chain: Chain, variants: Sequence[MemorySavings]) -> StageTables:
    """Return the tables of all ranges of `chain`."""
    weights, slots, trained = chain.file_tables()
    none = np.zeros_like(weights)
    needless = [sum(1 << k for k, more in enumerate(variants) if more.includes(one)) for one in variants]
    return StageTables(
        variants=tuple(variants),
        flops=np.array([chain.flops_table(one) for one in variants]),
        read_bytes=np.array([2 * weights if one.offload_weights else none for one in variants]),
        slot_bytes=np.array([2 * slots if one.offload else none for one in variants]),
        trained_bytes=np.array([2 * trained if one.offload_weights else none for one in variants]),
        resident_bytes=np.array([chain.resident_table(one) for one in variants]),
        flight_bytes=np.array([chain.flight_table(one) for one in variants]),
        needless=np.array(needless, dtype=np.int64),
    )
