"""Each rule of the recovery protocol taken away in turn: the harness must notice, or it guards nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from fusionai.coordination import stage as staging
from fusionai.coordination.driver import DriverCommand, DriverEvent, DriverMachine, JournalCommit, SendCommit
from fusionai.coordination.stage import Attached, StageCommand, StageEvent, StageMachine, Work
from harness.topology import Topology, random_topology
from harness.world import World

Patch = pytest.MonkeyPatch


def any_fence_counts(patch: Patch) -> None:
    """Rule 1."""
    patch.setattr(StageMachine, "accepts", lambda self, fence: True)


def commit_is_sent_before_it_is_journalled(patch: Patch) -> None:
    """Rule 2."""
    true = DriverMachine.on_scale

    def on_scale(self: DriverMachine, event: DriverEvent) -> list[DriverCommand]:
        commands = true(self, event)
        early = [SendCommit(c.record, self.step, save=False) for c in commands if isinstance(c, JournalCommit)]
        return [*early, *commands]

    _in_table(patch, "on_scale", on_scale)


def a_vote_is_not_awaited(patch: Patch) -> None:
    """Rule 3."""
    true = DriverMachine.on_prepared

    def on_prepared(self: DriverMachine, event: DriverEvent) -> list[DriverCommand]:
        commands = true(self, event)
        norms = self._norms.get(self.step, {})
        if norms and len(norms) < len(self.shape.stages):
            for stage in self.shape.stages:
                norms.setdefault(stage, {f"p{stage}": 0.5})
        return [*commands, *self._decide()]

    _in_table(patch, "on_prepared", on_prepared)


def partial_sums_survive_an_attach(patch: Patch) -> None:
    """Rule 6. The stage starts counting anew and keeps what it had summed."""
    true = StageMachine.handle

    def handle(self: StageMachine, event: StageEvent) -> list[StageCommand]:
        return [command for command in true(self, event) if not isinstance(command, staging.DropSums)]

    patch.setattr(StageMachine, "handle", handle)


def work_begins_before_all_are_ready(patch: Patch) -> None:
    """Rule 7."""

    def on_ready(self: DriverMachine, event: DriverEvent) -> list[DriverCommand]:
        self._ready.update(self.shape.stages)
        return true(self, event)

    true = DriverMachine.on_ready
    _in_table(patch, "on_ready", on_ready)


def a_tensor_of_the_next_step_is_not_held(patch: Patch) -> None:
    """Rule 8."""
    patch.setattr(staging, "STEPS_AHEAD", 0)


def what_was_retained_goes_at_once(patch: Patch) -> None:
    """Rule 10, the other way round: nothing ever goes."""
    true = StageMachine.handle

    def handle(self: StageMachine, event: StageEvent) -> list[StageCommand]:
        return [command for command in true(self, event) if not isinstance(command, staging.DropRetained)]

    patch.setattr(StageMachine, "handle", handle)


def credit_is_ignored(patch: Patch) -> None:
    true = StageMachine._running_work

    def running_work(self: StageMachine) -> Work | None:
        work = true(self)
        if work is None and self._forwarded < self.shape.microbatches:
            needed = self.shape.producers["train"]
            if needed <= self._arrived.get(("train", self.applied, self._forwarded), set()):
                return Work("forward", self.applied, self._forwarded)
        return work

    patch.setattr(StageMachine, "_running_work", running_work)


def an_attach_does_not_wait_for_the_work_under_way(patch: Patch) -> None:
    true = StageMachine.handle

    def handle(self: StageMachine, event: StageEvent) -> list[StageCommand]:
        if isinstance(event, Attached):
            self._busy = None
        return true(self, event)

    patch.setattr(StageMachine, "handle", handle)


def a_commit_overtakes_the_checkpoint(patch: Patch) -> None:
    true = DriverMachine._decide

    def decide(self: DriverMachine) -> list[DriverCommand]:
        saving, self._saving = self._saving, None
        commands = true(self)
        self._saving = saving
        return commands

    patch.setattr(DriverMachine, "_decide", decide)


def an_evaluation_is_not_awaited(patch: Patch) -> None:
    true = DriverMachine._decide

    def decide(self: DriverMachine) -> list[DriverCommand]:
        self._evaluating = False
        return true(self)

    patch.setattr(DriverMachine, "_decide", decide)


def the_feed_has_no_window(patch: Patch) -> None:
    true = Topology.job_shape
    patch.setattr(Topology, "job_shape", lambda self: dataclasses.replace(true(self), feed_window=100))


def _in_table(patch: Patch, name: str, act: Callable[..., list[DriverCommand]]) -> None:
    """Tables hold the functions themselves."""
    from fusionai.coordination import driver

    true = getattr(DriverMachine, name)
    for key, row in driver.TABLE.items():
        if row.act is true:
            patch.setitem(driver.TABLE, key, driver.DriverTransition(act, frozenset(driver.DriverPhase)))


COURSES = 1200
"""A rule whose breach shows in one course of a few hundred must still be noticed."""
RULES = [
    any_fence_counts,
    commit_is_sent_before_it_is_journalled,
    a_vote_is_not_awaited,
    partial_sums_survive_an_attach,
    work_begins_before_all_are_ready,
    a_tensor_of_the_next_step_is_not_held,
    what_was_retained_goes_at_once,
    credit_is_ignored,
    an_attach_does_not_wait_for_the_work_under_way,
    a_commit_overtakes_the_checkpoint,
    an_evaluation_is_not_awaited,
    the_feed_has_no_window,
]


@pytest.mark.parametrize("broken", RULES, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_noticed(broken: Callable[[Patch], None], monkeypatch: Patch):
    broken(monkeypatch)
    for seed in range(COURSES):
        choose = random.Random(seed)
        world = World(random_topology(choose), choose.randrange(2**32), spares=1)
        world.forgetful = False
        for _ in range(2):
            world.network.after(
                choose.uniform(0, 60), lambda world=world: None if world.driver.ended else world.restart_driver()
            )
        try:
            world.run()
        except (AssertionError, LookupError):
            return
    pytest.fail(f"{COURSES} courses of events and nothing was noticed")
