"""A stage's part in an exchange, and rounds of several replicas whose stages die at any message.

The world here delivers messages in a drawn order, and a stage that dies loses all it had and what was under way to it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from fusionai.coordination.training.joint_rounds import JointRound, RoundBook
from fusionai.coordination.training.twin_round import (
    Agree,
    MakeParts,
    PartsArrived,
    PartsMade,
    Receiver,
    SendParts,
    SharesSummed,
    SumShares,
    TwinCommand,
    TwinRound,
)
from fusionai.wire.messages import Fence

KEYS = {"a": frozenset({0, 1, 2}), "b": frozenset({1}), "c": frozenset({0, 2})}


def fence(attempt: int = 0) -> Fence:
    return Fence(1, 1, attempt)


def keys(names: str) -> frozenset[str]:
    return frozenset(names)


def test_each_parameter_is_summed_when_all_have_sent_it_and_its_mean_is_sent_at_once() -> None:
    stage = TwinRound(0, KEYS, 3)
    assert stage.begin() == [MakeParts()]
    other = Receiver(1, "one", 0, fence())
    assert stage.locate(frozenset({other})) == []
    assert stage.handle(PartsArrived("difference", 1, keys("ac"))) == [], "before its own are made"
    made = stage.handle(PartsMade(keys("ab")))
    assert made == [SendParts("difference", other, keys("ab")), SumShares(keys("b"))], (
        "it has no share of b to wait for"
    )
    assert stage.handle(PartsArrived("difference", 2, keys("a"))) == [SumShares(keys("a"))]
    assert not stage.lacks(PartsArrived("difference", 2, keys("a")))
    assert stage.handle(SharesSummed(keys("ab"))) == [SendParts("mean", other, keys("ab"))], "c is not even made"
    assert stage.handle(PartsArrived("difference", 2, keys("c"))) == []
    assert stage.handle(PartsMade(keys("c"))) == [SendParts("difference", other, keys("c")), SumShares(keys("c"))]
    assert stage.handle(PartsArrived("mean", 2, keys("ac"))) == []
    assert stage.handle(SharesSummed(keys("c"))) == [SendParts("mean", other, keys("c"))]
    assert stage.handle(PartsArrived("mean", 1, keys("ab"))) == [Agree()]
    assert stage.is_agreed


def test_nothing_is_adopted_before_the_own_differences_are_made() -> None:
    stage = TwinRound(0, {"a": frozenset({1}), "b": frozenset({1})}, 2)
    stage.handle(PartsMade(keys("a")))
    stage.handle(SharesSummed(keys("a")))
    assert stage.handle(PartsArrived("mean", 1, keys("ab"))) == []
    assert stage.handle(PartsMade(keys("b"))) == [SumShares(keys("b"))]
    assert stage.handle(SharesSummed(keys("b"))) == [Agree()]


def test_a_stage_that_begins_again_is_sent_everything_again() -> None:
    stage = TwinRound(0, {"a": frozenset({0})}, 2)
    first, again = Receiver(1, "one", 0, fence()), Receiver(1, "one", 0, fence(1))
    stage.locate(frozenset({first}))
    stage.handle(PartsMade(keys("a")))
    stage.handle(PartsArrived("difference", 1, keys("a")))
    assert stage.handle(SharesSummed(keys("a"))) == [SendParts("mean", first, keys("a")), Agree()]
    assert stage.locate(frozenset({first})) == []
    sent = [SendParts(kind, again, keys("a")) for kind in ("difference", "mean")]
    assert stage.locate(frozenset({again})) == sent


@dataclass
class Stage:
    """A stage with symbolic values. `round`: its part in the round; None before it hears of the round."""

    place: int
    attempt: int = 0
    round: TwinRound | None = None
    differences: dict[str, dict[int, str]] = field(default_factory=dict)
    means: dict[tuple[int, str], str] = field(default_factory=dict)
    agreed: bool = False
    adopted: dict[tuple[int, str], str] | None = None


class World:
    """Replicas of one stage each. A difference of replica 1 is "d1"; a mean names what was summed, in order."""

    def __init__(self, replicas: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shares = {
            key: frozenset(self.draw.sample(range(replicas), self.draw.randint(1, replicas))) for key in "abcd"
        }
        self.book = RoundBook(expected=dict.fromkeys(map(str, range(replicas)), 0))
        self.stages = [Stage(place) for place in range(replicas)]
        self.under_way: list[tuple[Receiver, str, int, dict[str, str]]] = []
        self.work: list[tuple[int, int, PartsMade | SharesSummed]] = []
        self.decided: JointRound | None = None
        for stage in self.stages:
            self.enter(stage)

    def enter(self, stage: Stage) -> None:
        """A stage, new or begun again, waits for the update of step 4."""
        job = str(stage.place)
        self.book.place(job, [0], 1.0)
        self.tell(self.book.waits(job, 0, 4))
        if (decided := self.book.decide()) is not None:
            assert self.decided is None, "a round is decided once"
            self.decided = decided
            self.tell([decided.number])

    def tell(self, numbers: list[int]) -> None:
        for number in numbers:
            waiting = self.book.waiting(number)
            for stage in self.stages:
                if stage.round is None:
                    stage.round = TwinRound(stage.place, self.shares, len(self.stages))
                    self.perform(stage, stage.round.begin())
                others = frozenset(
                    Receiver(one.place, str(one.place), 0, fence(one.attempt))
                    for one in self.stages
                    if one is not stage and (str(one.place), 0) in waiting
                )
                self.perform(stage, stage.round.locate(others))

    def perform(self, stage: Stage, commands: list[TwinCommand]) -> None:
        for command in commands:
            match command:
                case SendParts("difference", to, some):
                    parts = {key: f"d{stage.place}" for key in some if to.member in self.shares[key]}
                    self.under_way.append((to, "difference", stage.place, parts))
                case SendParts(_, to, some):
                    parts = {key: stage.means[stage.place, key] for key in some if stage.place in self.shares[key]}
                    self.under_way.append((to, "mean", stage.place, parts))
                case MakeParts():  # in two pieces
                    drawn = frozenset(key for key in self.shares if self.draw.random() < 0.5)
                    for made in (drawn, self.shares.keys() - drawn):
                        self.work.append((stage.place, stage.attempt, PartsMade(frozenset(made))))
                case SumShares(some):
                    self.work.append((stage.place, stage.attempt, SharesSummed(some)))
                case Agree():
                    assert self.decided is not None
                    stage.agreed = True
                    if self.book.agrees(str(stage.place), 0, self.decided.number):
                        for one in self.stages:
                            self.adopt(one)

    def adopt(self, stage: Stage) -> None:
        """Every stage has had all means, so each that has them now adopts them."""
        if stage.agreed and stage.adopted is None:
            stage.adopted = dict(stage.means)
            self.book.applied(str(stage.place), 0, 5)

    def kill(self, place: int) -> None:
        attempt = self.stages[place].attempt + 1
        self.stages[place] = Stage(place, attempt)
        self.enter(self.stages[place])

    def step(self) -> bool:
        """Deliver one message or end one piece of work, drawn. False: nothing is left to do."""
        if not self.under_way and not self.work:
            return False
        if self.work and (not self.under_way or self.draw.random() < 0.5):
            place, attempt, done = self.work.pop(self.draw.randrange(len(self.work)))
            stage = self.stages[place]
            if stage.attempt == attempt and stage.round is not None:
                if isinstance(done, SharesSummed):
                    self.sum(stage, done.keys)
                self.perform(stage, stage.round.handle(done))
            return True
        to, kind, member, parts = self.under_way.pop(self.draw.randrange(len(self.under_way)))
        stage = self.stages[to.member]
        if to.fence == fence(stage.attempt) and stage.round is not None and parts:
            event = PartsArrived(kind, member, frozenset(parts))  # pyright: ignore[reportArgumentType]
            if stage.round.lacks(event):
                for key, value in parts.items():
                    if kind == "difference":
                        stage.differences.setdefault(key, {})[member] = value
                    else:
                        stage.means[member, key] = value
                self.perform(stage, stage.round.handle(event))
        return True

    def sum(self, stage: Stage, some: frozenset[str]) -> None:
        for key in some:
            if stage.place not in self.shares[key]:
                continue
            pieces = stage.differences.get(key, {}) | {stage.place: f"d{stage.place}"}
            stage.means[stage.place, key] = "+".join(pieces[member] for member in sorted(pieces))


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_whoever_dies_whenever_all_adopt_the_same_sums(replicas: int) -> None:
    kills = 0
    for seed in range(120):
        world = World(replicas, seed)
        strikes = {world.draw.randrange(1, 20 * replicas): world.draw.randrange(replicas) for _ in range(3)}
        moment = 0
        while world.step():
            moment += 1
            if (victim := strikes.get(moment)) is not None:
                kills += 1
                world.kill(victim)
        whole = "+".join(f"d{place}" for place in range(replicas))
        expected = {(member, key): whole for key, having in world.shares.items() for member in having}
        assert [stage.adopted for stage in world.stages] == [expected] * replicas, seed
    assert kills > 100
