"""Jobs that train one model alone for some steps and then agree: DiLoCo's numbers, the same bits everywhere, whoever
dies.

Neighbours: `test_job_replicas`, where gradients are summed at every step; `harness.pool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.optimizers import make_optimizer
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.primitives.tensors import HostTensor
from fusionai.training import progress
from fusionai.training.outer import Outer, OuterRules, OuterState, OuterUpdate, beginning
from fusionai.training.outer_disk import OuterFiles
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Codec
from harness.pool import Data, Job, MemoryPool, Run, array, peer_id, tokens

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

VOCABULARY, EVERY, LAG, STEPS, SEED = 31, 3, 2, 9, 7
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
TWO_AND_LOSS = ((0, 3), (3, 5), (5, 6))
JOBS = ("a", "b")
PATIENT = OuterRules(codec="none", deadline_s=60.0)


def backend() -> TorchBackend:
    return TorchBackend(device="cpu", threads=1)


@cache
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 16))


def data_of(job: str) -> Data:
    """Each job sees other batches."""
    make = tokens(VOCABULARY, 2, 6)
    return Data(lambda step, microbatch: make(step, 100 * JOBS.index(job) + microbatch))


def transformers_model() -> nn.Module:
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))


Watch = Callable[[MemoryPool, Job, wire.Message], None]


@dataclass(repr=False)  # as `Run`
class Story:
    """`runs`: of each job, one for each start of its driver. `told`: what each was told."""

    runs: dict[str, list[Run]]
    told: dict[str, list[OuterUpdate]]
    agreed: dict[str, np.ndarray]
    rounds: int


def run(
    directory: Path,
    watch: Watch = lambda pool, job, message: None,
    *,
    rules: OuterRules = PATIENT,
    starts: Sequence[dict[str, object]] = ({},),
    watched: str = "b",
    on_end: Mapping[str, Callable[[], None]] | None = None,
    **changes: object,
) -> Story:
    async def one(outer: Outer, name: str) -> list[Run]:
        standbys = changes.get("standbys", {})
        assert isinstance(standbys, dict)
        async with MemoryPool(2 + len(standbys), backend) as pool:
            fields: dict[str, object] = {
                "ranges": TWO_AND_LOSS,
                "owned": frozenset({2}),
                "data": data_of(name),
                "steps": STEPS,
                "microbatches": 2,
                "replans": True,
                "sync_every": EVERY,
                "sync_codec": rules.codec,
                "sync_rate": rules.learning_rate,
                "sync_momentum": rules.momentum,
                "seed": SEED,
                **changes,
            }
            (directory / name).mkdir(exist_ok=True)
            job = Job(
                pool=pool,
                directory=directory / name,
                graph=llama().graph,
                state=llama().state,
                exchange=outer.seat(name),
                **fields,  # pyright: ignore[reportArgumentType]
            )
            if name == watched:
                pool.on_message = lambda sender, receiver, message: watch(pool, job, message)
            done = [await job.run(**start) for start in (starts if name == watched else ({},))]  # pyright: ignore
            outer.leave(name)
            (on_end or {}).get(name, lambda: None)()
            return done

    async def both() -> Story:
        files = OuterFiles(directory / "outer")
        state, rounds = files.load() or (OuterState.first(first_values()), {})
        outer = Outer(state, rules, files, rounds)
        try:
            runs = await asyncio.gather(*(one(outer, name) for name in JOBS))
        finally:
            await outer.close()
        agreed = {key: value.reshape(outer._state.shapes[key]).copy() for key, value in outer._state.anchor.items()}
        told = {name: outer.updates(name, 0) for name in JOBS}
        return Story(dict(zip(JOBS, runs, strict=True)), told, agreed, outer.round)

    directory.mkdir(exist_ok=True)
    return asyncio.run(both())


@cache
def first_values() -> dict[str, HostTensor]:
    return beginning(llama().graph, SEED, llama().state)


def assert_ended(story: Story) -> None:
    for runs in story.runs.values():
        assert runs[-1].end is not None
        assert runs[-1].end.failed is None


def assert_all_agree(story: Story) -> None:
    for runs in story.runs.values():
        weights = runs[-1].weights(STEPS)
        for key, value in story.agreed.items():
            np.testing.assert_array_equal(weights[f"model/{key}"], value, err_msg=key)


def plain(rules: OuterRules, lag: int, ends: Collection[int]) -> dict[str, list[float]]:
    """Two models, two AdamW, and torch's SGD with Nesterov's momentum on what is agreed after `ends` steps, adopted
    `lag` steps late."""
    models = {name: transformers_model() for name in JOBS}
    for model in models.values():
        model.load_state_dict({key: torch.from_numpy(array(value).copy()) for key, value in first_values().items()})
    spec = Job.__dataclass_fields__["optimizer"].default_factory()  # pyright: ignore
    rate = Job.__dataclass_fields__["learning_rate"].default
    inner = {name: make_optimizer(spec, list(model.parameters())) for name, model in models.items()}
    agreed = [nn.Parameter(value.detach().clone()) for value in models["a"].parameters()]
    outer = torch.optim.SGD(agreed, lr=rules.learning_rate, momentum=rules.momentum, nesterov=True)
    losses: dict[str, list[float]] = {name: [] for name in JOBS}
    told: dict[str, list[torch.Tensor]] = {}
    due = -1
    for step in range(STEPS):
        for name, model in models.items():
            for group in inner[name].param_groups:
                group["lr"] = rate(step)
            values: list[float] = []
            for microbatch in range(2):
                made = data_of(name).make(step, microbatch)
                batch = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in made.items()}
                logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.float()
                loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), batch["labels"].view(-1))
                (loss / 2).backward()
                values.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner[name].step()
            inner[name].zero_grad()
            losses[name].append(sum(values) / 2)
        if step + 1 in ends:
            for place, value in enumerate(agreed):
                present = [list(model.parameters())[place].detach() for model in models.values()]
                value.grad = sum(value.detach() - one for one in present) / len(present)
            outer.step()
            told = {name: [one.detach().clone() for one in model.parameters()] for name, model in models.items()}
            due = step if step == STEPS - 1 else step + lag
        if step == due:
            with torch.no_grad():
                for name, model in models.items():
                    for parameter, value, was in zip(model.parameters(), agreed, told[name], strict=True):
                        parameter.copy_(value + (parameter - was))
    return losses


@pytest.mark.parametrize(
    ("lag", "early", "ends"),
    [
        (0, (0, 0, 0), range(EVERY, STEPS + 1, EVERY)),
        (LAG, (0, 0, 0), range(EVERY, STEPS + 1, EVERY)),
        (0, (2, 4, 1), sorted({2, 3, 4, *range(EVERY, STEPS + 1, EVERY)})),
    ],
    ids=["at once", "beside", "early"],
)
def test_it_is_diloco(lag: int, early: tuple[int, int, int], ends: Collection[int], tmp_path: Path) -> None:
    story = run(tmp_path, sync_lag=lag, sync_early=early)
    assert_ended(story)
    assert story.rounds == len(ends)
    assert_all_agree(story)
    for name, losses in plain(PATIENT, lag, ends).items():
        np.testing.assert_allclose(story.runs[name][-1].losses, losses, rtol=1e-5)


@pytest.mark.parametrize("codec", ["int8", *(pytest.param(codec, marks=LONG) for codec in ("int4", "int2")), "topk"])
def test_packed_all_have_the_same_bits(codec: Codec, tmp_path: Path) -> None:
    story = run(tmp_path, rules=OuterRules(codec=codec, deadline_s=60.0))
    assert_ended(story)
    assert_all_agree(story)


DIES: dict[str, Callable[[wire.Message], bool]] = {
    "a forward before": lambda m: isinstance(m, wire.Forward) and (m.step, m.microbatch) == (5, 1) and m.producer >= 0,
    "the commit": lambda m: isinstance(m, wire.Commit) and m.record.step == 5,
    "its difference": lambda m: isinstance(m, wire.PseudoGradient) and (m.step, m.last) == (5, False),
    "the end of its difference": lambda m: isinstance(m, wire.PseudoGradient) and (m.step, m.last) == (5, True),
    "the agreement": lambda m: isinstance(m, wire.OuterUpdateChunk) and (m.step, m.last) == (5, False),
    "the end of the agreement": lambda m: isinstance(m, wire.OuterUpdateChunk) and (m.step, m.last) == (5, True),
    "that it has adopted it": lambda m: isinstance(m, wire.Applied) and m.step == 5,
    "a forward behind": lambda m: isinstance(m, wire.Forward) and (m.step, m.microbatch) == (7, 0) and m.producer >= 0,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return run(tmp_path_factory.mktemp("undisturbed"), rules=OuterRules(codec="int8", deadline_s=60.0))


@pytest.fixture(scope="module")
def undisturbed_beside(tmp_path_factory: pytest.TempPathFactory) -> Story:
    rules = OuterRules(codec="int8", deadline_s=60.0)
    story = run(tmp_path_factory.mktemp("beside"), rules=rules, sync_lag=LAG)
    assert_ended(story)
    assert_all_agree(story)
    return story


def assert_nothing_changed(story: Story, undisturbed: Story) -> None:
    assert_ended(story)
    for name, runs in story.runs.items():
        by_step: dict[int, float] = {}
        for one in runs:
            by_step |= {done.record.step: done.record.loss for done in one.steps()}
        assert by_step == dict(enumerate(undisturbed.runs[name][-1].losses)), name
        before, after = undisturbed.runs[name][-1].weights(STEPS), runs[-1].weights(STEPS)
        assert before.keys() == after.keys()
        for entry, value in before.items():
            np.testing.assert_array_equal(value, after[entry], err_msg=entry)


@pytest.mark.parametrize(
    ("standbys", "victim"),
    [(True, 1), *(pytest.param(*case, marks=LONG) for case in ((False, 0), (True, 0), (False, 1)))],
    ids=["with-1", "without-0", "with-0", "without-1"],
)
@pytest.mark.parametrize("at", DIES)
def test_a_stage_dies_around_an_exchange_and_no_bit_changes(
    at: str, victim: int, standbys: bool, undisturbed: Story, tmp_path: Path
) -> None:
    strike_a_stage(DIES[at], victim, standbys, undisturbed, tmp_path, lag=0)


DIES_BESIDE: dict[str, Callable[[wire.Message], bool]] = {
    "its difference": DIES["its difference"],
    "the step behind": lambda m: isinstance(m, wire.Applied) and m.step == 6,
    "the agreement": DIES["the agreement"],
    "the last commit before it counts": lambda m: isinstance(m, wire.Commit) and m.record.step == 5 + LAG,
    "that it has adopted it": lambda m: isinstance(m, wire.Applied) and m.step == 5 + LAG,
    "the end of the last agreement": lambda m: isinstance(m, wire.OuterUpdateChunk) and (m.step, m.last) == (8, True),
}
OFTEN_BESIDE = [
    "the step behind",
    "the last commit before it counts",
    *(
        pytest.param(at, marks=LONG)
        for at in DIES_BESIDE
        if at not in ("the step behind", "the last commit before it counts")
    ),
]


@pytest.mark.parametrize(
    ("standbys", "victim"),
    [(True, 1), *(pytest.param(*case, marks=LONG) for case in ((False, 0), (True, 0), (False, 1)))],
    ids=["with-1", "without-0", "with-0", "without-1"],
)
@pytest.mark.parametrize("at", OFTEN_BESIDE)
def test_a_stage_dies_beside_an_exchange_and_no_bit_changes(
    at: str, victim: int, standbys: bool, undisturbed_beside: Story, tmp_path: Path
) -> None:
    strike_a_stage(DIES_BESIDE[at], victim, standbys, undisturbed_beside, tmp_path, lag=LAG)


EARLY = (2, 6, 1)
"""Rounds of 2, 1, 1, 1, 1 and 3 steps: in between, every step ends in an exchange."""


@pytest.fixture(scope="module")
def undisturbed_early(tmp_path_factory: pytest.TempPathFactory) -> Story:
    rules = OuterRules(codec="int8", deadline_s=60.0)
    story = run(tmp_path_factory.mktemp("early"), rules=rules, sync_early=EARLY)
    assert_ended(story)
    assert story.rounds == 6
    return story


@pytest.mark.parametrize("standbys", [True, pytest.param(False, marks=LONG)], ids=["standbys", "without"])
@pytest.mark.parametrize("at", ["the end of its difference", "that it has adopted it"])
def test_a_stage_dies_in_an_early_round_and_no_bit_changes(
    at: str, standbys: bool, undisturbed_early: Story, tmp_path: Path
) -> None:
    strike_a_stage(DIES[at], 1, standbys, undisturbed_early, tmp_path, lag=0, early=EARLY)


def strike_a_stage(
    due: Callable[[wire.Message], bool],
    victim: int,
    standbys: bool,
    undisturbed: Story,
    directory: Path,
    *,
    lag: int,
    early: tuple[int, int, int] = (0, 0, 0),
) -> None:
    struck: list[wire.Message] = []
    returned: list[asyncio.Task[None]] = []

    def watch(pool: MemoryPool, job: Job, message: wire.Message) -> None:
        if not struck and due(message):
            struck.append(message)
            pool.kill(peer_id(victim))
            if not standbys:
                returned.append(asyncio.get_running_loop().create_task(back(pool)))

    async def back(pool: MemoryPool) -> None:
        await pool.bury(peer_id(victim))
        await pool.revive(peer_id(victim))

    story = run(
        directory,
        watch,
        rules=OuterRules(codec="int8", deadline_s=60.0),
        standbys={0: 2, 1: 3} if standbys else {},
        checkpoint_every=4,
        sync_lag=lag,
        sync_early=early,
    )
    assert struck
    assert any(isinstance(event, progress.FaultSeen) for event in story.runs["b"][-1].events)
    assert_nothing_changed(story, undisturbed)


POWER_CUT = pytest.mark.parametrize(
    "power_cut", [False, pytest.param(True, marks=LONG)], ids=["its process", "all processes"]
)


@pytest.mark.parametrize("at", [at for at in DIES if at != "a forward before"])
@POWER_CUT
def test_the_driver_dies_around_an_exchange_and_no_bit_changes(
    at: str, power_cut: bool, undisturbed: Story, tmp_path: Path
) -> None:
    strike_the_driver(DIES[at], power_cut, undisturbed, tmp_path, lag=0)


@pytest.mark.parametrize("at", OFTEN_BESIDE)
@POWER_CUT
def test_the_driver_dies_beside_an_exchange_and_no_bit_changes(
    at: str, power_cut: bool, undisturbed_beside: Story, tmp_path: Path
) -> None:
    strike_the_driver(DIES_BESIDE[at], power_cut, undisturbed_beside, tmp_path, lag=LAG)


def strike_the_driver(
    due: Callable[[wire.Message], bool], power_cut: bool, undisturbed: Story, directory: Path, *, lag: int
) -> None:
    struck: list[wire.Message] = []

    def watch(pool: MemoryPool, job: Job, message: wire.Message) -> None:
        if not struck and due(message):
            struck.append(message)
            job.die()

    rules = OuterRules(codec="int8", deadline_s=60.0)
    starts = ({}, {"power_cut": power_cut})
    story = run(directory, watch, rules=rules, starts=starts, checkpoint_every=4, sync_lag=lag)
    assert struck
    assert_nothing_changed(story, undisturbed)


def test_nobody_waits_beyond_the_deadline_and_whoever_was_late_goes_on_from_the_anchor(tmp_path: Path) -> None:
    """One job's stages are gone when it should tell its differences, until the other has ended."""
    away: list[asyncio.Task[None]] = []
    ended = asyncio.Event()

    def watch(pool: MemoryPool, job: Job, message: wire.Message) -> None:
        if not away and isinstance(message, wire.PseudoGradient):
            pool.kill(peer_id(0), peer_id(1))
            away.append(asyncio.get_running_loop().create_task(back(pool)))

    async def back(pool: MemoryPool) -> None:
        await ended.wait()
        for number in (0, 1):
            await pool.bury(peer_id(number))
            await pool.revive(peer_id(number))

    rules = OuterRules(codec="int8", deadline_s=0.2)
    story = run(tmp_path, watch, rules=rules, on_end={"a": ended.set})
    assert_ended(story)
    assert [len(runs) for runs in story.runs.values()] == [1, 1]
    kinds = [one.form for one in story.told["b"]]
    assert kinds[0] == "all", "it missed three rounds"
    assert kinds[1:] == ["other", "mean"], "its late difference is the other one; then it is alone"
    assert story.rounds == 2 * STEPS // EVERY - 1
    weights = story.runs["b"][-1].weights(STEPS)
    for key, value in story.agreed.items():
        np.testing.assert_array_equal(weights[f"model/{key}"], value, err_msg=key)


def test_ends_may_stay_with_each_drivers_owner(tmp_path: Path):
    """What the owner trains takes part in exchanges like what its peers train."""
    (tmp_path / "pool").mkdir()
    (tmp_path / "split").mkdir()
    pool = run(tmp_path / "pool")
    split = run(tmp_path / "split", ranges=((0, 1), (1, 4), (4, 6)), owned=frozenset({0, 2}))
    for name in JOBS:
        assert split.runs[name][0].losses == pool.runs[name][0].losses
    assert split.agreed.keys() == pool.agreed.keys()
    assert [key for key, value in pool.agreed.items() if split.agreed[key].tobytes() != value.tobytes()] == []
