"""Predicts how fast a fleet of equal machines trains and serves a model over slow links, and a fleet in one box.

The numbers of stages and replicas are found by trying all of them with the closed forms; no real pool is planned. Every
number that is not in the catalogue is a named assumption (`Assumptions`). The fleet in one box has free links, which
favours it. Activations are recomputed; if the inputs in flight don't fit beside the state, the outcome is marked as
crowded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Final

from fusionai.scheduling.analysis.catalogue import Device
from fusionai.scheduling.analysis.closed_form import GenerationTerms, Limit, PipelineTerms

HALF_BYTES: Final = 2
MOST_WEIGHTS: Final = 2 / 3
"""Largest fraction of a group's memory that weights and one cache may fill in a box; the rest is for more caches."""
INT4_BYTES: Final = 4.5 / 8
"""Four bits, and a half-precision scale for each 32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Numbers that no data sheet gives. Every `_part` is a fraction of a figure in the catalogue."""

    training_part: float = 0.40
    """Fraction of its dense fp16 peak that a machine of the fleet reaches in training (MFU)."""
    reference_training_part: float = 0.45
    forward_part: float = 0.45
    """Fraction of the dense fp16 peak in forward passes over whole sequences (prefill, scoring)."""
    reference_forward_part: float = 0.50
    decode_part: float = 0.50
    """Fraction of the dense fp16 peak in batched decoding, for both fleets. It matters where many sessions share a pass
    and arithmetic limits its speed."""
    bandwidth_part: float = 0.75
    """Fraction of its memory bandwidth that a machine reaches when it reads weights and caches."""
    memory_part: float = 0.85
    """Fraction of its memory that a machine can fill with a model."""
    overhead_s: float = 0.0002
    """Fixed time of a decoding pass on one stage, besides reading memory and computing."""
    context_tokens: int = 1024
    """Tokens cached per session in decoding."""
    state_bytes_per_parameter: float = 16.0
    """Weight and gradient in half precision, and three fp32 values for Adam."""
    gradient_bytes_per_parameter: float = 2.0
    electricity_usd_per_kwh: float = 0.15
    years: float = 3.0
    """Years of full use over which a machine's price is spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of a model. `trainable`: fraction of the parameters that is trained, the rest in half precision."""

    name: str
    parameters: float
    layers: int
    width: int
    cache_token_bytes: int
    """Keys and values of one token in half precision; 0: the model does not generate."""
    vocabulary: int
    sequence_tokens: int
    batch_tokens: int
    """Tokens of one optimizer step."""
    trainable: float = 1.0
    causal: bool = True
    """True: a token attends to the tokens before it. False: to its whole sequence."""

    def attention_flops(self, context_tokens: float) -> float:
        """FLOPs of attention in one token's forward pass, which the parameter count leaves out: products of its query
        with the keys of `context_tokens` tokens, and of its scores with their values, in all layers (Chowdhery et al.,
        PaLM, appendix B; in all shapes here the heads together are as wide as the model)."""
        return 4.0 * self.layers * self.width * context_tokens

    @property
    def sequence_flops(self) -> float:
        """Average FLOPs of the forward pass per token of a whole sequence."""
        attended = self.sequence_tokens / 2 if self.causal else self.sequence_tokens
        return 2 * self.parameters + self.attention_flops(attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`count` equal machines."""

    device: Device
    count: int

    @property
    def name(self) -> str:
        return f"{self.count} x {self.device.name}"

    @property
    def flops_per_s(self) -> float:
        """Peak speed of one machine."""
        return self.device.speed("fp16").flops_per_s

    @property
    def memory_bytes(self) -> float:
        """Memory of one machine."""
        return self.device.memory_bytes.value

    @property
    def power_w(self) -> float:
        """Power of all machines together."""
        return self.count * self.device.power_w.value

    @property
    def price_usd(self) -> float | None:
        """Price of all machines together; None if the catalogue has no price."""
        return None if self.device.price_usd is None else self.count * self.device.price_usd.value


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNetwork:
    """Access link of each machine, the same in both directions; `latency_s` is one way between any two machines."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisations:
    """Measures against slow links. `boundary_part`: bytes of boundary tensors relative to half precision."""

    overlap: bool = False
    boundary_part: float = 1.0
    local_steps: int = 1
    """Steps between two exchanges of replicas; 1: replicas exchange gradients in every step."""
    sync_part: float = 1.0
    """Bytes that replicas exchange, relative to half precision."""
    recompute: bool = True
    replicas: bool = True
    """False: a single pipeline of the best length."""
    weight_bytes: float = HALF_BYTES
    """Bytes per parameter in serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeed:
    """Predicted speed. `terms`: the inputs of the closed form, which a discrete-event run can also take."""

    tokens_per_s: float
    stages: int = 1
    replicas: int = 1
    limit: Limit = "compute"
    terms: PipelineTerms | GenerationTerms | None = None
    in_flight_bytes: float = 0.0
    """Training: layer inputs that the first stage keeps for recomputation, of all microbatches in flight."""
    crowded: bool = False
    """True: `in_flight_bytes` don't fit beside the stage's state. Fewer microbatches in flight or more stages would be
    slower than `tokens_per_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """The model does not fit the fleet: it lacks `missing_bytes` of memory."""

    missing_bytes: float


def train(
    shape: Shape, fleet: Fleet, network: FleetNetwork, optimisations: Optimisations, known: Assumptions
) -> PredictedSpeed | Misfit:
    """Training speed with the best numbers of stages and replicas."""
    room = fleet.memory_bytes * known.memory_part
    state = state_bytes(shape, known)
    speed = fleet.flops_per_s * known.training_part
    forward, backward = _training_flops(shape, optimisations.recompute)
    tokens = shape.sequence_tokens
    boundary_s = HALF_BYTES * tokens * shape.width * optimisations.boundary_part / network.bandwidth_bytes_per_s
    best: PipelineTerms | None = None
    for stages in range(max(1, ceil(state / room)), min(fleet.count, shape.layers) + 1):
        replicas = fleet.count // stages if optimisations.replicas else 1
        microbatches = shape.batch_tokens / (replicas * tokens)
        if microbatches < 1:
            continue
        gradient = known.gradient_bytes_per_parameter * shape.parameters * shape.trainable / stages
        exchanged = 2 * (replicas - 1) / replicas * gradient * optimisations.sync_part / optimisations.local_steps
        alone = stages == 1
        terms = PipelineTerms(
            stages=stages,
            replicas=replicas,
            microbatches=round(microbatches),
            forward_s=forward / stages * tokens / speed,
            backward_s=backward / stages * tokens / speed,
            activation_s=0.0 if alone else boundary_s,
            gradient_s=0.0 if alone else boundary_s,
            latency_s=network.latency_s,
            sync_s=exchanged / network.bandwidth_bytes_per_s,
            overlapped=optimisations.overlap,
        )
        if best is None or _speed(terms, tokens) > _speed(best, tokens):
            best = terms
    if best is None:
        return Misfit(missing_bytes=max(0.0, state - room * min(fleet.count, shape.layers)))
    in_flight = best.in_flight if best.stages > 1 else 1
    in_flight_bytes = in_flight * HALF_BYTES * tokens * shape.width * shape.layers / best.stages
    return PredictedSpeed(
        tokens_per_s=_speed(best, tokens),
        stages=best.stages,
        replicas=best.replicas,
        limit=best.limit,
        terms=best,
        in_flight_bytes=in_flight_bytes,
        crowded=state / best.stages + in_flight_bytes > fleet.memory_bytes,
    )


def train_in_one_box(
    shape: Shape,
    fleet: Fleet,
    optimisations: Optimisations,  # noqa: ARG001
    known: Assumptions,
) -> PredictedSpeed | Misfit:
    """Training speed in one box: links are free, memory is shared, nothing is recomputed."""
    missing = state_bytes(shape, known) - fleet.count * fleet.memory_bytes * known.memory_part
    if missing > 0:
        return Misfit(missing_bytes=missing)
    speed = fleet.count * fleet.flops_per_s * known.reference_training_part
    rate = speed / sum(_training_flops(shape, recompute=False))
    return PredictedSpeed(tokens_per_s=rate)


def generate(
    shape: Shape, fleet: Fleet, network: FleetNetwork, optimisations: Optimisations, known: Assumptions
) -> PredictedSpeed | Misfit:
    """Decoding speed with as many sessions as memory holds: the most tokens per second of all sessions together."""
    room = fleet.memory_bytes * known.memory_part
    weights = shape.parameters * optimisations.weight_bytes
    best: GenerationTerms | None = None
    for stages in range(1, min(fleet.count, shape.layers) + 1):
        cache = shape.cache_token_bytes * known.context_tokens / stages
        sessions = floor((room - weights / stages) / cache)
        if sessions < 1:
            continue
        terms = _generation(shape, fleet, network, optimisations, known, stages, sessions)
        if best is None or terms.tokens_per_s > best.tokens_per_s:
            best = terms
    if best is None:
        least = weights + shape.cache_token_bytes * known.context_tokens
        return Misfit(missing_bytes=max(0.0, least - room * min(fleet.count, shape.layers)))
    return PredictedSpeed(
        tokens_per_s=best.tokens_per_s, stages=best.stages, replicas=best.replicas, limit=best.limit, terms=best
    )


def generate_in_one_box(
    shape: Shape, fleet: Fleet, optimisations: Optimisations, known: Assumptions
) -> PredictedSpeed | Misfit:
    """Decoding speed in one box. Each replica takes the smallest group of 1, 2, 4, ... machines where half-precision
    weights leave room for caches; smaller weights don't shrink the group. Links within a group are free."""
    cache = shape.cache_token_bytes * known.context_tokens
    room = fleet.memory_bytes * known.memory_part
    needed = shape.parameters * HALF_BYTES + cache
    if needed > fleet.count * room:
        return Misfit(missing_bytes=needed - fleet.count * room)
    group = 1
    while 2 * group <= fleet.count and group * room * MOST_WEIGHTS < needed:
        group *= 2
    group = group if group * room >= needed else fleet.count
    weights = shape.parameters * optimisations.weight_bytes
    sessions = floor((group * room - weights) / cache)
    bandwidth = group * fleet.device.memory_bandwidth_bytes_per_s.value * known.bandwidth_part
    memory_s = (weights + sessions * cache) / bandwidth
    flops = 2 * shape.parameters + shape.attention_flops(known.context_tokens)
    compute_s = flops * sessions / (group * fleet.flops_per_s * known.decode_part)
    replicas = fleet.count // group
    return PredictedSpeed(
        tokens_per_s=replicas * sessions / (max(memory_s, compute_s) + known.overhead_s),
        replicas=replicas,
        limit="memory bandwidth" if memory_s >= compute_s else "compute",
    )


def forward(
    shape: Shape, fleet: Fleet, network: FleetNetwork, optimisations: Optimisations, known: Assumptions
) -> PredictedSpeed | Misfit:
    """Speed of forward passes over whole sequences (prefill, scoring, embeddings) in a filled pipeline."""
    # The logits of one sequence take memory beside the weights.
    logits = HALF_BYTES * shape.sequence_tokens * shape.vocabulary
    room = fleet.memory_bytes * known.memory_part - logits
    weights = shape.parameters * optimisations.weight_bytes
    best: GenerationTerms | None = None
    for stages in range(1, min(fleet.count, shape.layers) + 1):
        if weights / stages > room:
            continue
        terms = _sequences(shape, fleet, network, optimisations, known, stages)
        # Equally fast pipelines differ by rounding; the margin keeps the shortest.
        if best is None or _filled_speed(terms) > _filled_speed(best) * (1 + 1e-9):
            best = terms
    if best is None:
        return Misfit(missing_bytes=max(0.0, weights - room * min(fleet.count, shape.layers)))
    return PredictedSpeed(
        tokens_per_s=_filled_speed(best), stages=best.stages, replicas=best.replicas, limit=best.limit, terms=best
    )


def forward_in_one_box(
    shape: Shape, fleet: Fleet, optimisations: Optimisations, known: Assumptions
) -> PredictedSpeed | Misfit:
    logits = HALF_BYTES * shape.sequence_tokens * shape.vocabulary
    missing = (
        shape.parameters * optimisations.weight_bytes + logits - fleet.count * fleet.memory_bytes * known.memory_part
    )
    if missing > 0:
        return Misfit(missing_bytes=missing)
    rate = fleet.count * fleet.flops_per_s * known.reference_forward_part / shape.sequence_flops
    return PredictedSpeed(tokens_per_s=rate)


def state_bytes(shape: Shape, known: Assumptions) -> float:
    """Memory of training: state of the trained parameters, half-precision weights of the rest."""
    trained = shape.parameters * shape.trainable * known.state_bytes_per_parameter
    return trained + shape.parameters * (1 - shape.trainable) * HALF_BYTES


def _training_flops(shape: Shape, recompute: bool) -> tuple[float, float]:
    """FLOPs of one token's forward and backward pass. Frozen parameters need no gradient of their own; both operands of
    the products in attention do."""
    forward = shape.sequence_flops
    attention = forward - 2 * shape.parameters
    backward = 2 * shape.parameters * (1 + (shape.trainable if shape.trainable == 1.0 else 0.0)) + 2 * attention
    return forward, backward + (forward if recompute else 0.0)


def _speed(terms: PipelineTerms, sequence_tokens: int) -> float:
    return terms.replicas * terms.microbatches * sequence_tokens / terms.step_s


def _sequences(
    shape: Shape, fleet: Fleet, network: FleetNetwork, optimisations: Optimisations, known: Assumptions, stages: int
) -> GenerationTerms:
    """Terms where each pass is one whole sequence. Its arithmetic takes longer than reading the weights, and no result
    goes back to the first stage. One pass more than needed to fill the pipeline is in flight."""
    tokens, speed = shape.sequence_tokens, fleet.flops_per_s * known.forward_part
    row_bytes = HALF_BYTES * shape.width * optimisations.boundary_part
    alone = GenerationTerms(
        stages=stages,
        replicas=fleet.count // stages,
        passes=1,
        rows=tokens,
        weights_s=0.0,
        compute_s=shape.sequence_flops * tokens / stages / speed,
        overhead_s=0.0,
        transfer_s=0.0 if stages == 1 else tokens * row_bytes / network.bandwidth_bytes_per_s,
        latency_s=network.latency_s,
        hops=stages - 1,
    )
    return replace(alone, passes=floor(alone.trip_s / max(alone.stage_s, alone.transfer_s)) + 1)


def _filled_speed(terms: GenerationTerms) -> float:
    """Tokens per second of pipelines with enough passes in flight: the busiest stage or link limits them."""
    return terms.replicas * terms.rows / max(terms.stage_s, terms.transfer_s)


def _generation(
    shape: Shape,
    fleet: Fleet,
    network: FleetNetwork,
    optimisations: Optimisations,
    known: Assumptions,
    stages: int,
    sessions: int,
) -> GenerationTerms:
    """Terms with the number of passes in flight that gives the most tokens per second. More passes shorten a trip
    through the pipeline and lengthen a round of the busiest stage or link; the best number is where the two meet."""
    bandwidth = fleet.device.memory_bandwidth_bytes_per_s.value * known.bandwidth_part
    speed = fleet.flops_per_s * known.decode_part
    cache = shape.cache_token_bytes * known.context_tokens / stages
    weights = shape.parameters * optimisations.weight_bytes / stages
    flops = (2 * shape.parameters + shape.attention_flops(known.context_tokens)) / stages
    row_bytes = HALF_BYTES * shape.width * optimisations.boundary_part

    def with_passes(passes: int) -> GenerationTerms:
        rows = sessions / passes
        return GenerationTerms(
            stages=stages,
            replicas=fleet.count // stages,
            passes=passes,
            rows=rows,
            weights_s=(weights + rows * cache) / bandwidth,
            compute_s=flops * rows / speed,
            overhead_s=known.overhead_s,
            transfer_s=0.0 if stages == 1 else rows * row_bytes / network.bandwidth_bytes_per_s,
            latency_s=network.latency_s,
            hops=0 if stages == 1 else stages,
        )

    low, high = 1, sessions
    while low < high:
        middle = (low + high) // 2
        terms = with_passes(middle)
        if middle * max(terms.stage_s, terms.transfer_s) >= terms.trip_s:
            high = middle
        else:
            low = middle + 1
    return max((with_passes(passes) for passes in {max(1, low - 1), low}), key=lambda terms: terms.tokens_per_s)
