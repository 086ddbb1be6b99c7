"""Rounds of several jobs: who takes part, who begins late, what is told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from fusionai.execution.tensors import as_array
from fusionai.execution.training.codecs import Carried, pack, unpack
from fusionai.execution.training.exchange import OuterOptimizer
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.training.outer import Outer, OuterRules, OuterState, OuterUpdate, RoundDone
from fusionai.wire.codecs import Exchanged

PLAIN = OuterRules(codec="none", learning_rate=1.0, momentum=0.0, deadline_s=0.01)


def tensor(*values: float) -> HostTensor:
    return host_tensor("float32", (len(values),), np.asarray(values, np.float32).tobytes())


def moved(*values: float) -> dict[str, Carried]:
    return {"w": tensor(*values)}


@dataclass
class Memory:
    """`OuterFiles` that forgets nothing."""

    answers: dict[str, list[OuterUpdate]] = field(default_factory=dict)

    def save(self, state: OuterState, updates: Mapping[str, OuterUpdate], rounds: Mapping[str, int]) -> None:
        for job, outer_update in updates.items():
            self.answers.setdefault(job, []).append(outer_update)

    def updates(self, job: str, since: int) -> Iterable[OuterUpdate]:
        return [one for one in self.answers.get(job, ()) if one.step >= since]

    def forget(self, job: str, below: int) -> None: ...


def opened(rounds: list[RoundDone]) -> Outer:
    return Outer(OuterState.first({"w": tensor(0, 0)}), PLAIN, Memory(), {}, on_round=rounds.append)


def value(agreed: Mapping[str, HostTensor]) -> list[float]:
    return as_array(agreed["anchor/w"]).tolist()


def test_a_newcomer_begins_with_what_is_agreed_on_and_is_in_the_next_round() -> None:
    rounds: list[RoundDone] = []

    async def body() -> None:
        outer = opened(rounds)
        first = outer.seat("a")
        await first.agree(3, moved(2, 4))
        second, agreed = await outer.newcomer("b")
        assert value(agreed) == [-2, -4]
        both = await asyncio.gather(first.agree(7, moved(1, 1)), second.agree(3, moved(3, 1)))
        assert [one.form for one in both] == ["other", "other"]
        await outer.close()

    asyncio.run(body())
    assert [(one.number, one.jobs, one.late) for one in rounds] == [(1, ("a",), ()), (2, ("a", "b"), ())]
    assert [one.nbytes for one in rounds] == [2 * 8, 4 * 8]


def test_who_misses_a_round_is_behind_until_it_has_been_told() -> None:
    rounds: list[RoundDone] = []

    async def body() -> None:
        outer = opened(rounds)
        first, second = outer.seat("a"), outer.seat("b")
        await first.agree(3, moved(2, 4))
        answers = await second.agree(3, moved(4, 0))
        assert (answers.form, value(dict(answers.values))) == ("all", [-2, -4])  # pyright: ignore[reportArgumentType]
        both = await asyncio.gather(first.agree(7, moved(0, 0)), second.agree(7, moved(2, 0)))
        assert all(one.form == "mean" for one in both)
        assert as_array(both[0].values["w"]).tolist() == [2, 0], "the mean of three differences, one of them late"  # pyright: ignore
        await outer.close()

    asyncio.run(body())
    assert rounds[1].late == ("b",)
    assert rounds[1].nbytes == (3 + 2 + 2) * 8, "three differences, two agreements, and what b was told instead"


def test_who_has_left_is_not_waited_for() -> None:
    rounds: list[RoundDone] = []

    async def body() -> None:
        outer = Outer(
            OuterState.first({"w": tensor(0, 0)}),
            OuterRules(codec="none", deadline_s=3600.0),
            Memory(),
            {},
            on_round=rounds.append,
        )
        first = outer.seat("a")
        outer.seat("b")
        outer.leave("b")
        await first.agree(0, moved(1, 1))
        await outer.close()

    asyncio.run(body())
    assert [one.jobs for one in rounds] == [("a",)]


def test_who_misses_a_round_is_not_waited_for_again_until_it_comes() -> None:
    rounds: list[RoundDone] = []

    async def body() -> None:
        outer = opened(rounds)
        first, second = outer.seat("a"), outer.seat("b")
        await first.agree(3, moved(1, 1))
        outer._rules = OuterRules(codec="none", learning_rate=1.0, momentum=0.0, deadline_s=3600.0)
        await first.agree(7, moved(1, 1))
        await second.agree(3, moved(1, 1))
        asking = asyncio.create_task(first.agree(11, moved(1, 1)))
        await asyncio.wait({asking}, timeout=5 * PLAIN.deadline_s)
        assert not asking.done(), "it has come: it is waited for"
        await asyncio.gather(asking, second.agree(7, moved(1, 1)))
        await outer.close()

    asyncio.run(body())
    assert [one.jobs for one in rounds] == [("a",), ("a",), ("a", "b")]


def test_held_no_round_is_decided_that_lacks_somebody() -> None:
    rounds: list[RoundDone] = []

    async def body() -> None:
        outer = opened(rounds)
        first, second = outer.seat("a"), outer.seat("b")
        outer.hold()
        asking = asyncio.create_task(first.agree(3, moved(1, 1)))
        await asyncio.wait({asking}, timeout=5 * PLAIN.deadline_s)
        assert not asking.done()
        assert outer.waits_in_vain(["a"])
        assert not outer.waits_in_vain(["a", "b"])
        await asyncio.gather(asking, second.agree(3, moved(3, 1)))
        await outer.close()

    asyncio.run(body())
    assert [one.jobs for one in rounds] == [("a", "b")]


@pytest.mark.parametrize("jobs", [1, 2, 3])
@pytest.mark.parametrize("codec", ["none", "int8", "int2"])
def test_everybody_comes_to_the_same_bits_from_what_it_is_told(jobs: int, codec: Exchanged) -> None:
    rng = np.random.default_rng(jobs)
    first = {"w": host_tensor("float32", (20, 30), rng.standard_normal(600, np.float32).tobytes())}
    rules = OuterRules(codec=codec, learning_rate=0.8, momentum=0.6)
    state, step = OuterState.first(first), OuterOptimizer(learning_rate=0.8, momentum=0.6)
    anchors = [as_array(first["w"]).ravel()] * jobs
    momenta = [np.zeros(600, np.float32)] * jobs
    for _ in range(4):
        come = [host_tensor("float32", (600,), rng.standard_normal(600, np.float32).tobytes()) for _ in range(jobs)]
        sent = [pack("w", one, codec) for one in come]
        answers = state.step([{"w": one} for one in sent], rules)
        assert [form for form, _ in answers] == ["other" if jobs == 2 else "mean"] * jobs
        for job, (form, values) in enumerate(answers):
            gradient = as_array(unpack(values["w"]))
            if form == "other":
                gradient = (as_array(unpack(sent[job])) + gradient) * np.float32(0.5)
            anchors[job], momenta[job] = step.take(anchors[job], momenta[job], gradient)
            np.testing.assert_array_equal(anchors[job], state.anchor["w"])
            np.testing.assert_array_equal(momenta[job], state.momentum["w"])


def test_what_packing_the_mean_loses_is_made_up_for() -> None:
    """Of three; of two nothing is packed twice."""
    rng = np.random.default_rng(0)
    tensors = [host_tensor("float32", (512,), rng.standard_normal(512, np.float32).tobytes()) for _ in range(3)]
    rules = OuterRules(codec="int2", learning_rate=1.0, momentum=0.0)
    state = OuterState.first({"w": host_tensor("float32", (512,), bytes(4 * 512))})
    for _ in range(20):
        state.step([{"w": pack("w", one, "int2")} for one in tensors], rules)
    wanted = -20 * np.mean([as_array(unpack(pack("w", one, "int2"))) for one in tensors], axis=0)
    np.testing.assert_allclose(state.anchor["w"] - state.residual["w"], wanted, atol=1e-4)
    assert 0 < np.abs(state.residual["w"]).max() < 3
