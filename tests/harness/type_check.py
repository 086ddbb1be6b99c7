"""Checks the types of the modules that changed since the last check without errors, and of those that import them.

`python -m harness.type_check BASEDPYRIGHT [--changed]`. The type checker remembers nothing: over the whole source it
takes a minute and a half of one core. Without `--changed` it checks everything. What passed is kept, as a digest per
file, in the virtual environment.

Every function is annotated, so that a change is seen by those that import what changed, through re-exports too. An
error further away is found by `make test`, which checks the whole source.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from harness.source_graph import ROOT, SOURCE, handed_on, modules, name_of

PASSED = Path(sys.prefix) / "types-passed.json"
SETTINGS = ("pyproject.toml", "constraints.txt")


def digests() -> dict[str, str]:
    """Digest of each file that decides what the type checker finds, by path from the root."""
    paths = [*(ROOT / name for name in SETTINGS), *sorted((SOURCE / "fusionai").rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def concerned(changed: Collection[str]) -> set[str]:
    """Modules whose types may be wrong after a change of the modules `changed`, removed ones among them."""
    return {
        name
        for name, module in modules().items()
        if name in changed
        or any(
            source in changed or any(place in changed for place, _ in handed_on(source, imported))
            for source, imported in module.bindings.values()
        )
    }


def files_to_check(before: dict[str, str], now: dict[str, str]) -> list[str] | None:
    """Paths from the root; None for the whole source."""
    differing = {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
    if not before or differing & set(SETTINGS):
        return None
    names = concerned({name_of(ROOT / path) for path in differing})
    return sorted(modules()[name].path.relative_to(ROOT).as_posix() for name in names)


def main(checker: str, *options: str) -> int:
    now = digests()
    before = json.loads(PASSED.read_text(encoding="utf-8")) if "--changed" in options and PASSED.exists() else {}
    files = files_to_check(before, now)
    if files == []:
        sys.stdout.write("types: nothing has changed since the last check without errors\n")
        return 0
    code = subprocess.run([checker, *(files or ())], cwd=ROOT, check=False).returncode
    if code == 0:
        PASSED.write_text(json.dumps(now), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
