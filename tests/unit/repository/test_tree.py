"""The README's tree is the disk: every folder is named with a purpose, and nothing is named that is not there."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE_LINE = re.compile(r"^(?P<path>[\w.\-/]+/) {2,}(?P<purpose>\S.*)$")
SUMMED_UP = ("tests/unit",)
"""Folders whose line speaks for everything below: they mirror the packages."""


def ignored() -> list[str]:
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    return [".git", *(line.strip("/") for line in lines)]


def folders_with_files(top: Path, patterns: list[str]) -> Iterator[Path]:
    """Folders below `top` that hold a file, deep or not; what git ignores is left out."""
    for entry in sorted(top.iterdir()):
        if not entry.is_dir() or any(fnmatch.fnmatch(entry.name, pattern) for pattern in patterns):
            continue
        below = list(folders_with_files(entry, patterns))
        has_files = any(
            child.is_file() and not any(fnmatch.fnmatch(child.name, pattern) for pattern in patterns)
            for child in entry.iterdir()
        )
        if below or has_files:
            yield entry
            yield from below


def named() -> dict[str, str]:
    block = README.split("## What is where")[1].split("```")[1]
    lines = block.strip().splitlines()
    matches = [TREE_LINE.match(line) for line in lines]
    assert all(matches), f"lines without a purpose: {[line for line, m in zip(lines, matches, strict=True) if not m]}"
    return {match["path"].rstrip("/"): match["purpose"] for match in matches if match}


def on_disk() -> set[str]:
    found = {folder.relative_to(ROOT).as_posix() for folder in folders_with_files(ROOT, ignored())}
    return {path for path in found if not any(path.startswith(f"{top}/") for top in SUMMED_UP)}


def needs_no_line(path: str, tree: dict[str, str]) -> bool:
    """A folder that only holds folders which have lines of their own (`src`, `tests`), or a room of a package: its
    `__init__.py` states the purpose."""
    room = ROOT / path / "__init__.py"
    if path.startswith("src/fusionai/") and room.exists():
        return ast.get_docstring(ast.parse(room.read_text(encoding="utf-8"))) is not None
    return not any(child.is_file() for child in (ROOT / path).iterdir()) and any(
        name.startswith(f"{path}/") for name in tree
    )


def test_every_folder_is_in_the_tree():
    tree = named()
    missing = {path for path in on_disk() - set(tree) if not needs_no_line(path, tree)}
    assert not missing, f"add to README.md with a purpose: {sorted(missing)}"


def test_the_tree_names_nothing_else():
    gone = set(named()) - on_disk()
    assert not gone, f"in README.md, not on disk: {sorted(gone)}"


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_and_link_a_document_names_exists(document: str):
    text = (ROOT / document).read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:src|tests|docs|recipes|benchmarks)/[\w./\-]+)`", text))
    links = set(re.findall(r"\]\(((?!http)[^)#]+)\)", text))
    missing = sorted(path for path in paths | links if not (ROOT / path).exists())
    assert not missing, f"{document} names what is not there: {missing}"


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))
def test_every_link_of_the_docs_leads_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(((?!http)[^)#]+)(?:#[^)]*)?\)", text))
    missing = sorted(link for link in links if not ((ROOT / page).parent / link).exists())
    assert not missing, f"{page} links to what is not there: {missing}"


def test_every_unit_test_is_named_after_a_module():
    """`unit/<package>/<room>/test_<module>.py`; where a module has several, `test_<module>_<subject>.py`."""
    own = {"harness", "repository"}
    astray = []
    for path in sorted((ROOT / "tests/unit").rglob("test_*.py")):
        place = path.relative_to(ROOT / "tests/unit")
        modules = {module.stem for module in (ROOT / "src/fusionai" / place.parent).glob("*.py")}
        name = place.stem.removeprefix("test_")
        if place.parts[0] not in own and not any(f"{name}_".startswith(f"{module}_") for module in modules):
            astray.append(str(place))
    assert astray == []


def test_every_decision_is_listed():
    listed = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs/decisions").glob("0*.md") if f"({path.name})" not in listed]
    assert not missing


def test_nothing_points_out_of_the_tree():
    """A link made for one machine, say to an environment elsewhere, would dangle in every other clone."""
    patterns = ignored()
    folders = [ROOT, *folders_with_files(ROOT, patterns)]
    links = [
        child.relative_to(ROOT).as_posix()
        for folder in folders
        for child in folder.iterdir()
        if child.is_symlink() and not any(fnmatch.fnmatch(child.name, pattern) for pattern in patterns)
    ]
    assert not links


def test_an_environment_is_ignored_whether_a_folder_or_a_link_to_one():
    """Git takes a pattern that ends with a slash for folders only."""
    assert ".venv" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
