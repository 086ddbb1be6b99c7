"""Jobs that train one model alone for some steps and then agree: DiLoCo's numbers, the same bits everywhere, whenever
the owner's process is killed.

Neighbours: `test_job_twins`, where machines die; `test_job_replicas`, where gradients are summed at every step;
`harness.exchanging`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fusionai.backends.torch.optimizers import make_optimizer
from fusionai.primitives.ids import PeerId
from fusionai.storage.commits import CommitJournal
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged
from harness.exchanging import (
    EVERY,
    LAG,
    LLAMA,
    MOMENTUM,
    RATE,
    STEPS,
    VOCABULARY,
    Restart,
    Story,
    assert_agreed,
    assert_same,
    data_of,
    first_values,
    run,
)
from harness.pool import Job, array

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

JOBS = "ab"


def transformers_model() -> nn.Module:
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))


def plain(lag: int, ends: Collection[int]) -> dict[str, list[float]]:
    """Two models, two AdamW, and torch's SGD with Nesterov's momentum on what is agreed after `ends` steps, adopted
    `lag` steps late."""
    models = {name: transformers_model() for name in JOBS}
    for model in models.values():
        model.load_state_dict({key: torch.from_numpy(array(value).copy()) for key, value in first_values().items()})
    spec = Job.__dataclass_fields__["optimizer"].default_factory()  # pyright: ignore
    rate = Job.__dataclass_fields__["learning_rate"].default
    inner = {name: make_optimizer(spec, list(model.parameters())) for name, model in models.items()}
    agreed = [nn.Parameter(value.detach().clone()) for value in models["a"].parameters()]
    outer = torch.optim.SGD(agreed, lr=RATE, momentum=MOMENTUM, nesterov=True)
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
    story = run(tmp_path / "run", jobs=JOBS, codec="none", sync_lag=lag, sync_early=early)
    assert len(story.rounds) == len(ends)
    assert_agreed(story.runs["b"].weights(STEPS), story.runs["a"].weights(STEPS))
    for name, losses in plain(lag, ends).items():
        np.testing.assert_allclose(story.runs[name].losses, losses, rtol=1e-5)


@pytest.mark.parametrize("codec", ["int8", *(pytest.param(codec, marks=LONG) for codec in ("ternary", "int2")), "topk"])
def test_packed_all_have_the_same_bits(codec: Exchanged, tmp_path: Path) -> None:
    story = run(tmp_path / "run", codec=codec)
    for name in "bc":
        assert_agreed(story.runs[name].weights(STEPS), story.runs["a"].weights(STEPS))


def test_ends_may_stay_with_each_drivers_owner(tmp_path: Path) -> None:
    """What the owner trains takes part in exchanges like what its peers train."""
    pool = run(tmp_path / "pool", jobs=JOBS)
    split = run(tmp_path / "split", jobs=JOBS, ranges=((0, 1), (1, 4), (4, 5)), owned=frozenset({0, 2}))
    for name in JOBS:
        assert split.runs[name].losses == pool.runs[name].losses
    assert_same(split, pool)


DIES: dict[str, Callable[[wire.Message], bool]] = {
    "the commit": lambda m: isinstance(m, wire.Commit) and m.record.step == 5,
    "a stage waits": lambda m: isinstance(m, wire.DifferenceReady) and m.step == 5,
    "a round is decided": lambda m: isinstance(m, wire.ExchangeRound) and m.number == 2,
    "a difference": lambda m: isinstance(m, wire.ExchangePart) and (m.kind, m.number) == ("difference", 2),
    "a mean": lambda m: isinstance(m, wire.ExchangePart) and (m.kind, m.number) == ("mean", 2),
    "a stage has all means": lambda m: isinstance(m, wire.ExchangeWhole) and m.number == 2,
    "a stage may adopt": lambda m: isinstance(m, wire.ExchangeAdopt) and m.number == 2,
    "a stage has adopted": lambda m: isinstance(m, wire.Applied) and m.step == 5,
    "a forward behind": lambda m: isinstance(m, wire.Forward) and (m.step, m.microbatch) == (7, 0) and m.producer >= 0,
}
DIES_BESIDE: dict[str, Callable[[wire.Message], bool]] = {
    "a stage waits": DIES["a stage waits"],
    "the step behind": lambda m: isinstance(m, wire.Applied) and m.step == 6,
    "a mean": DIES["a mean"],
    "the last commit before it counts": lambda m: isinstance(m, wire.Commit) and m.record.step == 5 + LAG,
    "a stage has adopted": lambda m: isinstance(m, wire.Applied) and m.step == 5 + LAG,
    "the last update": lambda m: isinstance(m, wire.ExchangeAdopt) and m.number == 3,
}
OFTEN_BESIDE = ("the step behind", "the last commit before it counts")
CASES = [
    *((at, 0) for at in DIES),
    *(pytest.param(at, LAG, marks=() if at in OFTEN_BESIDE else LONG) for at in DIES_BESIDE),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Story]:
    """By `sync_lag`."""
    return {lag: run(tmp_path_factory.mktemp("undisturbed") / "run", jobs=JOBS, sync_lag=lag) for lag in (0, LAG)}


@pytest.mark.parametrize("power_cut", [False, pytest.param(True, marks=LONG)], ids=["its process", "all processes"])
@pytest.mark.parametrize(("at", "lag"), CASES)
def test_the_owners_process_is_killed_around_an_exchange_and_no_bit_changes(
    at: str, lag: int, power_cut: bool, undisturbed: dict[int, Story], tmp_path: Path
) -> None:
    due = (DIES_BESIDE if lag else DIES)[at]
    struck: list[wire.Message] = []

    def watch(jobs: dict[str, Job], sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        if not struck and due(message):
            struck.append(message)
            for job in jobs.values():
                job.die()

    restart = Restart(power_cut=power_cut)
    story = run(tmp_path / "run", jobs=JOBS, watch=watch, restart=restart, checkpoint_every=4, sync_lag=lag)
    assert struck
    assert_same(story, undisturbed[lag])
    for name in JOBS:
        with CommitJournal(tmp_path / "run" / name / "commits.sqlite") as journal:
            losses = [record.loss for record in journal.records(0)]
        assert losses == undisturbed[lag].runs[name].losses, name
