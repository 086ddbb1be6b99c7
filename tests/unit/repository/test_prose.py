"""Text reads as plain English: constructions that make an engineer stumble, in docstrings, comments and pages.

The rules find candidates. If a sentence is right as it stands, say it in other words all the same: there is always one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.source_graph import ROOT, modules

RULES = {
    "a fragment without its head": re.compile(
        r"^(Of|By|With|Behind|Beside|Per|As|But|Whose|Whom|Such|Also of|Those|That of|Likewise)\b"
        r"(?! (default|above|below|a result|an example))"
    ),
    "a pronoun of persons for a thing": re.compile(r"\b(whoever|whomever|whom|somebody|nobody)\b", re.IGNORECASE),
    "'so many' as a pronoun": re.compile(r"\bso (many|much|often|long)\b(?! (that|as)\b)", re.IGNORECASE),
    "an archaic word": re.compile(
        r"\b(lest|thereof|therein|save that|hardly any|for want of|nought|none the less)\b", re.IGNORECASE
    ),
    "'is to' for must": re.compile(r"\b(is|are|was|were) to (be|have|go|get|do|come|stay)\b", re.IGNORECASE),
    "an empty disclaimer": re.compile(r"\bDecides (nothing|no )"),
    "'told' for a message": re.compile(
        r"\b(is|are|was|were|been|be) told\b|\btells? (of|who|whom|how|what)\b", re.IGNORECASE
    ),
    "a reference that dangles": re.compile(
        r"\b(what|which|that) (it|they|there) (is|are|was|were|has|have|had)\b\.?$", re.IGNORECASE
    ),
}
COMMENT = re.compile(r"^(?:.*? )?# (\S.*)$")
"""The text of a comment. A string with the same form is text for readers too."""
GENERATED = "<!-- generated below this line"


def texts_of_source(path: Path, nodes: tuple[ast.AST, ...]) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring and comment."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split())
            case _:
                pass
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if "# " in line and (comment := COMMENT.match(line)):
            yield number, comment[1]


def texts_of_page(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what is outside fenced blocks and not generated."""
    fenced = False
    for number, line in enumerate(text.partition(GENERATED)[0].splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and line.strip():
            yield number, line.strip()


def found_in(place: str, texts: Iterator[tuple[int, str]]) -> Iterator[str]:
    for number, text in texts:
        for rule, pattern in RULES.items():
            if pattern.search(text):
                yield f"{place}:{number}: {rule}: {text[:140]}"


@pytest.mark.parametrize(
    "text",
    [
        "Of those that live.",
        "The peer to whom it is sent.",
        "Heartbeats of so many keep it busy.",
        "Save that nothing moves.",
        "The plan is to be signed.",
        "Decides nothing.",
        "The driver is told of it.",
        "Prints what it is.",
    ],
)
def test_a_rule_finds_what_it_is_for(text: str):
    assert len(list(found_in("here", iter([(1, text)])))) == 1


def test_docstrings_and_comments_are_read():
    code = Path(__file__).read_text(encoding="utf-8")
    read = [text for _, text in texts_of_source(Path(__file__), tuple(ast.walk(ast.parse(code))))]
    assert any(text.startswith("Text reads as plain English") for text in read)
    assert not list(found_in("here", texts_of_page("Plain.\n```\nOf those.\n```\n" + GENERATED + "\nOf those.\n")))


def test_the_source_reads_as_plain_english():
    found = [
        one for name, module in modules().items() for one in found_in(name, texts_of_source(module.path, module.nodes))
    ]
    assert not found, "\n".join(found)


def test_the_pages_read_as_plain_english():
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        one
        for page in pages
        for one in found_in(page.relative_to(ROOT).as_posix(), texts_of_page(page.read_text(encoding="utf-8")))
    ]
    scripts = [
        one
        for path in sorted((ROOT / "docs").glob("*.py"))
        for one in found_in(
            path.name, texts_of_source(path, tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
        )
    ]
    assert not found + scripts, "\n".join(found + scripts)
