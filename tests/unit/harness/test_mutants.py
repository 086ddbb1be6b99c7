"""Every standby of a source is broken, each way once, and nothing else is touched."""

from __future__ import annotations

import ast

import pytest

from mutation.mutants import Mutant, mutants


def broken(source: str) -> list[str]:
    """What each mutant does, without where."""
    return [f"{mutant.before} -> {mutant.after}" for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if a:\n    f()", ["a -> not a"]),
        ("if not a:\n    f()", ["not a -> a"]),
        ("if a == b:\n    f()", ["a == b -> a != b"]),
        ("while a in b:\n    f()", ["a in b -> a not in b"]),
        ("x = a if b else c", ["b -> not b"]),
        ("if a < b:\n    f()", ["a < b -> not a < b", "a < b -> a <= b"]),
        ("x = [a for a in b if a]", ["a -> not a"]),
        ("match a:\n    case _ if b:\n        f()", ["b -> not b"]),
        ("x = a and b and c", ["a and b and c -> b and c", "a and b and c -> a and c", "a and b and c -> a and b"]),
        ("x = a <= b <= c", ["a <= b <= c -> a < b <= c", "a <= b <= c -> a <= b < c"]),
        ("x = a + 1", ["a + 1 -> a + 2", "a + 1 -> a + 0"]),
        ("x = a is None", ["a is None -> a is not None"]),
        ("x = a > 0", ["a > 0 -> a >= 0", "a > 0 -> a > 1", "a > 0 -> a > -1"]),
        ("LIMIT: Final = 3", ["LIMIT: Final = 3 -> LIMIT: Final = 4", "LIMIT: Final = 3 -> LIMIT: Final = 2"]),
        ("TABLE = {a: b, c: d}", ["a -> no row", "c -> no row"]),
    ],
)
def test_each_kind_of_standby(source: str, expected: list[str]):
    assert sorted(broken(source)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        "assert a == b",
        "raise E(a if b else c)",
        "x = f'{a if b else c}'",
        "def _brief(a):\n    return a if a else b",
        "x: int | None = f(a)",
        "def f(a: int = 3) -> int | None:\n    return a",
        "x = a * 2",
        "STORY_LENGTH: Final = 3",
    ],
)
def test_what_is_no_standby_is_left_alone(source: str):
    assert broken(source) == []


SOURCE = """
LIMIT: Final = 3
class Machine:
    def act(self, n):
        if self.a and n < LIMIT:
            return [x for x in n if x != 1]
        while n:
            n -= 1
TABLE = {1: Machine.act, 2: Machine.act}
"""


def test_each_mutant_differs_in_one_place_and_from_all_others():
    made = mutants(SOURCE)
    sources = [mutant.source for mutant in made]
    assert len(set(sources)) == len(made) == 10
    whole = ast.unparse(ast.parse(SOURCE)).splitlines()
    for source in sources:
        lines = source.splitlines()
        assert len(lines) == len(whole)
        assert sum(ours != theirs for ours, theirs in zip(lines, whole, strict=True)) == 1


def test_a_mutant_says_where_it_is():
    negated = next(mutant for mutant in mutants(SOURCE) if mutant.after == "not n")
    assert negated.function == "Machine.act"
    assert negated.line == 7
    assert negated.name == "Machine.act: n  ->  not n"
    assert str(negated) == "line 7, negate: Machine.act: n  ->  not n"


def test_names_do_not_change_with_lines():
    def names(of: list[Mutant]) -> list[str]:
        return [mutant.name for mutant in of]

    assert names(mutants(SOURCE)) == names(mutants("\n\n" + SOURCE))


def test_mutants_do_what_they_say():
    made = {mutant.after: mutant for mutant in mutants("def f(a, b):\n    return a and b > 0\n")}
    for after, expected in {"b > 0": True, "a": 0, "b >= 0": 0, "b > 1": 0}.items():
        space: dict[str, object] = {}
        exec(compile(made[after].source, "mutant", "exec"), space)  # noqa: S102
        assert space["f"](0, 1) == expected  # pyright: ignore[reportCallIssue]
