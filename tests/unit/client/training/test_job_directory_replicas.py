"""Where replicas keep their things, and what a replica has behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusionai.client.training.job_directory import ReplicaDirectories
from fusionai.coordination.training.exchanges import Exchanges
from fusionai.corpus.recipe import recipe_from_table
from fusionai.primitives.errors import StorageError
from fusionai.scheduling.planner import plan as planned
from fusionai.storage.commits import CommitJournal
from fusionai.storage.rundir import RunDirectory
from harness.told_pool import problem, profile


@pytest.fixture
def places(tmp_path: Path) -> ReplicaDirectories:
    table: dict[str, Any] = {
        "job": {"name": "a", "steps": 10, "directory": str(tmp_path / "run")},
        "model": {"config": {"model_type": "llama"}},
        "data": {"files": ["*.txt"], "sequence_length": 64, "tokenizer": {"train": 512}},
        "train": {"batch_size": 8, "learning_rate": 1e-3},
        "replicas": {"count": 2, "every": 5},
    }
    return ReplicaDirectories(recipe_from_table(table, tmp_path / "r.toml"))


def test_a_replica_that_never_began_has_no_past(places: ReplicaDirectories) -> None:
    assert places.past(0) is None
    assert not Path(places.recipe_of(0, 0).directory).exists(), "asking leaves nothing behind"


def test_each_has_a_directory_and_the_steps_that_are_left(places: ReplicaDirectories) -> None:
    first, second = places.recipe_of(0, 0), places.recipe_of(1, 5)
    assert [Path(one.directory).name for one in (first, second)] == ["replica-0", "replica-1"]
    assert [one.job.steps for one in (first, second)] == [10, 5]
    assert places.outer.parent == Path(first.directory).parent


def test_what_is_behind_it_is_told_from_the_disk(places: ReplicaDirectories) -> None:
    places.begin(1, 5)
    past = places.past(1)
    assert past is not None
    assert (past.first_step, past.steps, past.peers, past.has_checkpoint) == (5, 0, (), False)
    made = msgspec.structs.replace(planned(problem(profile("x"), profile("y"))), version=3)
    with CommitJournal(RunDirectory(Path(places.recipe_of(1, 5).directory)).journal) as journal:
        journal.adopt_plan(3, msgspec.json.encode(made))
    past = places.past(1)
    assert past is not None
    assert sorted(past.peers) == ["x", "y"], "without the owner, who feeds"


@pytest.mark.parametrize("content", [b"", b"{}", b'{"first_step": -1}', b'{"first_step": 1, "more": 2}'])
def test_what_is_not_understood_is_said(places: ReplicaDirectories, content: bytes) -> None:
    places.begin(0, 0)
    (Path(places.recipe_of(0, 0).directory) / "replica.json").write_bytes(content)
    with pytest.raises(StorageError, match="does not fit its schema"):
        places.past(0)


def saved_at(places: ReplicaDirectories, number: int, first_step: int, *steps: int) -> None:
    places.begin(number, first_step)
    checkpoints = RunDirectory(Path(places.recipe_of(number, 0).directory)).checkpoints
    for step in steps:
        (checkpoints / f"step-{step:08d}").mkdir()


def steps_of(places: ReplicaDirectories, number: int) -> list[str]:
    checkpoints = RunDirectory(Path(places.recipe_of(number, 0).directory)).checkpoints
    return sorted(path.name for path in checkpoints.iterdir())


def test_replicas_go_back_to_checkpoints_between_the_same_two_exchanges(places: ReplicaDirectories) -> None:
    exchanges = Exchanges(every=10, steps=100)
    saved_at(places, 0, 0, 15, 25, 35)
    saved_at(places, 1, 0, 15, 25)
    saved_at(places, 2, 10, 5, 15, 25)
    assert places.go_back(exchanges, 4) == {0: 25, 2: 15}
    assert steps_of(places, 0) == ["step-00000015", "step-00000025"]
    assert steps_of(places, 2) == ["step-00000005", "step-00000015"]
    assert places.go_back(exchanges, 4) == {}, "they are level"


def test_replicas_go_back_to_the_start_if_they_have_nothing_else_in_common(places: ReplicaDirectories) -> None:
    exchanges = Exchanges(every=10, lag=2, steps=100)
    saved_at(places, 0, 0, 11)
    saved_at(places, 1, 0)
    assert places.go_back(exchanges, 2) == {}, "both before the first update is adopted"
    saved_at(places, 0, 0, 12)
    assert places.go_back(exchanges, 2) == {0: 11}
    assert places.go_back(exchanges, 0) == {}


def test_replicas_without_common_checkpoints_stay_where_they_are(places: ReplicaDirectories) -> None:
    saved_at(places, 0, 0, 25)
    saved_at(places, 1, 10, 25)
    assert places.go_back(Exchanges(every=10, steps=100), 2) == {}
    assert steps_of(places, 1) == ["step-00000025"]
