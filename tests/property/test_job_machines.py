"""The driver's and the stages' machines together where time means nothing: whatever could happen next may happen next.

Hypothesis chooses the job, the order and who dies when. Whatever happens: the journal holds each step once and in
order, no stage applies a step that is not journalled, none twice, and every state is that of a run without faults
(`harness.world` checks after each event). Below: what single machines do with fences and votes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.training import stage_interface as staging
from fusionai.coordination.training.stage import StageMachine
from fusionai.coordination.training.step import StageShape
from fusionai.wire.messages import CommitRecord, Fence
from harness.examples import examples
from harness.topology import Layout, Topology
from harness.world import World

SPARE = "spare"


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    stages = draw(st.integers(1, 4))
    skips = st.sampled_from([(a, b) for a in range(stages) for b in range(a + 1, stages)] or [(0, 0)])
    edges = {(stage, stage + 1) for stage in range(stages - 1)} | (draw(st.sets(skips, max_size=1)) - {(0, 0)})
    tied = draw(st.sets(st.integers(0, stages - 1), max_size=3))
    return Topology(
        stages=stages,
        steps=draw(st.integers(1, 5)),
        microbatches=draw(st.integers(1, 3)),
        in_flight=tuple(draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))),
        edges=frozenset(edges),
        fed=frozenset({0, stages - 1}),
        tied=tuple(sorted(tied)) if len(tied) > 1 else (),
        checkpoint_every=draw(st.integers(0, 3)),
    )


@st.composite
def layouts(draw: st.DrawFn, stages: int) -> Layout:
    guarded = draw(st.sets(st.integers(0, stages - 1)))
    return Layout(
        places={stage: f"peer {stage}" for stage in range(stages)},
        standbys=dict.fromkeys(sorted(guarded), SPARE),
        snapshot_every=draw(st.integers(1, 3)),
    )


@settings(deadline=None, derandomize=True, max_examples=examples(100))
@given(
    topology=topologies(),
    data=st.data(),
    seed=st.integers(0, 2**32),
    faults=st.dictionaries(st.integers(40, 800), st.integers(0, 5), max_size=4),
)
def test_whatever_happens_the_result_is_that_of_a_run_without_faults(
    topology: Topology, data: st.DataObject, seed: int, faults: dict[int, int]
):
    """`faults`: at this event, that stage's peer dies, or the spare (4), or the driver (5)."""
    layout = data.draw(layouts(topology.stages))
    world = World(topology, layout, seed, spares=(SPARE,), any_order=True)
    advance = world.network.advance

    def advance_or_strike() -> bool:
        victim = faults.get(world.network.events)
        if victim == 5:
            world.restart_driver()
        elif victim is not None:
            world.kill(SPARE if victim == 4 else f"peer {victim % topology.stages}", back_after_s=1.0)
        return advance()

    world.network.advance = advance_or_strike
    assert world.run().steps == world.expected.ends


PAIR = Topology(stages=2, steps=2, microbatches=2, in_flight=(2, 2), edges=frozenset({(0, 1)}), fed=frozenset({0, 1}))


def test_a_commit_counts_once_however_often_the_driver_dies_after_journalling():
    died = 0
    for extra in range(30):
        world = World(PAIR, Layout(places={0: "a", 1: "b"}), 7, any_order=True)
        advance = world.network.advance
        moments: list[int] = []

        def advance_or_strike(
            world: World = world,
            advance: Callable[[], bool] = advance,
            moments: list[int] = moments,
            extra: int = extra,
        ) -> bool:
            if len(world.journal) > len(moments):
                moments.append(world.network.events + extra)
            if world.network.events in moments:
                world.restart_driver()
            return advance()

        world.network.advance = advance_or_strike
        world.run()
        died += world.incarnation - 1
        assert [record.step for record in world.journal] == [0, 1]
    assert died > 30


def running_stage() -> StageMachine:
    machine = StageMachine(
        StageShape(stage=0, microbatches=1, in_flight=1, producers={"train": frozenset({-1})}, consumers=frozenset())
    )
    machine.handle(staging.Attached(Fence(1, 1, 0)))
    machine.handle(staging.Resumed(0, "initialise", 0))
    machine.handle(staging.WorkDone(staging.StageWork("initialise")))
    return machine


def test_an_older_or_equal_fence_is_refused_and_a_newer_one_drops_partial_sums():
    machine = running_stage()
    for stale in (Fence(1, 1, 0), Fence(1, 0, 9), Fence(0, 9, 9)):
        (refused,) = machine.handle(staging.Attached(stale))
        assert isinstance(refused, staging.Refuse)
        assert not machine.accepts(stale) or stale == Fence(1, 1, 0)
    commands = machine.handle(staging.Attached(Fence(1, 1, 1)))
    assert staging.DropSums() in commands
    assert staging.ReportStatus(applied=0, prepared=-1, retained_from=0) in commands
    assert not machine.accepts(Fence(1, 1, 0))


def prepared_stage() -> StageMachine:
    machine = running_stage()
    machine.handle(staging.ForwardArrived("train", 0, 0, -1))
    machine.handle(staging.WorkDone(staging.StageWork("forward")))
    machine.handle(staging.WorkDone(staging.StageWork("backward")))
    assert staging.ReportPrepared(0) in machine.handle(staging.WorkDone(staging.StageWork("norms")))
    return machine


def record_of(step: int) -> CommitRecord:
    return CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=0.1,
        total_norm=1.0,
        norms_hash="",
        fence=Fence(1, 1, 0),
        loss=1.0,
    )


def test_what_is_prepared_survives_an_attach_and_the_resume_levels_it():
    machine = prepared_stage()
    commands = machine.handle(staging.Attached(Fence(1, 2, 0)))
    assert staging.DropSums() not in commands
    assert staging.ReportStatus(applied=0, prepared=0, retained_from=1) in commands
    (compute,) = machine.handle(staging.Resumed(1, "keep", 1, (record_of(0),)))
    assert compute == staging.Compute(staging.StageWork("apply", step=0, record=record_of(0)))
    assert staging.ReportReady(1) in machine.handle(staging.WorkDone(compute.work))


def test_a_resume_that_did_not_commit_drops_what_was_prepared():
    machine = prepared_stage()
    machine.handle(staging.Attached(Fence(1, 2, 0)))
    commands = machine.handle(staging.Resumed(0, "keep", 0))
    assert commands[0] == staging.DropSums()
    assert staging.ReportReady(0) in commands
    assert machine.prepared == -1


@pytest.mark.parametrize("committed", [2, 5])
def test_a_stage_that_can_not_be_where_it_should_says_so(committed: int):
    machine = prepared_stage()
    machine.handle(staging.Attached(Fence(1, 2, 0)))
    (refused,) = machine.handle(staging.Resumed(committed, "keep", committed, (record_of(committed - 1),)))
    assert isinstance(refused, staging.Refuse)
    assert f"can't keep its state and be at {committed}" in refused.reason
