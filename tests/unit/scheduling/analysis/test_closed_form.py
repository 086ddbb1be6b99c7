"""The comparison of two fleets: the formulas, what was worked out by hand, and that each entry moves what it should."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fusionai.cli.planning.pool_file import shipped_catalogue
from fusionai.scheduling.analysis import cases as analysis_cases
from fusionai.scheduling.analysis.cases import (
    BEST,
    BOTH_INT4,
    EFFECTS,
    FORWARDED,
    HALF,
    INT4,
    INT4_INT8,
    LLAMA_8B,
    LLAMA_70B,
    LOCAL_PART,
    PART,
    TRAINED,
    Comparison,
    boundary_part,
    compare,
    exchange_part,
    scaled,
    swings,
    verdict,
)
from fusionai.scheduling.analysis.closed_form import GenerationTerms, PipelineTerms
from fusionai.scheduling.analysis.fleets import (
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
    state_bytes,
    train,
    train_in_one_box,
)
from fusionai.scheduling.planner import plan
from harness.closed_form_plans import problem_of

INT8 = "overlap, 8-bit, local updates"
FULL = "overlap, 2-bit, local updates, no recomputation"
HALVED = Optimisations(overlap=True, boundary_part=1 / 2, local_steps=50, sync_part=1 / 2)
SIXTY_FOURTH = Optimisations(overlap=True, boundary_part=1 / 64, local_steps=50, sync_part=1 / 2)
"""What the earlier figures are for, which this software's codecs are not exactly."""
KNOWN = Assumptions()


def fleet(name: str, count: int, **changed: float) -> Fleet:
    """With figures of the catalogue multiplied."""
    device = shipped_catalogue().find(name)
    for field, factor in changed.items():
        device = scaled(device, field, factor)
    return Fleet(device=device, count=count)


@cache
def shipped() -> Comparison:
    return compare(fleet("RTX 3080", 50), fleet("H100 SXM", 4), KNOWN)


@pytest.fixture
def trained_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only training is looked at, decoding is not worked out anew: it takes most of a comparison's time."""
    shipped()
    monkeypatch.setattr(analysis_cases, "DECODED", ())


@pytest.fixture
def without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that were worked out before count two operations per parameter and nothing for attention's products."""
    monkeypatch.setattr(Shape, "attention_flops", lambda self, context_tokens: 0.0)


def test_attention_counts_for_what_it_computes():
    bert, llama = (next(one for one in TRAINED if one.name == name) for name in ("BERT-Large", "Llama-3-8B"))
    # By hand: 24 layers x 512 keys x 1024 numbers, twice for scores and values, a product and a sum each.
    assert bert.sequence_flops == 2 * 335e6 + 24 * 512 * 1024 * 4
    # Causal: half of 4,096 keys on average. 6.7 % more than the parameters' products.
    assert llama.sequence_flops == 2 * 8.03e9 + 32 * 2048 * 4096 * 4
    box = train_in_one_box(llama, fleet("H100 SXM", 4), Optimisations(), KNOWN)
    assert isinstance(box, PredictedSpeed)
    # Forward once, backward twice, attention too.
    assert box.tokens_per_s == pytest.approx(4 * 989e12 * KNOWN.reference_training_part / (3 * llama.sequence_flops))


def ratio(comparison: Comparison, task: str, model: str, optimisations: str, mbit: int, ms: int) -> float:
    found = comparison.cell(task, model, optimisations, mbit, ms).ratio  # type: ignore[arg-type]
    assert found is not None
    return found


def trained_ratio(model: str, optimisations: Optimisations, mbit: int, ms: int) -> float:
    shape = next(one for one in TRAINED if one.name == model)
    network = FleetNetwork(bandwidth_bytes_per_s=mbit * analysis_cases.MBIT, latency_s=ms / 1e3)
    ours = train(shape, fleet("RTX 3080", 50), network, optimisations, KNOWN)
    theirs = train_in_one_box(shape, fleet("H100 SXM", 4), Optimisations(), KNOWN)
    assert isinstance(ours, PredictedSpeed)
    assert isinstance(theirs, PredictedSpeed)
    return ours.tokens_per_s / theirs.tokens_per_s


@pytest.mark.slow
def test_the_claim_on_paper(monkeypatch: pytest.MonkeyPatch):
    peaks = {peak.what: peak for peak in shipped().peaks}
    assert (peaks["dense fp16"].ours, peaks["dense fp16"].theirs) == (2975, 3956)
    assert round(peaks["dense fp16"].ratio, 2) == 0.75
    assert (peaks["memory"].ours, peaks["memory"].theirs) == (500, 320)
    assert (peaks["memory bandwidth"].ours, peaks["memory bandwidth"].theirs) == (38, 13.4)
    assert (peaks["power"].ours, peaks["power"].theirs) == (16, 2.8)
    monkeypatch.setattr(analysis_cases, "DECODED", ())  # which is most of the work
    pcie = compare(fleet("RTX 3080", 50), fleet("H100 PCIe", 4), KNOWN)
    assert round(pcie.peaks[0].ratio, 2) == 0.98


@pytest.mark.usefixtures("without_attention")
@pytest.mark.parametrize(
    ("model", "worked_out"),
    [
        # (100 Mbit 50 ms as it stands, int8 and local updates, 64x), (1 Gbit 20 ms as it stands, int8), 10 Gbit LAN.
        ("BERT-Large", (0.015, 0.50, 0.50, 0.11, 0.50, 0.36)),
        ("GPT-3 type, 24 layers", (0.029, 0.20, 0.44, 0.18, 0.45, 0.40)),
        ("Llama-3-8B", (0.046, 0.11, 0.44, 0.24, 0.43, 0.41)),
    ],
)
def test_training_is_what_was_worked_out_before(model: str, worked_out: tuple[float, ...]):
    """Independent figures for the same comparison, to two digits. Within rounding but for two: BERT-Large as it stands,
    0.01 higher on fast links, since the earlier figures don't say how they rounded microbatches; and where links set
    the pace of the GPT-3 type, 0.01 higher, since they count a hop more than the busiest uplink waits for."""
    textbook = Optimisations()
    places = (
        (textbook, 100, 50),
        (HALVED, 100, 50),
        (SIXTY_FOURTH, 100, 50),
        (textbook, 1_000, 20),
        (HALVED, 1_000, 20),
        (textbook, 10_000, 1),
    )
    for (optimisations, mbit, ms), expected in zip(places, worked_out, strict=True):
        found = trained_ratio(model, optimisations, mbit, ms)
        rounded = model == "BERT-Large" and optimisations == textbook and mbit > 100
        slack = 0.01 if rounded or (model.startswith("GPT-3") and (optimisations, mbit) == (HALVED, 100)) else 0.0
        assert abs(found - expected) <= 0.5 * 10 ** -(3 if expected < 0.1 else 2) + slack, (
            optimisations,
            mbit,
            ms,
            found,
        )


def test_neither_side_trains_the_largest_model_whole():
    cell = shipped().cell("train", LLAMA_70B.name, BEST, 10_000, 1)
    assert isinstance(cell.ours, Misfit)
    assert isinstance(cell.theirs, Misfit)
    assert cell.verdict == "does not fit"
    assert state_bytes(LLAMA_70B, KNOWN) == pytest.approx(1.13e12, rel=0.01)
    assert cell.ours.missing_bytes == pytest.approx(1.1296e12 - 50 * 8.5e9)


@pytest.mark.parametrize(
    ("optimisations", "mbit", "ms", "worked_out"),
    [
        # The earlier figures left out the pipeline's fill, 9 % here.
        (Optimisations(overlap=True), 100, 50, 0.13),
        (HALVED, 100, 50, 0.24),
        (SIXTY_FOURTH, 100, 50, 0.45),
        (Optimisations(overlap=True), 1_000, 20, 0.44),
        (HALVED, 1_000, 20, 0.45),
    ],
)
def test_adapters_are_what_was_worked_out_less_the_fill(
    optimisations: Optimisations, mbit: int, ms: int, worked_out: float
):
    found = trained_ratio("Llama-3-70B, adapters", optimisations, mbit, ms)
    assert 0.85 * worked_out <= found <= worked_out


@pytest.mark.parametrize(
    ("model", "optimisations", "worked_out", "slack"),
    [
        ("Llama-3-8B", HALF, (6_600, 14_800, 39_800), 0.02),
        # 91,000 without attention's products, which are 3.3 % of this model's arithmetic at 1,024 tokens.
        ("Llama-3-8B", INT4, (88_060, 88_060, 88_060), 0.01),
        ("Llama-3-70B", HALF, (303, 680, 2_100), 0.04),
        # The earlier figures don't say how wide the scales of 4-bit weights are: 4.5 bits here leave less for caches.
        ("Llama-3-70B", INT4_INT8, (1_300, 2_900, 8_300), 0.17),
    ],
)
def test_decoding_is_what_was_worked_out_before(
    model: str, optimisations: str, worked_out: tuple[float, ...], slack: float
):
    for (mbit, ms), expected in zip(((100, 50), (1_000, 20), (1_000, 1)), worked_out, strict=True):
        ours = shipped().cell("decode", model, optimisations, mbit, ms).ours
        assert isinstance(ours, PredictedSpeed)
        assert ours.tokens_per_s == pytest.approx(expected, rel=slack), (mbit, ms)


@pytest.mark.parametrize(("model", "worked_out"), [("Llama-3-8B", 57_000), ("Llama-3-70B", 14_330)])
def test_the_box_decodes_what_was_worked_out_before(model: str, worked_out: float):
    theirs = shipped().cell("decode", model, HALF, 100, 50).theirs
    assert isinstance(theirs, PredictedSpeed)
    assert theirs.tokens_per_s == pytest.approx(worked_out, rel=0.05)


@pytest.mark.usefixtures("without_attention")
@pytest.mark.parametrize(
    ("model", "boundary_part", "worked_out"),
    [
        ("GPT-3 type, 24 layers", 1.0, 0.68),
        ("Llama-3-8B", 1.0, 0.20),
        ("Llama-3-8B", 1 / 4, 0.65),
        ("Llama-3-70B", 1.0, 0.11),
        ("Llama-3-70B", 1 / 4, 0.44),
    ],
)
def test_forward_passes_are_what_was_worked_out_before(model: str, boundary_part: float, worked_out: float):
    shape = next(one for one in FORWARDED if one.name == model)
    home = FleetNetwork(bandwidth_bytes_per_s=100 * analysis_cases.MBIT, latency_s=0.05)
    ours = forward(shape, fleet("RTX 3080", 50), home, Optimisations(boundary_part=boundary_part), KNOWN)
    theirs = forward_in_one_box(shape, fleet("H100 SXM", 4), Optimisations(), KNOWN)
    assert isinstance(ours, PredictedSpeed)
    assert isinstance(theirs, PredictedSpeed)
    assert ours.tokens_per_s / theirs.tokens_per_s == pytest.approx(worked_out, abs=0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("trained_only")
def test_a_faster_gpu_in_the_catalogue_is_that_much_faster_where_computing_limits():
    """Twice the speed: twice the ratio where arithmetic is all, nothing where links are, half against a faster box."""
    faster = compare(fleet("RTX 3080", 50, speeds=2), fleet("H100 SXM", 4), KNOWN)
    fast_box = compare(fleet("RTX 3080", 50), fleet("H100 SXM", 4, speeds=2), KNOWN)
    compute = ("train", "BERT-Large", BEST, 1_000, 20)
    assert ratio(faster, *compute) == pytest.approx(2 * ratio(shipped(), *compute), rel=1e-6)
    assert ratio(fast_box, *compute) == pytest.approx(ratio(shipped(), *compute) / 2)
    links = ("train", "Llama-3-8B", INT8, 10, 50)
    assert ratio(faster, *links) == pytest.approx(ratio(shipped(), *links), rel=0.05)
    assert ratio(faster, *links) > ratio(shipped(), *links)


@pytest.mark.slow
def test_more_memory_holds_the_model_in_fewer_stages_and_more_sessions(monkeypatch: pytest.MonkeyPatch):
    before = shipped().cell("train", LLAMA_8B.name, INT8, 100, 50).ours
    monkeypatch.setattr(analysis_cases, "DECODED", (LLAMA_70B,))
    larger = compare(fleet("RTX 3080", 50, memory_bytes=2), fleet("H100 SXM", 4), KNOWN)
    after = larger.cell("train", LLAMA_8B.name, INT8, 100, 50).ours
    assert isinstance(before, PredictedSpeed)
    assert isinstance(after, PredictedSpeed)
    assert after.stages < before.stages
    decode = ("decode", LLAMA_70B.name, HALF, 100, 50)
    assert ratio(larger, *decode) > 2 * ratio(shipped(), *decode)


@pytest.mark.slow
def test_memory_bandwidth_moves_decoding_and_nothing_else():
    wider = compare(fleet("RTX 3080", 50, memory_bandwidth_bytes_per_s=2), fleet("H100 SXM", 4), KNOWN)
    small = ("decode", "GPT-3 type, 24 layers", HALF, 100, 50)
    assert ratio(wider, *small) > 1.3 * ratio(shipped(), *small)
    for cell, other in zip(shipped().cells, wider.cells, strict=True):
        if cell.task != "decode":
            assert cell == other


@pytest.mark.slow
def test_power_and_price_move_energy_and_money_and_no_ratio():
    cheap = compare(fleet("RTX 3080", 50, power_w=0.5, price_usd=0.5), fleet("H100 SXM", 4), KNOWN)
    cell = cheap.cell("train", LLAMA_8B.name, BEST, 100, 50)
    assert isinstance(cell.ours, PredictedSpeed)
    assert [c.ratio for c in cheap.cells] == [c.ratio for c in shipped().cells]
    assert cheap.joules_per_million_tokens("ours", cell.ours) == pytest.approx(
        shipped().joules_per_million_tokens("ours", cell.ours) / 2
    )
    assert cheap.usd_per_million_tokens("ours", cell.ours) == pytest.approx(
        (shipped().usd_per_million_tokens("ours", cell.ours) or 0) / 2
    )


def test_levers_have_the_bytes_of_the_codecs_they_stand_for():
    """Of boundaries in half precision: what `int8` and `uneven` make of rows long enough."""
    assert boundary_part("int8") == pytest.approx((64 + 2) / 64 / 2)
    assert boundary_part("uneven") == pytest.approx((88 + 34) / 2 / 256 / 2)
    assert exchange_part("int4") == pytest.approx((32 + 2) / 64 / 2)
    assert {effect.optimisation.split("-")[0] for effect in EFFECTS} == {"8", "2", "local updates"}
    shown = {optimisations.boundary_part for optimisations in analysis_cases.TRAINING_OPTIMISATIONS.values()} | {
        LOCAL_PART
    }
    assert {effect.part for effect in EFFECTS} <= shown


def test_better_links_never_hurt():
    cells = {(c.task, c.model, c.optimisations, c.bandwidth_mbit, c.latency_ms): c.ratio for c in shipped().cells}
    for (task, model, optimisations, mbit, ms), found in cells.items():
        wider = cells.get((task, model, optimisations, {10: 100, 100: 1_000, 1_000: 10_000}.get(mbit, 0), ms))
        nearer = cells.get((task, model, optimisations, mbit, {100: 50, 50: 20, 20: 1}.get(ms, 0)))
        for better in (wider, nearer):
            assert better is None or found is None or better >= found * (1 - 1e-3), (
                task,
                model,
                optimisations,
                mbit,
                ms,
            )


@pytest.mark.parametrize("shape", TRAINED, ids=lambda shape: shape.name)
def test_levers_that_take_off_work_never_hurt(shape):
    ours, network = fleet("RTX 3080", 50), FleetNetwork(bandwidth_bytes_per_s=12.5e6, latency_s=0.05)
    plain = train(shape, ours, network, Optimisations(), KNOWN)
    for optimisation in (
        Optimisations(overlap=True),
        Optimisations(boundary_part=0.5),
        Optimisations(local_steps=50),
        Optimisations(sync_part=0.5),
        Optimisations(recompute=False),
    ):
        pulled = train(shape, ours, network, optimisation, KNOWN)
        assert isinstance(plain, Misfit) == isinstance(pulled, Misfit)
        if isinstance(plain, PredictedSpeed) and isinstance(pulled, PredictedSpeed):
            assert pulled.tokens_per_s >= plain.tokens_per_s


def test_one_pipeline_is_never_faster_than_the_best_number_of_replicas():
    for ms, mbit in ((50, 100), (20, 1_000)):
        for shape in TRAINED[:3]:
            one = ratio(shipped(), "train", shape.name, "one pipeline, overlap, 8-bit", mbit, ms)
            assert one <= ratio(shipped(), "train", shape.name, "overlap, 8-bit", mbit, ms) * (1 + 1e-9)


def test_four_bits_on_both_sides_is_less_of_a_gain():
    assert ratio(shipped(), "decode", "Llama-3-8B", BOTH_INT4, 100, 50) < ratio(
        shipped(), "decode", "Llama-3-8B", INT4, 100, 50
    )


def test_verdicts_at_their_edges():
    assert [verdict(value) for value in (None, 0.49, 0.5, 0.899, 0.9, 3.0)] == [
        "does not fit",
        "fails",
        "within 2x",
        "within 2x",
        "holds",
        "holds",
    ]


def terms(**changed: object) -> PipelineTerms:
    plain = PipelineTerms(
        stages=4,
        replicas=2,
        microbatches=10,
        forward_s=1.0,
        backward_s=2.0,
        activation_s=0.5,
        gradient_s=0.5,
        latency_s=0.25,
        sync_s=7.0,
        overlapped=False,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def test_a_step_by_hand():
    assert terms().step_s == 10 * (3 + 1) + 3 * (3 + 1 + 0.5) + 7
    assert terms(overlapped=True).step_s == 10 * 3 + 3 * (3 + 1 + 0.5)
    assert terms(overlapped=True, sync_s=1_000.0).step_s == 1_000
    assert terms(overlapped=True, sync_s=1_000.0).limit == "synchronisation"
    assert terms(overlapped=True, activation_s=4.0).period_s == 4.5
    assert terms(overlapped=True, activation_s=4.0).limit == "links"
    assert terms(overlapped=True, microbatches=100).in_flight == 12  # 2 ceil(13.5 / 3) + 2
    assert terms(overlapped=True, microbatches=3).in_flight == 3


def test_a_round_of_generation_by_hand():
    found = GenerationTerms(
        stages=3,
        replicas=2,
        passes=4,
        rows=8,
        weights_s=0.02,
        compute_s=0.01,
        overhead_s=0.001,
        transfer_s=0.005,
        latency_s=0.05,
        hops=3,
    )
    assert found.trip_s == pytest.approx(3 * 0.021 + 3 * 0.055)
    assert found.tokens_per_s == pytest.approx(2 * 4 * 8 / found.trip_s)
    assert found.limit == "latency"
    many = replace(found, passes=40)
    assert many.round_s == pytest.approx(40 * 0.021)
    assert many.limit == "memory bandwidth"


def test_the_chosen_number_of_passes_is_the_best_there_is():
    ours, network = fleet("RTX 3080", 50), FleetNetwork(bandwidth_bytes_per_s=12.5e6, latency_s=0.05)
    outcome = generate(LLAMA_8B, ours, network, Optimisations(), KNOWN)
    assert isinstance(outcome, PredictedSpeed)
    chosen = outcome.terms
    assert isinstance(chosen, GenerationTerms)
    sessions = chosen.passes * chosen.rows
    cache_s = (chosen.weights_s - LLAMA_8B.parameters * 2 / chosen.stages / (760e9 * 0.75)) / chosen.rows
    for passes in range(1, 200):
        rows = sessions / passes
        other = replace(
            chosen,
            passes=passes,
            rows=rows,
            weights_s=chosen.weights_s + (rows - chosen.rows) * cache_s,
            compute_s=chosen.compute_s / chosen.rows * rows,
            transfer_s=chosen.transfer_s / chosen.rows * rows,
        )
        assert other.tokens_per_s <= chosen.tokens_per_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("trained_only")
def test_reaching_half_the_peak_is_half_the_speed():
    lazy = compare(fleet("RTX 3080", 50), fleet("H100 SXM", 4), replace(KNOWN, training_part=0.2))
    cell = ("train", "BERT-Large", FULL, 10_000, 1)
    assert ratio(lazy, *cell) == pytest.approx(ratio(shipped(), *cell) / 2)


@pytest.mark.slow
def test_a_number_that_is_wrong_by_a_fifth_moves_what_hangs_on_it():
    found = {(s.what, s.cell): s for s in swings(fleet("RTX 3080", 50), fleet("H100 SXM", 4), KNOWN)}
    training = "training 8B, all optimisations"
    assert {cell for _, cell in found} >= {training, "decoding 8B, fp16", "forward 8B, fp16"}
    peak = found["RTX 3080: peak", training]
    assert peak.plain == pytest.approx(ratio(shipped(), "train", LLAMA_8B.name, BEST, 100, 50))
    assert peak.low is not None
    assert peak.high is not None
    assert peak.plain is not None
    assert peak.plain * (1 - PART) <= peak.low < peak.plain < peak.high <= peak.plain * (1 + PART)
    box = found["H100 SXM: peak", training]
    assert box.low == pytest.approx(peak.plain / (1 - PART))
    assert box.high == pytest.approx(peak.plain / (1 + PART))
    decoding = found["RTX 3080: memory bandwidth", training]
    assert decoding.low == decoding.plain == decoding.high
    assert found["context tokens", "decoding 8B, fp16"].low != found["context tokens", "decoding 8B, fp16"].plain


@pytest.mark.slow
@pytest.mark.usefixtures("trained_only")
def test_what_is_in_flight_may_crowd_a_stage():
    """16 stages of the 8B model hold 8 GB of state each; 44 microbatches of two layers' inputs are 3 GB more."""
    outcome = shipped().cell("train", LLAMA_8B.name, "overlap, 8-bit", 100, 50).ours
    assert isinstance(outcome, PredictedSpeed)
    assert isinstance(outcome.terms, PipelineTerms)
    assert outcome.stages == 16
    assert outcome.in_flight_bytes == outcome.terms.in_flight * 2 * 4096 * 4096 * 2
    assert outcome.crowded
    roomy = compare(fleet("RTX 3090", 50), fleet("H100 SXM", 4), KNOWN)
    roomier = roomy.cell("train", LLAMA_8B.name, BEST, 1_000, 20).ours
    assert isinstance(roomier, PredictedSpeed)
    assert not roomier.crowded


@pytest.mark.slow
def test_every_assumption_that_bears_on_speed_is_tried():
    found = swings(fleet("RTX 3080", 50), fleet("H100 SXM", 4), KNOWN)
    tried = {s.what for s in found}
    named = {name.replace("_", " ") for name in Assumptions.__dataclass_fields__}
    assert named - tried == {"electricity usd per kwh", "years"}
    moved = {s.what for s in found if not s.low == s.plain == s.high}
    # With all optimisations the exchange of replicas holds training up nowhere, nor does arithmetic forward passes over
    # slow links.
    assert tried - moved == {"gradient bytes per parameter", "forward part"}


@pytest.mark.parametrize(
    ("optimisations", "place"),
    [
        ("overlap", (100, 50)),
        ("overlap, 8-bit", (100, 50)),
        # With pipelines of 25 machines, each of which takes seconds to plan.
        pytest.param("overlap", (1_000, 20), marks=pytest.mark.long),
        pytest.param("overlap, 8-bit", (1_000, 20), marks=pytest.mark.long),
        pytest.param(BEST, (1_000, 20), marks=pytest.mark.long),
        pytest.param(BEST, (100, 50), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_planner_predicts_the_same_step_from_the_same_numbers(optimisations: str, place: tuple[int, int]):
    """Its formulas are those of unequal stages: where links set the period it does not ask which uplink does, and so
    counts at most a hop and a stage too much; else it is the same."""
    for shape in TRAINED:
        outcome = shipped().cell("train", shape.name, optimisations, *place).ours
        if isinstance(outcome, Misfit):
            continue
        found = outcome.terms
        assert isinstance(found, PipelineTerms)
        predicted = plan(problem_of(found)).step_time_s
        surplus = predicted - found.pipeline_s
        assert -1e-6 * predicted <= surplus <= found.hop_s + found.compute_s
        if found.compute_s >= found.transfer_s:
            assert surplus == pytest.approx(0.0, abs=1e-6 * predicted)
