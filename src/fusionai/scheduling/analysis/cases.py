"""The comparison table: models, networks and optimisations, whether the fleet is comparable in each cell, and how far
that moves when one of the numbers is wrong by a fifth.

An optimisation that saves bytes but slows learning gains nothing. So each one that changes what is computed is listed
with its measured effect on the loss of real training jobs. The models were small and trained briefly; each entry says
so, and nothing is extrapolated.

`analysis.fleets` computes each cell. `fusion analyze` and `docs/analysis.md` report `compare` and `swings`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from statistics import fmean
from typing import Final, Literal

import msgspec

from fusionai.scheduling.analysis.catalogue import Device
from fusionai.scheduling.analysis.fleets import (
    INT4_BYTES,
    Assumptions,
    Fleet,
    FleetNetwork,
    Misfit,
    Optimisations,
    PredictedSpeed,
    Shape,
    forward,
    forward_in_one_box,
    generate,
    generate_in_one_box,
    train,
    train_in_one_box,
)
from fusionai.wire.codecs import Codec, Exchanged, bytes_on_link, packing

FLOAT_BYTES: Final = 4
HALF_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Effect of one optimisation. `part`: bytes relative to half precision. `losses`: relative change of the held-out
    loss caused by the optimisation (loss with it / loss without it - 1), one per seed. `how`: the training jobs,
    `command`: the program that ran them."""

    optimisation: str
    part: float
    losses: tuple[float, ...]
    how: str
    command: str

    @property
    def mean(self) -> float:
        return fmean(self.losses)


def boundary_part(codec: Codec) -> float:
    """Bytes of a boundary tensor relative to half precision, averaged over the forward and the backward direction."""
    ways = [bytes_on_link(packing(codec, forward=forward), FLOAT_BYTES) for forward in (True, False)]
    return fmean(ways) / HALF_BYTES


def exchange_part(codec: Exchanged) -> float:
    """Bytes that replicas with local updates exchange, relative to half precision."""
    return bytes_on_link(codec, FLOAT_BYTES) / HALF_BYTES


LOCAL_STEPS: Final = 50
LOCAL_PART: Final = exchange_part("int2") * 56 * LOCAL_STEPS / 1500
"""Bytes of exchanges over a job of 1,500 steps, relative to half precision every `LOCAL_STEPS` steps. Replicas exchange
more often after the warm-up, which makes 56 exchanges instead of 30."""
_BOUNDARIES: Final = "Llama type, 14M parameters, source text, 200 steps of 8 x 128 tokens, 3 stages in a pool"
EFFECTS: Final[tuple[Effect, ...]] = (
    Effect(
        optimisation="8-bit boundary",
        part=boundary_part("int8"),
        losses=(-0.0003, -0.0069, 0.0016),
        how=_BOUNDARIES,
        command="benchmarks/compression.py",
    ),
    Effect(
        optimisation="2-bit boundary",
        part=boundary_part("uneven"),
        losses=(0.0058, -0.0188, -0.0036),
        how=_BOUNDARIES,
        command="benchmarks/compression.py",
    ),
    Effect(
        optimisation="local updates",
        part=LOCAL_PART,
        losses=(0.0090, -0.0011, 0.0060),
        how="Llama type, 0.2M parameters, source text, 1,500 steps of 2 replicas x 64 x 128 tokens in a pool, agreeing "
        "every 50, in 320 steps after the warm-up every 10",
        command="benchmarks/local_updates.py",
    ),
)


Task = Literal["train", "decode", "forward"]
Verdict = Literal["holds", "within 2x", "fails", "does not fit"]

HOLDS: Final = 0.9
"""Least ratio of the fleet's speed to the reference's at which the fleet counts as comparable, chosen."""
WITHIN: Final = 0.5

BERT: Final = Shape(
    name="BERT-Large",
    parameters=335e6,
    layers=24,
    width=1024,
    cache_token_bytes=0,
    vocabulary=30_522,
    sequence_tokens=512,
    batch_tokens=2**19,
    causal=False,
)
GPT3_24: Final = Shape(
    name="GPT-3 type, 24 layers",
    parameters=1.316e9,
    layers=24,
    width=2048,
    cache_token_bytes=2 * 24 * 2048 * 2,
    vocabulary=50_257,
    sequence_tokens=2048,
    batch_tokens=2**20,
)


def _llama(name: str, parameters: float, layers: int, width: int) -> Shape:
    return Shape(
        name=name,
        parameters=parameters,
        layers=layers,
        width=width,
        cache_token_bytes=2 * layers * 1024 * 2,
        vocabulary=128_256,
        sequence_tokens=4096,
        batch_tokens=2**21,
    )


LLAMA_8B: Final = _llama("Llama-3-8B", 8.03e9, 32, 4096)
LLAMA_70B: Final = _llama("Llama-3-70B", 70.6e9, 80, 8192)
LLAMA_70B_ADAPTERS: Final = replace(LLAMA_70B, name="Llama-3-70B, adapters", trainable=0.003)
TRAINED: Final = (BERT, GPT3_24, LLAMA_8B, LLAMA_70B, LLAMA_70B_ADAPTERS)
DECODED: Final = (GPT3_24, LLAMA_8B, LLAMA_70B)
FORWARDED: Final = (BERT, GPT3_24, LLAMA_8B, LLAMA_70B)

MBIT: Final = 125_000.0
BANDWIDTHS_MBIT: Final = (10, 30, 100, 300, 1_000, 3_000, 10_000)
LATENCIES_MS: Final = (1, 20, 50, 100)

TEXTBOOK: Final = "as it stands"
BEST: Final = "overlap, 2-bit, local updates"
LITERATURE: Final = "overlap, 64x of the literature, local updates"
_INT8, _UNEVEN = boundary_part("int8"), boundary_part("uneven")
TRAINING_OPTIMISATIONS: Final[dict[str, Optimisations]] = {
    TEXTBOOK: Optimisations(),
    "overlap": Optimisations(overlap=True),
    "overlap, 8-bit": Optimisations(overlap=True, boundary_part=_INT8),
    "one pipeline, overlap, 8-bit": Optimisations(overlap=True, boundary_part=_INT8, replicas=False),
    "overlap, 8-bit, local updates": Optimisations(
        overlap=True, boundary_part=_INT8, local_steps=LOCAL_STEPS, sync_part=LOCAL_PART
    ),
    BEST: Optimisations(overlap=True, boundary_part=_UNEVEN, local_steps=LOCAL_STEPS, sync_part=LOCAL_PART),
    "overlap, 2-bit, local updates, no recomputation": Optimisations(
        overlap=True, boundary_part=_UNEVEN, local_steps=LOCAL_STEPS, sync_part=LOCAL_PART, recompute=False
    ),
    LITERATURE: Optimisations(overlap=True, boundary_part=1 / 64, local_steps=LOCAL_STEPS, sync_part=LOCAL_PART),
}
"""Optimisations of the training cells by name. `local updates`: replicas exchange in 2 bits, once in 50 steps and more
often early on. "no recomputation" shows what recomputation costs; memory may not allow training without it.
`analysis.cases` has the effect of each optimisation on the loss, except of 64x compression: that figure is from the
literature, for models designed for it, and this software has no such codec."""
HALF: Final = "fp16"
INT4: Final = "4-bit weights"
INT4_INT8: Final = "4-bit weights, 8-bit boundary"
DECODING_OPTIMISATIONS: Final[dict[str, Optimisations]] = {
    HALF: Optimisations(),
    "8-bit boundary": Optimisations(boundary_part=_INT8),
    INT4: Optimisations(weight_bytes=INT4_BYTES),
    INT4_INT8: Optimisations(weight_bytes=INT4_BYTES, boundary_part=_INT8),
}
BOTH_INT4: Final = "4-bit weights on both sides"
FORWARD_OPTIMISATIONS: Final[dict[str, Optimisations]] = {
    HALF: Optimisations(),
    "8-bit boundary": Optimisations(boundary_part=_INT8),
    "4-bit boundary": Optimisations(boundary_part=boundary_part("int4")),
    INT4: Optimisations(weight_bytes=INT4_BYTES),
}


IN_FLEET: Final = {"train": train, "decode": generate, "forward": forward}
IN_BOX: Final = {"train": train_in_one_box, "decode": generate_in_one_box, "forward": forward_in_one_box}
_TABLES: Final[dict[Task, tuple[tuple[Shape, ...], dict[str, Optimisations]]]] = {
    "train": (TRAINED, TRAINING_OPTIMISATIONS),
    "decode": (DECODED, DECODING_OPTIMISATIONS),
    "forward": (FORWARDED, FORWARD_OPTIMISATIONS),
}


def _ratio(ours: PredictedSpeed | Misfit, theirs: PredictedSpeed | Misfit) -> float | None:
    if isinstance(ours, Misfit) or isinstance(theirs, Misfit):
        return None
    return ours.tokens_per_s / theirs.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model, one task, one network, one set of optimisations."""

    task: Task
    model: str
    optimisations: str
    bandwidth_mbit: int
    latency_ms: int
    ours: PredictedSpeed | Misfit
    theirs: PredictedSpeed | Misfit

    @property
    def ratio(self) -> float | None:
        """Our tokens per second divided by theirs; None unless the model fits both fleets."""
        return _ratio(self.ours, self.theirs)

    @property
    def verdict(self) -> Verdict:
        return verdict(self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One data sheet figure of both fleets; `better` says whether more or less of it is better."""

    what: str
    unit: str
    ours: float
    theirs: float
    better: Literal["more", "less"]

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`fleet` over each of the networks, compared with `reference` in one box."""

    fleet: Fleet
    reference: Fleet
    assumptions: Assumptions
    cells: tuple[Cell, ...]
    peaks: tuple[Peak, ...]

    def cell(self, task: Task, model: str, optimisations: str, bandwidth_mbit: int, latency_ms: int) -> Cell:
        wanted = (task, model, optimisations, bandwidth_mbit, latency_ms)
        for cell in self.cells:
            if (cell.task, cell.model, cell.optimisations, cell.bandwidth_mbit, cell.latency_ms) == wanted:
                return cell
        raise KeyError(wanted)

    def joules_per_million_tokens(self, side: Literal["ours", "theirs"], outcome: PredictedSpeed) -> float:
        """Energy with all machines at full power."""
        fleet = self.fleet if side == "ours" else self.reference
        return fleet.power_w * 1e6 / outcome.tokens_per_s

    def usd_per_million_tokens(self, side: Literal["ours", "theirs"], outcome: PredictedSpeed) -> float | None:
        """Electricity plus the machines' price spread over `years` of full use; None if the fleet has no price."""
        fleet, known = (self.fleet if side == "ours" else self.reference), self.assumptions
        if fleet.price_usd is None:
            return None
        electricity = self.joules_per_million_tokens(side, outcome) / 3.6e6 * known.electricity_usd_per_kwh
        return electricity + fleet.price_usd / (known.years * 365 * 86_400) * 1e6 / outcome.tokens_per_s


def compare(fleet: Fleet, reference: Fleet, known: Assumptions) -> Comparison:
    """Compute every cell. Pure: the same catalogue entries and assumptions give the same table."""
    return Comparison(
        fleet=fleet,
        reference=reference,
        assumptions=known,
        cells=tuple(_cells(fleet, reference, known)),
        peaks=tuple(_peaks(fleet, reference)),
    )


def verdict(ratio: float | None) -> Verdict:
    if ratio is None:
        return "does not fit"
    if ratio >= HOLDS:
        return "holds"
    return "within 2x" if ratio >= WITHIN else "fails"


def _cells(fleet: Fleet, reference: Fleet, known: Assumptions) -> Iterator[Cell]:
    for task, (shapes, table) in _TABLES.items():
        for shape in shapes:
            theirs = IN_BOX[task](shape, reference, Optimisations(), known)
            for (name, optimisations), mbit, ms in product(table.items(), BANDWIDTHS_MBIT, LATENCIES_MS):
                network = FleetNetwork(bandwidth_bytes_per_s=mbit * MBIT, latency_s=ms / 1e3)
                cell = Cell(
                    task=task,
                    model=shape.name,
                    optimisations=name,
                    bandwidth_mbit=mbit,
                    latency_ms=ms,
                    ours=IN_FLEET[task](shape, fleet, network, optimisations, known),
                    theirs=theirs,
                )
                yield cell
                if (task, name) == ("decode", INT4):
                    fair = IN_BOX[task](shape, reference, optimisations, known)
                    yield replace(cell, optimisations=BOTH_INT4, theirs=fair)


def _peaks(fleet: Fleet, reference: Fleet) -> Iterator[Peak]:
    sides = (fleet, reference)
    speed, memory = ([side.count * side.flops_per_s for side in sides], [s.count * s.memory_bytes for s in sides])
    bandwidth = [side.count * side.device.memory_bandwidth_bytes_per_s.value for side in sides]
    yield Peak(what="dense fp16", unit="TFLOP/s", ours=speed[0] / 1e12, theirs=speed[1] / 1e12, better="more")
    yield Peak(what="memory", unit="GB", ours=memory[0] / 1e9, theirs=memory[1] / 1e9, better="more")
    yield Peak(
        what="memory bandwidth", unit="TB/s", ours=bandwidth[0] / 1e12, theirs=bandwidth[1] / 1e12, better="more"
    )
    yield Peak(what="power", unit="kW", ours=fleet.power_w / 1e3, theirs=reference.power_w / 1e3, better="less")
    if fleet.price_usd is not None and reference.price_usd is not None:
        prices = (fleet.price_usd / 1e3, reference.price_usd / 1e3)
        yield Peak(what="price", unit="thousand USD", ours=prices[0], theirs=prices[1], better="less")


PART: Final = 0.2
"""Fraction by which each number is varied."""
HOME: Final = FleetNetwork(bandwidth_bytes_per_s=100 * MBIT, latency_s=0.05)
_NO_SPEED: Final = frozenset({"electricity_usd_per_kwh", "years"})
_WHOLE: Final = frozenset({"context_tokens"})
_FIGURES: Final = {
    "speeds": "peak",
    "memory_bytes": "memory",
    "memory_bandwidth_bytes_per_s": "memory bandwidth",
}
_VARIED: Final[dict[str, tuple[Task, Shape, Optimisations]]] = {
    "training 8B, all optimisations": ("train", LLAMA_8B, TRAINING_OPTIMISATIONS[BEST]),
    "decoding 8B, fp16": ("decode", LLAMA_8B, Optimisations()),
    "decoding 8B, 4-bit weights": ("decode", LLAMA_8B, Optimisations(weight_bytes=INT4_BYTES)),
    "decoding 70B, 4-bit weights": ("decode", LLAMA_70B, Optimisations(weight_bytes=INT4_BYTES)),
    "forward 8B, fp16": ("forward", LLAMA_8B, Optimisations()),
}

Sides = tuple[Fleet, Fleet, Assumptions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """Ratio of one cell with one number a fifth lower, unchanged and a fifth higher. None: the model does not fit."""

    what: str
    cell: str
    low: float | None
    plain: float | None
    high: float | None


def swings(fleet: Fleet, reference: Fleet, known: Assumptions) -> list[Swing]:
    """Vary every assumption and every catalogue figure that affects speed, for a few cells on home links."""
    plain = (fleet, reference, known)
    return [
        Swing(
            what=what,
            cell=cell,
            low=_home_ratio(cell, *low),
            plain=_home_ratio(cell, *plain),
            high=_home_ratio(cell, *high),
        )
        for what, (low, high) in _changes(fleet, reference, known)
        for cell in _VARIED
    ]


def _home_ratio(cell: str, fleet: Fleet, reference: Fleet, known: Assumptions) -> float | None:
    task, shape, optimisations = _VARIED[cell]
    ours = IN_FLEET[task](shape, fleet, HOME, optimisations, known)
    return _ratio(ours, IN_BOX[task](shape, reference, Optimisations(), known))


def _changes(fleet: Fleet, reference: Fleet, known: Assumptions) -> Iterator[tuple[str, list[Sides]]]:
    """Yield what is varied, and both sides with it lowered and raised. A fraction (`_part`) is at most 1."""
    factors = (1 - PART, 1 + PART)
    for field, what in _FIGURES.items():
        ours = [replace(fleet, device=scaled(fleet.device, field, factor)) for factor in factors]
        yield f"{fleet.device.name}: {what}", [(side, reference, known) for side in ours]
    for field, what in _FIGURES.items():
        theirs = [replace(reference, device=scaled(reference.device, field, factor)) for factor in factors]
        yield f"{reference.device.name}: {what}", [(fleet, side, known) for side in theirs]
    for field in (f.name for f in fields(known) if f.name not in _NO_SPEED):
        values = [getattr(known, field) * factor for factor in factors]
        if field.endswith("_part"):
            values = [min(1.0, value) for value in values]
        assumed = [replace(known, **{field: round(value) if field in _WHOLE else value}) for value in values]
        yield field.replace("_", " "), [(fleet, reference, one) for one in assumed]


def scaled(device: Device, field: str, factor: float) -> Device:
    """Copy of the device with one figure multiplied by `factor`; with `speeds`, all of its speeds."""
    if field == "speeds":
        speeds = tuple(msgspec.structs.replace(s, flops_per_s=s.flops_per_s * factor) for s in device.speeds)
        return msgspec.structs.replace(device, speeds=speeds)
    figure = getattr(device, field)
    return msgspec.structs.replace(device, **{field: msgspec.structs.replace(figure, value=figure.value * factor)})
