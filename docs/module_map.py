"""Maps the source from its syntax: which package imports which, the rooms of each package, each module's purpose."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src"
NAME: Final = "fusionai"


def modules_page() -> str:
    """Return the graph of packages by layer, then a section for each package: its rooms and modules."""
    layers = package_layers()
    lines = ["## How do packages depend on each other?", "", *_package_graph(layers)]
    for package in [package for layer in layers for package in layer]:
        lines += ["", f"## {package}", "", _purpose(f"{NAME}.{package}"), *_rooms(package), ""]
        lines += ["| module | purpose |", "| --- | --- |"]
        inside = [name for name in trees() if name.startswith(f"{NAME}.{package}.")]
        lines += [f"| `{name.removeprefix(f'{NAME}.{package}.')}` | {_purpose(name)} |" for name in inside]
    return "\n".join(lines) + "\n"


def package_layers() -> list[list[str]]:
    """Return the packages layer by layer, highest first, as the import contract in pyproject.toml lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix(f"{NAME}.") for name in layer.split("|")] for layer in layers]


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, packages under their own name."""
    found: dict[str, ast.Module] = {}
    for path in sorted((SOURCE / NAME).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def imports() -> frozenset[tuple[str, str]]:
    """Return the pairs (module, module of this project that it imports), at its top or inside a function."""
    pairs: set[tuple[str, str]] = set()
    for name, tree in trees().items():
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                pairs |= {(name, one if one in trees() else str(node.module)) for one in whole}
            elif isinstance(node, ast.Import):
                pairs |= {(name, alias.name) for alias in node.names if alias.name in trees()}
    return frozenset(pairs)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, inner ones too. Walking every expression would take ten times as long."""
    for node in body:
        yield node
        for part in [node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(part, inner, []))


def _package_graph(layers: list[list[str]]) -> Iterator[str]:
    """Yield a drawing of the packages. An arrow that follows from two others is left out."""
    place = {package: number for number, layer in enumerate(layers) for package in layer}
    direct = {
        (a, b)
        for one, other in imports()
        if len(one.split(".")) > 1 and len(other.split(".")) > 1
        for a, b in [(one.split(".")[1], other.split(".")[1])]
        if a != b and a in place and b in place
    }
    yield from ["```mermaid", "flowchart TB"]
    for number, layer in enumerate(layers):
        yield f'  subgraph layer{number}[" "]'
        yield "    direction LR"
        yield from (f"    {package}" for package in layer)
        yield "  end"
    for one, other in sorted(direct, key=lambda pair: (place[pair[0]], pair)):
        between = {middle for start, middle in direct if start == one and middle != other}
        if not any(other in _reached(middle, direct) for middle in between):
            yield f"  {one} --> {other}"
    yield "```"


def _reached(start: str, pairs: set[tuple[str, str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        here = waiting.pop()
        following = {other for one, other in pairs if one == here} - found
        found |= following
        waiting.extend(following)
    return found


def _rooms(package: str) -> Iterator[str]:
    """Yield a drawing of a package's rooms (sub-packages), if it has any: which of them imports which."""
    prefix = f"{NAME}.{package}."
    rooms = sorted(
        {name.removeprefix(prefix).split(".")[0] for name in trees() if name.count(".") > 2 and name.startswith(prefix)}
    )
    if not rooms:
        return

    def room_of(name: str) -> str:
        first = name.removeprefix(prefix).split(".")[0]
        return first if first in rooms else package

    inner = {(a, b) for a, b in imports() if a.startswith(prefix) and b.startswith(prefix)}
    arrows = sorted({(room_of(a), room_of(b)) for a, b in inner if room_of(a) != room_of(b)})
    yield from ["", "```mermaid", "flowchart LR"]
    yield from (f'  {package}_{room}["{room}/"]' for room in rooms)
    if any(package in arrow for arrow in arrows):
        yield f'  {package}_{package}["files beside the rooms"]'
    yield from (f"  {package}_{one} --> {package}_{other}" for one, other in arrows)
    yield "```"


def _purpose(module: str) -> str:
    """Return the first sentence of a module's docstring, fit for a table."""
    text = " ".join((ast.get_docstring(trees()[module]) or "").split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z`])", text, maxsplit=1)[0]
    return sentence.replace("|", "\\|")
