from __future__ import annotations

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.embedding_and_head import (
    check_embedding_and_head,
    embedding_and_head_of,
    embedding_and_head_stay,
    middle,
    owners_bytes,
    owners_part,
)
from fusionai.scheduling.problem.types import Problem, RolePlacement
from fusionai.scheduling.training.replicated import plan as replicated
from harness.told_pool import problem, profile


def split(*names: str, first: int = 1, last: int = 2, **more: object) -> Problem:
    return msgspec.structs.replace(
        problem(*(profile(name) for name in names)), **{"kept_first": first, "kept_last": last, "stages": None, **more}
    )


def test_counts_follow_roles_and_what_is_kept() -> None:
    asked = split("a", "b")
    assert (embedding_and_head_of(asked).first, embedding_and_head_of(asked).last) == (1, 2)
    assert [block.block for block in middle(asked)] == [1, 2]
    plain = msgspec.structs.replace(asked, kept_first=0, kept_last=0)
    assert (embedding_and_head_of(plain).first, embedding_and_head_of(plain).last) == (0, 1)
    pool = msgspec.structs.replace(asked, roles=(RolePlacement(role="feed"), RolePlacement(role="loss", place="pool")))
    with pytest.raises(PlanError, match="2 blocks at the loss's end must stay with the job owner"):
        embedding_and_head_of(pool)
    with pytest.raises(PlanError, match="nothing is left for the pool"):
        middle(split("a", first=3))


def test_a_plan_says_what_its_ends_take_of_the_owner() -> None:
    found = plan(split("a", "b"))
    part = owners_part(found)
    assert part is not None
    assert part.blocks == ((0, 1), (3, 5))
    own = [stage for stage in found.stages if stage.peer == found.feed]
    assert part.memory_bytes == sum(stage.memory_bytes for stage in own)
    assert part.compute_s == pytest.approx(found.microbatches * sum(stage.compute_s for stage in own))
    assert found.commit_s == 0.0


def test_stages_that_are_asked_for_are_the_pools() -> None:
    found = plan(split("a", "b", stages=2))
    assert [stage.roles for stage in found.stages] == [("feed",), ("stage",), ("stage",), ("loss",)]
    with pytest.raises(PlanError, match="3 stages need 3 blocks, the model has 2"):
        plan(split("a", "b", "c", stages=3))


def test_an_owner_without_the_memory_is_told_what_is_missing() -> None:
    asked = split("a", "b")
    assert asked.owner is not None
    needed = owners_bytes(asked)
    small = msgspec.structs.replace(asked, owner=msgspec.structs.replace(asked.owner, memory_bytes=int(needed) - 1000))
    with pytest.raises(PlanError, match=r"the model.s ends .* 1 kB are missing") as refused:
        plan(small)
    assert "encrypted" in (refused.value.hint or "")


def test_ends_of_every_replica_lie_with_the_owner() -> None:
    asked = split("a", "b", "c", "d", first=1, last=2)
    found = replicated(msgspec.structs.replace(asked, replicas=2))
    own = [stage for stage in found.stages if stage.peer == found.feed]
    assert [(stage.replica, stage.blocks) for stage in own] == [(0, (0, 1)), (0, (3, 5)), (1, (0, 1)), (1, (3, 5))]


def test_a_plan_that_moves_an_end_is_refused_whoever_made_it() -> None:
    asked = split("a", "b")
    found = plan(asked)
    check_embedding_and_head(found, asked)
    assert embedding_and_head_stay(found, asked)
    moved = msgspec.structs.replace(
        found, stages=(msgspec.structs.replace(found.stages[0], peer="a"), *found.stages[1:])
    )
    with pytest.raises(PlanError, match="blocks 0, 3, 4 stay with the job owner"):
        check_embedding_and_head(moved, asked)
    assert not embedding_and_head_stay(moved, asked)
    assert not embedding_and_head_stay(found, msgspec.structs.replace(asked, kept_first=0, kept_last=0))
