"""The policy file: classes, quotas, durations, and how mistakes in it are worded."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionai.broker.policy import PolicyWatch, load_policy
from fusionai.coordination.broker.job_queue import PriorityClass, QueuePolicy, Quota
from fusionai.primitives.errors import RecipeError, StorageError
from fusionai.primitives.ids import PeerId

ANNA, BERT = "a" * 52, "b" * 52


def written(directory: Path, text: str) -> Path:
    path = directory / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_the_default(tmp_path: Path):
    assert load_policy(written(tmp_path, "")) == QueuePolicy()


def test_a_whole_file(tmp_path: Path):
    text = f"""
        usual = "batch"
        turn = "2min"
        age = "12h"
        place = "30min"
        [[classes]]
        name = "urgent"
        owners = ["{ANNA}"]
        [[classes]]
        name = "batch"
        [quota]
        machines = 4
        memory = "64GB"
        [[owners]]
        machine = "{BERT}"
        machines = 8
        """
    assert load_policy(written(tmp_path, text)) == QueuePolicy(
        classes=(PriorityClass("urgent", frozenset({ANNA})), PriorityClass("batch")),
        usual="batch",
        turn_s=120.0,
        age_s=43_200.0,
        kept_s=1800.0,
        quota=Quota(4, 64 * 10**9),
        quotas={BERT: Quota(8, None)},
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("turns = '2min'", "unknown key 'turns'"),
        ("turns = '2min'", "turn"),
        ("[quota]\nmachine = 4", "machines"),
        ("turn = 5", "a text"),
        ("turn = '2 weeks'", "turn: expected a duration"),
        ("age = '0.1s'", "age: expected a second or more"),
        ("[quota]\nmachines = 0", "machines"),
        ("[quota]\nmemory = 'much'", "quota: memory: expected a size"),
        ("usual = 'urgent'", "usual: expected one of the classes high, normal, low, idle, got 'urgent'"),
        ("classes = []", "classes: expected one or more names"),
        ("[[classes]]\nname = 'a'\n[[classes]]\nname = 'a'", "each once"),
        ("[[classes]]\nname = 'Very urgent'", "expected up to 32 small letters"),
        ("[[owners]]\nmachine = 'anna'", "machine"),
        (f"[[owners]]\nmachine = '{ANNA}'\n[[owners]]\nmachine = '{ANNA}'", "a machine has two quotas"),
        ("turn = ", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str):
    with pytest.raises(RecipeError) as raised:
        load_policy(written(tmp_path, text))
    assert words in raised.value.message
    assert "policy.toml" in raised.value.message


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(RecipeError, match="can't be read"):
        load_policy(tmp_path / "none.toml")


def test_people_and_lenders_first(tmp_path: Path):
    text = f"""
        lenders_first = true
        [[people]]
        name = "ada"
        machines = ["{ANNA}", "{BERT}"]
        """
    found = load_policy(written(tmp_path, text))
    assert found == QueuePolicy(lenders_first=True, people={ANNA: "ada", BERT: "ada"})
    assert (found.person_of(PeerId(ANNA)), found.person_of(PeerId("c" * 52))) == ("ada", "c" * 52)


def test_a_machine_of_two_persons_is_refused(tmp_path: Path):
    one = '[[people]]\nname = "{}"\nmachines = ["' + ANNA + '"]\n'
    with pytest.raises(RecipeError, match="people: a machine belongs to two persons"):
        load_policy(written(tmp_path, one.format("ada") + one.format("bob")))


def test_a_policy_that_changes_is_adopted_once_and_a_mistake_leaves_it_as_it_was(tmp_path: Path):
    path = written(tmp_path, 'usual = "normal"')
    adopted: list[QueuePolicy] = []
    said: list[str] = []
    watch = PolicyWatch(path, adopted.append, said.append)
    watch.look()
    assert (adopted, said) == ([], [])
    written(tmp_path, 'turn = "2min"')
    watch.look()
    watch.look()
    assert [one.turn_s for one in adopted] == [120.0]
    assert said == [f"The policy in {path} has changed and holds from now on."]
    written(tmp_path, "trun = 1")
    watch.look()
    watch.look()
    path.unlink()
    watch.look()
    assert len(adopted) == 1
    assert [line.partition(".")[0] for line in said[1:]] == [
        "The policy file has changed and can't be used; the policy stays as it was"
    ] * 2
    assert "did you mean 'turn'" in said[1]
    assert "can't be read" in said[2]


def test_a_policy_that_can_not_be_adopted_now_is_tried_again(tmp_path: Path):
    path = written(tmp_path, "")
    problems = [StorageError("the journal is out of reach.")]
    adopted: list[QueuePolicy] = []

    def adopt(policy: QueuePolicy) -> None:
        if problems:
            raise problems.pop()
        adopted.append(policy)

    watch = PolicyWatch(path, adopt, lambda _: None)
    written(tmp_path, "lenders_first = true")
    watch.look()
    assert adopted == []
    watch.look()
    assert [one.lenders_first for one in adopted] == [True]
