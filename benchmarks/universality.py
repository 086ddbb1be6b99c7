"""Which models run: every model of the zoo, captured, in four stages forward and back, served, on every backend.

    python benchmarks/universality.py [--only NAME[,NAME]] [--backends torch,jax,onnxruntime] [--again] [--json FILE]

Small models of many architectures of transformers and modules by hand (tests/harness/zoo.py), each against its own
module run by PyTorch (tests/harness/universality.py). FILE is docs/models.json unless said otherwise; what it has of
the same versions is kept, and only backends that a row lacks, or has of a model that was not read from files, are
tried. Afterwards `make docs` writes the page
docs/models.md from it. The last line says how many rows pass: those in which nothing that applies has missed on any
backend. Exit code 1 below `--least`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fusionai.backends.registry import BACKENDS
from fusionai.storage.atomic import write_atomic
from harness.universality import Cell, Row, examine, files_of
from harness.zoo import models

FILE = Path(__file__).parents[1] / "docs" / "models.json"
PACKAGES = ("torch", "transformers", "jax", "onnxruntime")


def main() -> int:
    arguments = _arguments()
    versions = {name: version(name) for name in PACKAGES}
    known = {} if arguments.again and not arguments.only else _known(arguments.json, versions)
    for model in models():
        if arguments.only and model.name not in arguments.only:
            continue
        had = known.get(model.name)
        if had is not None:
            had = known[model.name] = msgspec.structs.replace(had, files=files_of(model))
        if arguments.again:
            had = None
        lacking = [name for name in arguments.backends if had is None or not had.tried(name)]
        if lacking:
            began_s = time.perf_counter()
            found = examine(model, lacking)
            known[model.name] = found if had is None else had.joined(found)
            print(f"{_shown(found)}  [{time.perf_counter() - began_s:.0f} s]", flush=True)
        # After each model, with all rows that are known: a run that is stopped loses nothing.
        _write(arguments.json, versions, known)
    passed = sum(row.passes for row in known.values())
    print(f"{passed} of {len(known)} rows pass ({passed / max(len(known), 1):.1%})")
    return int(passed < arguments.least * len(known))


def _write(file: Path, versions: dict[str, str], known: dict[str, Row]) -> None:
    rows = [known[model.name] for model in models() if model.name in known]
    shown = [{**msgspec.to_builtins(row), "passes": row.passes} for row in rows]
    document = {"schema": "fusionai.models/1", "versions": versions, "rows": shown}
    write_atomic(file, json.dumps(document, indent=1).encode() + b"\n")


def _known(file: Path, versions: dict[str, str]) -> dict[str, Row]:
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    if found["versions"] != versions:
        return {}
    rows = [
        msgspec.convert({key: row[key] for key in row if key != "passes"}, Row)
        for row in found["rows"]
        if row["capture"]["state"] == "equal"
    ]
    return {row.name: row for row in rows}


def _shown(row: Row) -> str:
    def said(what: str, cells: dict[str, Cell]) -> str:
        return f"{what} " + " ".join(_word(cell) for cell in cells.values()) if cells else ""

    if row.capture.state == "missed":
        return f"{row.name}: not captured: {row.capture.reason}"
    parts = [
        said("files", {"files": row.files}),
        said("forward", row.forward),
        said("gradients", row.gradients),
        said("served", row.serving),
    ]
    lacking = [f"{name} lacks {ops}" for name, ops in row.refused.items()]
    missed = [
        f"{name}: {cell.reason}"
        for cells in ({"files": row.files}, row.forward, row.gradients, row.serving)
        for name, cell in cells.items()
        if cell.state == "missed"
    ]
    return f"{row.name}: " + "; ".join(part for part in (*parts, *lacking, *missed) if part)


def _word(cell: Cell) -> str:
    if cell.state == "equal":
        return "equal" if cell.difference is None else f"{cell.difference:.0e}"
    return "-" if cell.state == "not" else "MISSED"


def _arguments() -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(name for name in text.split(",") if name)

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=names, default=(), help="models, separated by commas")
    parser.add_argument("--backends", type=names, default=BACKENDS)
    parser.add_argument("--again", action="store_true", help="try again what the file has")
    parser.add_argument("--least", type=float, default=0.95, help="part of the rows that must pass")
    parser.add_argument("--json", type=Path, default=FILE)
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - {model.name for model in models()}:
        parser.error(f"no model {sorted(unknown)[0]!r}; there are {', '.join(model.name for model in models())}")
    if unknown := set(arguments.backends) - set(BACKENDS):
        parser.error(f"no backend {sorted(unknown)[0]!r}; there are {', '.join(BACKENDS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
