"""Jobs that train one model and exchange between their machines: the bits of one process that sums the shares in the
order of the replicas, whichever machine dies at whichever message, and next to nothing over the owner's line.

Neighbours: `test_job_local_updates`, which compares with DiLoCo's numbers; `harness.exchanging`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fusionai.client.training.job_directory import go_back
from fusionai.coordination.training.exchanges import Exchanges
from fusionai.coordination.training.twin_round import spans
from fusionai.execution.tensors import as_array
from fusionai.execution.training.codecs import pack, unpack
from fusionai.primitives.errors import TransportError
from fusionai.primitives.ids import PeerId
from fusionai.storage.reader import forget_after
from fusionai.training.joint_exchange import JointExchange, JointSeat
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged
from harness.exchanging import (
    CUTS,
    EVERY,
    LAG,
    MOMENTUM,
    RATE,
    STEPS,
    WEIGHTS,
    Story,
    assert_agreed,
    assert_same,
    first_values,
    run,
    states,
)
from harness.pool import OWNER, Job, MemoryPool, peer_id, tensor

pytestmark = pytest.mark.slow

KILLS = 40


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return run(tmp_path_factory.mktemp("undisturbed") / "run")


def packed_as(values: np.ndarray, codec: Exchanged) -> np.ndarray:
    return as_array(unpack(pack("x", tensor(values), codec))).copy()


def one_process(
    before: dict[str, dict[str, np.ndarray]], present: dict[str, dict[str, np.ndarray]], key: str, codec: Exchanged
) -> dict[str, dict[str, np.ndarray]]:
    """One round of one parameter, computed in one place: replica -> slot -> value. `before`: the states after the last
    round, `present`: just before this one."""
    names, rate, momentum = sorted(before), np.float32(RATE), np.float32(MOMENTUM)
    anchor = before["a"][f"optimizer/{key}/anchor"].reshape(-1)
    differences = {
        name: (anchor - present[name][f"model/{key}"].reshape(-1))
        + before[name][f"optimizer/{key}/residual"].reshape(-1)
        for name in names
    }
    gradient = np.zeros_like(anchor)
    residual = {name: np.zeros_like(anchor) for name in names}
    for summing, (first, below) in zip(names, spans(key, anchor.size, [WEIGHTS[name] for name in names]), strict=True):
        if first == below:
            continue
        share, total = slice(first, below), np.zeros(below - first, np.float32)
        for name in names:
            own = differences[name][share]
            sent = own if name == summing else packed_as(own, codec)
            residual[name][share] = own - sent
            total += sent
        mean = total * np.float32(1 / len(names))
        gradient[share] = packed_as(mean, codec)
        residual[summing][share] = (mean - gradient[share]) * np.float32(len(names))
    held = before["a"][f"optimizer/{key}/outer_momentum"].reshape(-1) * momentum + gradient
    value = anchor - rate * (gradient + momentum * held)
    return {
        name: {"model": value, "anchor": value, "outer_momentum": held, "residual": residual[name]} for name in names
    }


def test_bits_are_those_of_one_process(undisturbed: Story, tmp_path: Path) -> None:
    keys = sorted(first_values())
    start = {
        name: {f"optimizer/{key}/anchor": np.array(as_array(first_values()[key])) for key in keys}
        | {f"optimizer/{key}/{slot}": np.zeros(as_array(first_values()[key]).size, np.float32)
           for key in keys for slot in ("outer_momentum", "residual")}
        for name in CUTS
    }  # fmt: skip
    alone = run(tmp_path / "alone", sync_every=STEPS)
    once = run(tmp_path / "once", sync_every=STEPS, sync_early=(0, EVERY, EVERY))
    for before, present, step in (
        (start, states(alone, EVERY), EVERY),
        (states(undisturbed, EVERY), states(once, 2 * EVERY), 2 * EVERY),
    ):
        after = states(undisturbed, step)
        for key in keys:
            for name, slots in one_process(before, present, key, "int4").items():
                assert_slots(after[name], key, slots)


def test_the_owners_line_carries_decisions_only(undisturbed: Story) -> None:
    assert [one.number for one in undisturbed.rounds] == [1, 2, 3]
    assert undisturbed.line_bytes.keys() == DECISIONS
    decided_bytes = sum(undisturbed.line_bytes.values())
    assert undisturbed.linked_bytes > 10 * decided_bytes


Seen = Callable[[PeerId, PeerId, wire.Message], bool]
ROUND = 2
POINTS: dict[str, tuple[int, Seen]] = {
    "waits": (0, lambda sender, receiver, m: isinstance(m, wire.DifferenceReady) and (m.stage, m.step) == (0, 5)),
    "hears": (1, lambda sender, receiver, m: isinstance(m, wire.ExchangeRound) and m.number == ROUND),
    "sends a difference": (0, lambda sender, receiver, m: is_part(m, "difference") and sender == peer_id(2)),
    "gets a difference": (0, lambda sender, receiver, m: is_part(m, "difference") and receiver == peer_id(2)),
    "sends a mean": (1, lambda sender, receiver, m: is_part(m, "mean") and sender == peer_id(3)),
    "gets a mean": (0, lambda sender, receiver, m: is_part(m, "mean") and receiver == peer_id(2)),
    "its neighbour": (1, lambda sender, receiver, m: is_part(m, "mean") and receiver == peer_id(2)),
    "has adopted": (0, lambda sender, receiver, m: isinstance(m, wire.Applied) and (m.stage, m.step) == (0, 5)),
    "a step later": (1, lambda sender, receiver, m: isinstance(m, wire.Commit) and m.record.step == 6),
}
"""When a machine of replica b dies -> (which stage's, the message that it dies at)."""


def test_machines_without_a_link_exchange_through_the_owner(undisturbed: Story, tmp_path: Path) -> None:
    def cut_off(jobs: dict[str, Job], sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        if isinstance(message, wire.OpenJob) and message.twin_of and peer_id(0) in (sender, receiver):
            raise TransportError("no way through")

    relayed = run(tmp_path / "relayed", watch=cut_off, steps=EVERY)
    assert_same(relayed, undisturbed, EVERY)
    (done,) = relayed.rounds
    assert relayed.line_bytes["ExchangePart"] > 0
    assert done.nbytes > 10 * undisturbed.rounds[0].nbytes, "and the round states it"


@dataclass
class Strike:
    """Kills the machine of a replica's stage at the first message of this replica that `seen` names."""

    replica: str
    stage: int
    seen: Seen
    done: bool = False

    def __call__(self, jobs: dict[str, Job], sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        pool = jobs[self.replica].pool
        machines = {host.peer for host in pool.hosts} | {OWNER}
        if not self.done and {sender, receiver} & machines and self.seen(sender, receiver, message):
            self.done = True
            pool.kill(peer_id(pool.first + self.stage))


def is_part(message: wire.Message, kind: str) -> bool:
    return isinstance(message, wire.ExchangePart) and (message.kind, message.number) == (kind, ROUND)


@pytest.mark.parametrize("point", POINTS)
def test_no_bit_changes_when_a_machine_dies(point: str, undisturbed: Story, tmp_path: Path) -> None:
    strike = Strike("b", *POINTS[point])
    assert_same(run(tmp_path / "struck", watch=strike, spared=("b",)), undisturbed)
    assert strike.done


EARLY = (2, 6, 1)
"""Rounds of 2, 1, 1, 1, 1 and 3 steps: in between, every step ends in an exchange."""


@pytest.fixture(scope="module")
def undisturbed_early(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = run(tmp_path_factory.mktemp("early") / "run", sync_early=EARLY)
    assert len(story.rounds) == 6
    return story


@pytest.mark.parametrize("point", ["its neighbour", "has adopted"])
def test_in_an_early_round_no_bit_changes_when_a_machine_dies(
    point: str, undisturbed_early: Story, tmp_path: Path
) -> None:
    strike = Strike("b", *POINTS[point])
    assert_same(run(tmp_path / "struck", watch=strike, spared=("b",), sync_early=EARLY), undisturbed_early)
    assert strike.done


@pytest.mark.parametrize("point", ["gets a difference", pytest.param("sends a mean", marks=pytest.mark.long)])
def test_no_bit_changes_when_a_machine_dies_and_comes_back(point: str, undisturbed: Story, tmp_path: Path) -> None:
    """Nobody stands by, so the replica goes back to its checkpoint; the others serve it the same round again."""
    strike, tasks = Strike("b", *POINTS[point]), list[asyncio.Task[None]]()

    async def back(pool: MemoryPool) -> None:
        await pool.bury(peer_id(pool.first + strike.stage))
        await pool.revive(peer_id(pool.first + strike.stage))

    def watch(jobs: dict[str, Job], sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        strike(jobs, sender, receiver, message)
        if strike.done and not tasks:
            tasks.append(asyncio.get_running_loop().create_task(back(jobs["b"].pool)))

    assert_same(run(tmp_path / "struck", watch=watch), undisturbed)
    assert tasks


@pytest.fixture(scope="module")
def undisturbed_beside(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Every replica trains two steps during an exchange."""
    return run(tmp_path_factory.mktemp("beside") / "run", sync_lag=LAG)


def test_with_overlap_all_agree_and_the_update_is_adopted_later(undisturbed_beside: Story, undisturbed: Story) -> None:
    for name in "bc":
        assert_agreed(undisturbed_beside.runs[name].weights(STEPS), undisturbed_beside.runs["a"].weights(STEPS))
    beside, alone = (story.runs["a"].losses for story in (undisturbed_beside, undisturbed))
    assert beside[: EVERY + LAG] != alone[: EVERY + LAG]
    assert beside[:EVERY] == alone[:EVERY]


POINTS_BESIDE: dict[str, tuple[int, Seen]] = {
    **{point: POINTS[point] for point in ("sends a difference", "gets a mean", "its neighbour")},
    "trains on": (0, lambda sender, receiver, m: isinstance(m, wire.Applied) and (m.stage, m.step) == (0, 6)),
    "is about to adopt": (1, lambda sender, receiver, m: isinstance(m, wire.Commit) and m.record.step == 5 + LAG),
    "has adopted": (0, lambda sender, receiver, m: isinstance(m, wire.Applied) and (m.stage, m.step) == (0, 5 + LAG)),
}


@pytest.mark.parametrize("saved_every", [EVERY, pytest.param(EVERY + 1, marks=pytest.mark.long)])
@pytest.mark.parametrize("point", POINTS_BESIDE)
def test_with_overlap_no_bit_changes_when_a_machine_dies(
    point: str, saved_every: int, undisturbed_beside: Story, tmp_path: Path
) -> None:
    strike = Strike("b", *POINTS_BESIDE[point])
    changes = {"spared": ("b",), "sync_lag": LAG, "checkpoint_every": saved_every}
    assert_same(run(tmp_path / "struck", watch=strike, **changes), undisturbed_beside)
    assert strike.done


DECISIONS = {"DifferenceReady", "ExchangeRound", "ExchangeWhole", "ExchangeAdopt"}


@pytest.fixture(scope="module")
def with_newcomer(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Replica c, which is cut elsewhere, begins after the first exchange."""
    return run(tmp_path_factory.mktemp("newcomer") / "run", begun={"c": EVERY})


@pytest.fixture(scope="module")
def newcomer_beside(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The same with steps during an exchange."""
    return run(tmp_path_factory.mktemp("newcomer beside") / "run", begun={"c": EVERY}, sync_lag=LAG)


def test_with_overlap_a_replica_that_begins_later_has_the_others_bits(newcomer_beside: Story) -> None:
    assert [one.jobs for one in newcomer_beside.rounds] == [("a", "b"), ("a", "b", "c"), ("a", "b", "c")]
    assert_agreed(newcomer_beside.runs["c"].weights(2 * EVERY), newcomer_beside.runs["a"].weights(STEPS))


def test_a_replica_that_begins_later_has_the_others_bits(
    with_newcomer: Story, undisturbed: Story, tmp_path: Path
) -> None:
    assert [one.jobs for one in with_newcomer.rounds] == [("a", "b"), ("a", "b", "c"), ("a", "b", "c")]
    assert [one.steps for one in with_newcomer.rounds][1] == {"a": 5, "b": 5, "c": 2}
    two = run(tmp_path / "two", jobs="ab", steps=EVERY)
    assert_agreed(with_newcomer.runs["a"].weights(EVERY), two.runs["a"].weights(EVERY))
    for own, theirs in ((EVERY, 2 * EVERY), (2 * EVERY, STEPS)):
        assert_agreed(with_newcomer.runs["c"].weights(own), with_newcomer.runs["a"].weights(theirs))
    sent = with_newcomer.line_bytes
    assert sent.keys() == DECISIONS, "the state did not take the owner's line"
    assert with_newcomer.linked_bytes > undisturbed.linked_bytes / 2


def test_the_newcomer_trains_from_the_agreed_state(tmp_path: Path) -> None:
    """With a learning rate of 0 its first step changes nothing, so its parameters are still those it began with."""
    still = lambda step: 0.0  # noqa: E731
    found = run(tmp_path / "still", begun={"c": EVERY}, steps=2 * EVERY, learning_rate=still, spared=("c",))
    trained = run(tmp_path / "trained", begun={"c": EVERY}, steps=2 * EVERY, checkpoint_every=1)
    for story, at_most in ((found, 0.0), (trained, 1.3e-3)):  # AdamW's first step: the rate of 1e-3, and the decay
        state = story.runs["c"].weights(1 if story is trained else EVERY)
        agreed = story.runs["a"].weights(EVERY)
        for key in first_values():
            begun = agreed[f"optimizer/{key}/anchor"].reshape(-1)
            moved = np.abs(state[f"model/{key}"].reshape(-1) - begun).max()
            assert moved <= at_most, key
            if story is trained and key.endswith("proj.weight"):
                assert np.abs(begun - as_array(first_values()[key])).max() > 2 * at_most, "the others had trained"


NEWCOMER_POINTS: dict[str, tuple[str, int, Seen]] = {
    "the newcomer asks": ("c", 0, lambda sender, receiver, m: isinstance(m, wire.StateWanted)),
    "the newcomer is welcomed": (
        "c",
        0,
        lambda sender, receiver, m: isinstance(m, wire.ExchangeRound) and m.is_welcome,
    ),
    "the newcomer gets a piece": ("c", 0, lambda sender, receiver, m: is_state(m)),
    "a sender hears of it": ("b", 1, lambda sender, receiver, m: isinstance(m, wire.ExchangeRound) and m.is_welcome),
    "a sender sends": ("b", 0, lambda sender, receiver, m: is_state(m)),
    "the newcomer has begun": ("c", 0, lambda sender, receiver, m: isinstance(m, wire.Ready)),
}


def is_state(message: wire.Message) -> bool:
    return isinstance(message, wire.ExchangePart) and message.kind == "state"


@pytest.mark.parametrize("point", NEWCOMER_POINTS)
def test_a_newcomer_begins_with_the_same_bits_when_a_machine_dies(
    point: str, with_newcomer: Story, tmp_path: Path
) -> None:
    replica = NEWCOMER_POINTS[point][0]
    strike = Strike(*NEWCOMER_POINTS[point])
    assert_same(run(tmp_path / "struck", watch=strike, spared=(replica,), begun={"c": EVERY}), with_newcomer, EVERY)
    assert strike.done


@pytest.mark.parametrize("point", ["its neighbour", "gets a difference", "sends a mean"])
def test_the_others_go_on_without_a_replica_that_has_lost_a_machine_for_good(point: str, tmp_path: Path) -> None:
    stage, seen = POINTS[point]
    struck: list[wire.Message] = []

    def strike(jobs: dict[str, Job], sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        job = jobs["b"]
        if (
            not struck
            and {sender, receiver} & {host.peer for host in job.pool.hosts}
            and seen(sender, receiver, message)
        ):
            struck.append(message)
            job.pool.kill(peer_id(job.pool.first + stage))

    story = run(tmp_path / "lost", watch=strike, deadline_s=1.0)
    assert struck
    assert story.behind.keys() == {"b"}
    assert story.rounds[-1].jobs == ("a", "c")
    assert_agreed(story.runs["c"].weights(STEPS), story.runs["a"].weights(STEPS))


@pytest.mark.parametrize("goes_back", [True, False])
def test_after_a_loss_of_power_all_begin_between_the_same_two_exchanges(
    goes_back: bool, undisturbed: Story, tmp_path: Path
) -> None:
    """Only replica a has saved its state after the second exchange when all machines and the owner are lost."""
    run(tmp_path / "run", kill_after=7)
    for name in "bc":
        forget_after(tmp_path / "run" / name, EVERY)
    if not goes_back:  # what the test would miss
        assert run(tmp_path / "run").behind.keys() == {"b", "c"}
        return
    places = {number: (tmp_path / "run" / name, 0) for number, name in enumerate("abc")}
    assert go_back(places, Exchanges(every=EVERY, steps=STEPS)) == {0: EVERY}
    again = run(tmp_path / "run")
    assert_same(again, undisturbed)
    assert again.runs["a"].losses == undisturbed.runs["a"].losses[EVERY:]


@pytest.mark.parametrize(("lag", "saved_every"), [(0, EVERY), (LAG, EVERY + LAG)])
def test_what_a_late_replica_trained_counts_in_its_next_exchange(
    lag: int, saved_every: int, undisturbed: Story, tmp_path: Path
) -> None:
    """Replica b is away for the second exchange and catches up. From then on the learning rate is 0, so its difference
    in the third exchange is what it trained before the second."""
    usual = Job.__dataclass_fields__["learning_rate"].default
    still = lambda step: usual(step) if step < 2 * EVERY else 0.0  # noqa: E731
    away, tasks = list[str](), list[asyncio.Task[None]]()

    async def back(job: Job) -> None:
        await job.pool.bury(peer_id(job.pool.first))
        await job.pool.revive(peer_id(job.pool.first))

    async def pass_deadline(exchange: JointExchange) -> None:
        while exchange._book.missing(5) != {"b"}:
            await exchange._changed.wait()
        exchange._go_on(5)

    def watch(jobs: dict[str, Job], sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        machines = {name: {host.peer for host in job.pool.hosts} & {sender, receiver} for name, job in jobs.items()}
        start = asyncio.get_running_loop().create_task
        match message, away:
            case wire.Commit(record=record), [] if record.step == (5 if lag else 4) and machines["b"]:
                away.append("b")
                jobs["b"].pool.kill(peer_id(jobs["b"].pool.first))
                seat = jobs["a"].exchange
                assert isinstance(seat, JointSeat)
                tasks.append(start(pass_deadline(seat.exchange)))
            case wire.Commit(record=record), ["b"] if record.step == 6 and machines["a"]:
                away.append("a")  # so that the others do not reach the third exchange first
                jobs["a"].pool.kill(peer_id(jobs["a"].pool.first))
                tasks.append(start(back(jobs["b"])))
            case wire.DifferenceReady(step=5, stage=0), ["b", "a"] if machines["b"]:
                away.append("none")
                tasks.append(start(back(jobs["a"])))
            case _:
                pass

    story = run(tmp_path / "late", watch=watch, learning_rate=still, sync_lag=lag, checkpoint_every=saved_every)
    assert [(one.jobs, one.late) for one in story.rounds] == [
        (("a", "b", "c"), ()),
        (("a", "c"), ()),
        (("a", "b", "c"), ("b",)),
    ]
    for name in "bc":
        assert_agreed(story.runs[name].weights(STEPS), story.runs["a"].weights(STEPS))
    if lag:
        return
    once = run(tmp_path / "once", sync_every=STEPS, sync_early=(0, EVERY, EVERY))
    before, present, after = states(undisturbed, EVERY), states(once, 2 * EVERY), states(story, 2 * EVERY)
    two = {name: before[name] for name in "ac"}
    for key in first_values():
        second = one_process(two, present, key, "int4")
        anchor, residual = (before["b"][f"optimizer/{key}/{slot}"].reshape(-1) for slot in ("anchor", "residual"))
        kept = (anchor - present["b"][f"model/{key}"].reshape(-1)) + residual
        for name, slots in (second | {"b": second["a"] | {"residual": kept}}).items():
            assert_slots(after[name], key, slots)
        for name, slots in one_process(after, after, key, "int4").items():
            assert_slots(story.runs[name].weights(STEPS), key, slots)


def assert_slots(found: Mapping[str, np.ndarray], key: str, expected: Mapping[str, np.ndarray]) -> None:
    for slot, value in expected.items():
        entry = f"model/{key}" if slot == "model" else f"optimizer/{key}/{slot}"
        np.testing.assert_array_equal(found[entry].reshape(-1), value, err_msg=entry)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(KILLS))
def test_no_bit_changes_at_a_drawn_kill(
    seed: int,
    undisturbed: Story,
    with_newcomer: Story,
    undisturbed_beside: Story,
    newcomer_beside: Story,
    tmp_path: Path,
) -> None:
    """A machine of any replica dies at any message to or from it between the first exchange and the third. In a part of
    the runs the replicas train on during an exchange, or one begins later, or both."""
    draw = random.Random(seed)
    is_new, replica, stage = draw.random() < 0.3, draw.choice("abc"), draw.randrange(2)
    skipped = draw.randrange(120)
    lag = draw.choice((0, LAG))
    seen: list[wire.Message] = []
    struck: list[str] = []

    def strike(jobs: dict[str, Job], sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        if struck or replica not in jobs:
            return
        job = jobs[replica]
        victim = peer_id(job.pool.first + stage)
        if isinstance(message, wire.ExchangePart | wire.ExchangeRound | wire.Applied | wire.DifferenceReady):
            seen.append(message)
        if len(seen) > skipped and victim in (sender, receiver):
            struck.append(f"{type(message).__name__} {len(seen)}")
            job.pool.kill(victim)

    alone, beside = (with_newcomer, newcomer_beside) if is_new else (undisturbed, undisturbed_beside)
    expected, begun = beside if lag else alone, {"c": EVERY} if is_new else {}
    found = run(tmp_path / "struck", watch=strike, spared=(replica,), begun=begun, sync_lag=lag)
    for step in (EVERY, 2 * EVERY) if is_new else (STEPS,):
        assert_same(found, expected, step)
    assert struck, f"{len(seen)} messages"
