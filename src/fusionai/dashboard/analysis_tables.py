"""Tables and sentences of the comparison of two fleets. Decides which figures are shown and how they are worded.

Page, terminal and document are written from the same tables, so that they agree. Neighbours:
`scheduling.analysis.cases` computes; `analysis_page` and `cli.planning.analyze` lay out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple

from fusionai.primitives.units import format_bytes
from fusionai.scheduling.analysis import cases
from fusionai.scheduling.analysis.cases import Cell, Comparison, Task, Verdict, swings, verdict
from fusionai.scheduling.analysis.fleets import Assumptions, Fleet, Misfit, PredictedSpeed

Mark = Literal["", "good", "fair", "bad"]

MARKS: Final[dict[Verdict, Mark]] = {"holds": "good", "within 2x": "fair", "fails": "bad", "does not fit": "bad"}
CROWDED: Final = "*"
"""Mark of a cell whose activations in flight don't fit into memory beside the state."""
PLACES: Final = ((10, 100), (100, 50), (1_000, 20), (10_000, 1))
"""Networks in the tables of optimisations, as (Mbit/s, ms)."""
HOME: Final = PLACES[1]
"""The network that the summary is about."""
GRIDS: Final[tuple[tuple[Task, str], ...]] = (
    ("train", cases.TEXTBOOK),
    ("train", cases.BEST),
    ("decode", cases.HALF),
    ("decode", cases.INT4_INT8),
    ("forward", cases.HALF),
)
TASKS: Final[dict[Task, str]] = {
    "train": "Training",
    "decode": "Decoding, all sessions together",
    "forward": "Forward passes over whole sequences",
}
_TOLD: Final[tuple[tuple[Task, str, str], ...]] = (
    ("train", cases.TEXTBOOK, cases.BEST),
    ("decode", cases.HALF, cases.INT4),
    ("forward", cases.HALF, cases.INT4),
)
"""For each kind of work, a plain set of optimisations and the best one."""
_COSTED: Final[tuple[tuple[Task, str], ...]] = tuple((task, best) for task, _, best in _TOLD)
_OPTIMISATIONS: Final[dict[Task, tuple[str, ...]]] = {
    "train": tuple(cases.TRAINING_OPTIMISATIONS),
    "decode": (*cases.DECODING_OPTIMISATIONS, cases.BOTH_INT4),
    "forward": tuple(cases.FORWARD_OPTIMISATIONS),
}
_MODELS: Final[dict[Task, tuple[str, ...]]] = {
    "train": tuple(shape.name for shape in cases.TRAINED),
    "decode": tuple(shape.name for shape in cases.DECODED),
    "forward": tuple(shape.name for shape in cases.FORWARDED),
}


class Entry(NamedTuple):
    """A cell of a table; `mark` is the colour for what the text already says."""

    text: str
    mark: Mark = ""


_Row = Sequence[str | Entry]


@dataclass(frozen=True, slots=True)
class AnalysisTable:
    """`right`: right-aligned columns, which have numbers."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    right: tuple[int, ...]
    notes: tuple[str, ...]


def _table(
    title: str,
    headers: tuple[str, ...],
    rows: Iterable[_Row],
    right: tuple[int, ...] = (),
    notes: tuple[str, ...] = (),
) -> AnalysisTable:
    cells = (tuple(Entry(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
    return AnalysisTable(title, headers, tuple(cells), right, notes)


def peaks(comparison: Comparison) -> AnalysisTable:
    """The two fleets by their data sheets."""
    rows = [
        (
            f"{peak.what}, {peak.unit}",
            f"{peak.ours:,.4g}",
            f"{peak.theirs:,.4g}",
            f"{peak.ratio:.2f}",
            _worth(peak.ratio if peak.better == "more" else 1 / peak.ratio),
        )
        for peak in comparison.peaks
    ]
    return _table(
        "On paper",
        ("on paper", comparison.fleet.name, comparison.reference.name, "ratio", "claim"),
        rows,
        (1, 2, 3),
        ("For power and price less is better: the claim holds where the fleet needs no more.",),
    )


def optimisations(comparison: Comparison, task: Task, *, layouts: bool = True) -> list[AnalysisTable]:
    """One table per model: the ratio with each optimisation on a few networks. `layouts`: add the stages and the
    limiting factor."""
    tables: list[AnalysisTable] = []
    for model in _MODELS[task]:
        rows = [
            (
                name,
                *(_entry(comparison.cell(task, model, name, mbit, ms), layout=layouts) for mbit, ms in PLACES),
            )
            for name in _OPTIMISATIONS[task]
        ]
        theirs = comparison.cell(task, model, _OPTIMISATIONS[task][0], *PLACES[0]).theirs
        tables.append(
            _table(
                f"{TASKS[task]}: {model}",
                ("optimisations", *(network(mbit, ms) for mbit, ms in PLACES)),
                rows,
                notes=(f"{comparison.reference.name}: {_speed(theirs)}.",),
            )
        )
    return tables


def grid(comparison: Comparison, task: Task, model: str, name: str) -> AnalysisTable:
    """All bandwidths and latencies for one model and one set of optimisations."""
    rows = [
        (
            bandwidth(mbit),
            *(_entry(comparison.cell(task, model, name, mbit, ms), layout=False) for ms in cases.LATENCIES_MS),
        )
        for mbit in cases.BANDWIDTHS_MBIT
    ]
    return _table(f"{TASKS[task]}: {model}, {name}", ("uplink", *(f"{ms} ms" for ms in cases.LATENCIES_MS)), rows)


def grids(comparison: Comparison) -> list[AnalysisTable]:
    return [grid(comparison, task, model, name) for task, name in GRIDS for model in _MODELS[task]]


def counts(comparison: Comparison) -> AnalysisTable:
    """How often the claim holds, over all networks and optimisations."""
    rows: list[_Row] = []
    for task in TASKS:
        for model in _MODELS[task]:
            cells = [cell for cell in comparison.cells if (cell.task, cell.model) == (task, model)]
            found = [cell.verdict for cell in cells]
            ratios = [cell.ratio for cell in cells if cell.ratio is not None]
            span = f"{min(ratios):.2g} to {max(ratios):.2g}" if ratios else "-"
            numbers = [str(found.count(word)) for word in MARKS]
            rows.append((f"{work(task)}: {model}", *numbers, span))
    return _table(
        "All cells",
        ("work", *MARKS, "ratios"),
        rows,
        (1, 2, 3, 4),
        (
            "A cell is one network with one set of optimisations. The claim holds from a ratio of "
            f"{cases.HOLDS:g} on; within 2x: from {cases.WITHIN:g} on.",
        ),
    )


def costs(comparison: Comparison) -> AnalysisTable:
    """Energy and money per million tokens, with the fleet's best optimisations on home links."""
    rows: list[_Row] = []
    for task, name in _COSTED:
        for model in _MODELS[task]:
            cell = comparison.cell(task, model, name, 100, 50)
            if not isinstance(cell.ours, PredictedSpeed) or not isinstance(cell.theirs, PredictedSpeed):
                continue
            sides: tuple[tuple[Literal["ours", "theirs"], PredictedSpeed], ...] = (
                ("ours", cell.ours),
                ("theirs", cell.theirs),
            )
            joules = [comparison.joules_per_million_tokens(*side) for side in sides]
            usd = [comparison.usd_per_million_tokens(*side) for side in sides]
            known = [value for value in usd if value is not None]
            rows.append(
                (
                    f"{work(task)}: {model}, {name}",
                    *(f"{value / 1e3:,.3g}" for value in joules),
                    _worth(joules[1] / joules[0], f"{joules[0] / joules[1]:.2g}x "),
                    *("-" if value is None else f"{value:.3g}" for value in usd),
                    _worth(known[1] / known[0], f"{known[0] / known[1]:.2g}x ") if len(known) == 2 else "-",
                )
            )
    known = comparison.assumptions
    return _table(
        "Energy and money per million tokens, 100 Mbit/s and 50 ms",
        ("work, optimisations", "kJ, fleet", "kJ, box", "energy", "USD, fleet", "USD, box", "money"),
        rows,
        (1, 2, 4, 5),
        (
            f"All machines at full power; electricity at {known.electricity_usd_per_kwh:g} USD per kWh, prices spread "
            f"over {known.years:g} years of full use. Hosts, cooling and links are not counted on either side.",
        ),
    )


def against(comparisons: Sequence[Comparison]) -> AnalysisTable:
    """The main figures for each reference, side by side."""
    rows = [
        (
            f"{work(task)}: {model}, {name}",
            *(_entry(one.cell(task, model, name, 100, 50), layout=False) for one in comparisons),
        )
        for task, plain, best in _TOLD[:2]
        for model in _MODELS[task]
        for name in (plain, best)
    ]
    paper = (
        "Peak, dense fp16",
        *(_worth(one.peaks[0].ratio, f"{one.peaks[0].ratio:.2f} ") for one in comparisons),
    )
    return _table(
        "Against each reference, at 100 Mbit/s and 50 ms",
        ("work, optimisations", *(f"ratio to {one.reference.name}" for one in comparisons)),
        (paper, *rows),
    )


def assumptions(known: Assumptions) -> AnalysisTable:
    """All numbers that are not from a data sheet."""
    found = {
        "training_part": "fraction of its fp16 peak that the fleet reaches in training (MFU)",
        "reference_training_part": "the same for the machines in one box",
        "forward_part": "fraction of its peak that the fleet reaches in forward passes over whole sequences",
        "reference_forward_part": "the same for the machines in one box",
        "decode_part": "fraction of its peak that either side reaches in batched decoding",
        "bandwidth_part": "fraction of its memory bandwidth that either side reaches",
        "memory_part": "fraction of its memory that either side can use",
        "overhead_s": "overhead of a decoding pass on a stage, in seconds, besides reading weights and computing",
        "context_tokens": "tokens per session in the KV cache in decoding",
        "state_bytes_per_parameter": "bytes per trained parameter: half-precision weight and gradient, Adam in fp32",
        "gradient_bytes_per_parameter": "bytes per parameter that replicas exchange, before compression",
        "electricity_usd_per_kwh": "USD per kWh",
        "years": "years over which a machine's price is spread",
    }
    rows = [(found[f.name], f"{getattr(known, f.name):g}") for f in fields(known)]
    return _table("Assumptions", ("what", "value"), rows, (1,), tuple(LIMITS))


def sensitivity(comparison: Comparison) -> AnalysisTable:
    """Sensitivity to each assumption: the ratio with the number a fifth lower and a fifth higher. Rows in which no
    ratio changes are left out."""
    found = swings(comparison.fleet, comparison.reference, comparison.assumptions)
    cells = list(dict.fromkeys(swing.cell for swing in found))
    plain = {swing.cell: swing.plain for swing in found}
    rows: list[_Row] = [("as assumed", *(_ratio(plain[cell]) for cell in cells))]
    for what in dict.fromkeys(swing.what for swing in found):
        moved = [swing for swing in found if swing.what == what]
        texts = [
            "-" if swing.low == swing.plain == swing.high else f"{_ratio(swing.low)} to {_ratio(swing.high)}"
            for swing in moved
        ]
        if set(texts) != {"-"}:
            rows.append((what, *texts))
    return _table(
        "Sensitivity to each assumption, 100 Mbit/s and 50 ms",
        ("a fifth lower to a fifth higher", *cells),
        rows,
        notes=(
            "A dash: the ratio does not depend on it. If it falls as the number rises, the second value is smaller.",
        ),
    )


def effects() -> AnalysisTable:
    """Measured effect on the loss of optimisations that change the computation."""
    rows = [
        (
            effect.optimisation,
            f"1/{1 / effect.part:.3g}",
            ", ".join(f"{100 * loss:+.2f} %" for loss in effect.losses),
            f"{100 * effect.mean:+.2f} %",
            effect.how,
            effect.command,
        )
        for effect in cases.EFFECTS
    ]
    return _table(
        "Effect of the optimisations on the loss",
        ("optimisation", "bytes, of half precision", "held-out loss, by seed", "mean", "measured with", "by"),
        rows,
        (1, 3),
        (
            "Measured on small models with short training. The effect of compressed boundaries is about as large as "
            "the noise between two runs; the effect of local updates, whose bytes are per exchange, is larger. The "
            "effect on a model a thousand times larger was not measured.",
        ),
    )


LIMITS: Final = (
    "Precision: fp16 or bf16 arithmetic with fp32 accumulation on both sides; dense peaks.",
    "Arithmetic of a token's forward pass: two operations per parameter, plus four per layer, unit of its width and "
    "attended token (half of the sequence if attention is causal). Norms and activation functions are not counted.",
    "Boundary tensors are half precision; 8-bit and 2-bit have the sizes of this software's codecs in both directions, "
    "including scales, and coding is assumed to take no time. 64x compression of activations is from the literature, "
    "for models designed for it; this software has no such codec.",
    "Local updates: replicas exchange in 2 bits, once in 50 steps and more often early on (56 times in 1,500 steps), "
    "overlapped with compute. The slower convergence with many replicas is not in these figures.",
    "Access links are symmetric and carry no other traffic; there is no jitter, no loss, and no machine leaves.",
    "Activations are recomputed (a third more arithmetic). Microbatches in flight, for twice a round trip's time, hide "
    f"the links. {CROWDED} marks cells where their activations don't fit into memory; the true ratio is lower.",
    "Decoding: both sides run as many sessions as fit into memory. The box runs replicas on groups of 1, 2, 4 ... "
    "machines, the smallest group whose memory half-precision weights fill to at most two thirds; its links are free.",
    "4-bit weights are compared with half precision in the box, unless the row says both sides.",
)


def shapes() -> AnalysisTable:
    """Sizes of the models."""
    rows = [
        (
            shape.name,
            f"{shape.parameters / 1e9:.4g}",
            str(shape.layers),
            str(shape.width),
            str(shape.sequence_tokens),
            f"{shape.batch_tokens:,}",
            f"{shape.cache_token_bytes / 1e3:,.4g}" if shape.cache_token_bytes else "-",
            f"{100 * shape.trainable:g} %",
        )
        for shape in cases.TRAINED
    ]
    return _table(
        "Models",
        (
            "model",
            "parameters, 10^9",
            "layers",
            "width",
            "tokens per sequence",
            "tokens per step",
            "KV cache per token, kB",
            "trained",
        ),
        rows,
        (1, 2, 3, 4, 5, 6, 7),
    )


def sources(comparison: Comparison, *others: Fleet) -> AnalysisTable:
    """Sources of the devices' figures."""
    kinds = {"vendor": "published", "measured": "measured", "memory": "general knowledge"}
    rows: list[_Row] = []
    for fleet in dict.fromkeys((comparison.fleet, comparison.reference, *others)):
        for name, value, source, kind in fleet.device.sources():
            rows.append(
                (
                    fleet.device.name,
                    name.replace("_", " "),
                    f"{value:.4g}",
                    kinds[kind],
                    source,
                )
            )
    return _table("Sources of the figures", ("device", "figure", "value", "kind", "source"), rows, (2,))


def measured(comparison: Comparison) -> list[str]:
    """Sentences on what was measured on the two fleets."""
    found = [
        f"{fleet.device.name}: {name}, {value:.4g} ({source})"
        for fleet in (comparison.fleet, comparison.reference)
        for name, value, source, kind in fleet.device.sources()
        if kind == "measured"
    ]
    return found or [
        "Nothing. Every speed in this comparison is a data sheet's figure times an assumed fraction. A catalogue "
        'entry of kind "measured" replaces the data sheet\'s.'
    ]


def at_home(comparison: Comparison) -> AnalysisTable:
    """A row per kind of work and model at 100 Mbit/s and 50 ms: as it stands, and with the best optimisations."""
    rows = [
        (
            f"{work(task)}: {model}",
            _entry(comparison.cell(task, model, plain, *HOME), layout=False),
            _entry(comparison.cell(task, model, best, *HOME), layout=False),
        )
        for task, plain, best in _TOLD
        for model in _MODELS[task]
    ]
    return _table(
        f"Over home links: {network(*HOME)} one way",
        ("work", "as it stands", "at its best"),
        rows,
        notes=(
            f"Tokens per second, divided by those of {comparison.reference.name}. A star: memory has no room for the "
            "microbatches that would hide the links, so the true ratio is lower.",
            f"At its best: {'; '.join(f'{work(task).lower()} with {best}' for task, _, best in _TOLD)}.",
        ),
    )


def answer(comparison: Comparison) -> str:
    """The comparison over home links in a sentence."""
    best = [comparison.cell(task, model, best, *HOME) for task, _, best in _TOLD for model in _MODELS[task]]
    holds = [f"{work(cell.task).lower()} of {cell.model}" for cell in best if cell.verdict == "holds"]
    near = sum(cell.verdict == "within 2x" for cell in best)
    where = ", ".join(holds) or "nowhere"
    return (
        f"Over home links, {comparison.fleet.name} at their best are as fast as {comparison.reference.name} in "
        f"{len(holds)} of {len(best)} cases ({where}); in {near} more they are within 2x."
    )


def findings(comparison: Comparison) -> list[str]:
    """Peak and power in two sentences."""
    peak = comparison.peaks[0].ratio
    power = next(peak for peak in comparison.peaks if peak.what == "power")
    return [
        f"On paper, {comparison.fleet.name} have {peak:.2f} of the dense fp16 peak of {comparison.reference.name}: "
        f"the claim {_says(verdict(peak))}.",
        f"The fleet draws {power.ours:.3g} kW, the box {power.theirs:.3g} kW: energy per token is "
        f"{power.ratio:.2g}x the box's at equal speed.",
    ]


def bandwidth(mbit: int) -> str:
    return f"{mbit} Mbit/s" if mbit < 1_000 else f"{mbit // 1_000} Gbit/s"


def network(mbit: int, ms: int) -> str:
    return f"{bandwidth(mbit)}, {ms} ms"


def lines(table: AnalysisTable) -> Iterator[tuple[str, ...]]:
    for row in table.rows:
        yield tuple(entry.text for entry in row)


def work(task: Task) -> str:
    return re.split(", | over ", TASKS[task])[0]


def _entry(cell: Cell, *, layout: bool) -> Entry:
    mark = MARKS[cell.verdict]
    match cell.ours:
        case Misfit():
            return Entry(f"does not fit: {format_bytes(cell.ours.missing_bytes)} missing", mark)
        case PredictedSpeed() as ours:
            pass
    if cell.ratio is None:
        return Entry("does not fit the box", mark)
    how = f", {_layout(ours)}, {ours.limit}" if layout else ""
    return Entry(f"{_figure(cell.ratio)}{CROWDED if ours.crowded else ''} {cell.verdict}{how}", mark)


def _layout(outcome: PredictedSpeed) -> str:
    replicas = f"{outcome.replicas} {'replica' if outcome.replicas == 1 else 'replicas'}"
    return replicas if outcome.stages == 1 else f"{replicas} of {outcome.stages} stages"


def _speed(outcome: PredictedSpeed | Misfit) -> str:
    if isinstance(outcome, Misfit):
        return f"does not fit, {format_bytes(outcome.missing_bytes)} are missing"
    return f"{outcome.tokens_per_s:,.0f} tokens/s"


def _ratio(ratio: float | None) -> str:
    return "does not fit" if ratio is None else _figure(ratio)


def _figure(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


def _worth(ratio: float, before: str = "") -> Entry:
    found = verdict(ratio)
    return Entry(f"{before}{found}", MARKS[found])


def _says(found: Verdict) -> str:
    return {"holds": "holds", "within 2x": "is off by less than 2x", "fails": "fails", "does not fit": "fails"}[found]
