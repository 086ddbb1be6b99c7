"""Writes the generated pages of this folder.

| page | content | source |
| --- | --- | --- |
| `wire.md` | every message | `wire.messages`, `wire_fields.toml` |
| `machines.md` | every state machine | `coordination` |
| `modules.md` | every package and module, and which imports which | `module_map.py` |
| `recipes.md` | every key of a recipe | `corpus.tables`, `recipe_fields.toml` |
| `analysis.md` | many small machines against a few big ones | `scheduling.analysis.cases` |
| `models.md` | which models and operators run | `models.json`, written by `benchmarks/universality.py`, and \
`families.json`, written by `benchmarks/families.py` |
| `planning.md` | how good plans are | `planning.json`, written by `benchmarks/planner_pools.py` |
| `privacy.md` | what peers could reconstruct | the shipped audit |

`python docs/generate.py` writes them; `--check` reports pages that are out of date and writes nothing. The text above a
page's marker is written by hand and kept. `wire_fields.toml` holds the meaning of fields that several messages share.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_args

import module_map
import msgspec
from msgspec import NODEFAULT

from fusionai.backends.registry import BACKENDS, open_backend
from fusionai.cli import privacy
from fusionai.cli.planning.analyze import shipped_comparisons
from fusionai.coordination.broker import job, join_code, membership
from fusionai.coordination.machine import START, rows
from fusionai.coordination.serving import driver as serving
from fusionai.coordination.training import driver, stage
from fusionai.corpus.tables import (
    AdapterTable,
    DataTable,
    EvaluationTable,
    FaultsTable,
    JobTable,
    ModelTable,
    OutputTable,
    PlacementTable,
    PrivacyTable,
    RecipeTables,
    ReplicasTable,
    TokenizerTable,
    Train,
)
from fusionai.dashboard.analysis_page import document
from fusionai.ir.operators import OPERATORS
from fusionai.primitives.units import format_seconds
from fusionai.privacy.findings import ADVERSARIES, BoundaryFindings, Findings, shipped
from fusionai.wire import messages
from fusionai.wire.messages import OptimizerSpec

DOCS: Final = Path(__file__).parent

MARKER: Final = "<!-- generated below this line by docs/generate.py: edit its source, then `make docs` -->"


RECIPE_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "job": JobTable,
    "model": ModelTable,
    "data": DataTable,
    "data.tokenizer": TokenizerTable,
    "train": Train,
    "train.optimizer": OptimizerSpec,
    "adapter": AdapterTable,
    "evaluation": EvaluationTable,
    "placement": PlacementTable,
    "faults": FaultsTable,
    "replicas": ReplicasTable,
    "privacy": PrivacyTable,
    "output": OutputTable,
}
Arrow = tuple[str, str, str]
"""(phase, event, next phase)."""


class UndocumentedError(Exception):
    """Raised for a field without a meaning, or a meaning without a field."""


def wire_page() -> str:
    """Return the sections of all messages and their structs: fields, types with bounds, defaults, meanings."""
    meanings = tomllib.loads((DOCS / "wire_fields.toml").read_text(encoding="utf-8"))
    unused = {(section, name) for section, fields in meanings.items() for name in fields}
    lines = ["## Messages", ""]
    sent = messages.MESSAGES
    for struct in sent:
        lines += _struct_section(struct, meanings, unused)
    lines += ["## Structs inside messages", ""]
    for struct in _inner_structs(sent):
        lines += _struct_section(struct, meanings, unused)
    lines += ["## Refusal codes", "", "| code | meaning |", "| --- | --- |"]
    lines += [f"| `{code}` | {messages.REFUSAL_SENTENCES[code]} |" for code in get_args(messages.RefusalCode)]
    if unused:
        raise UndocumentedError(f"wire_fields.toml describes fields that no message has: {sorted(unused)}")
    return "\n".join(lines) + "\n"


def _struct_section(
    struct: type[msgspec.Struct], meanings: dict[str, dict[str, str]], unused: set[tuple[str, str]]
) -> Iterator[str]:
    tag = struct.__struct_config__.tag
    yield f"### {struct.__name__}" + (f" (`{tag}`)" if tag is not None else "")
    yield ""
    if not struct.__doc__:
        raise _missing(struct.__name__)
    yield _one_line(struct.__doc__)
    yield ""
    if not struct.__struct_fields__:
        return
    yield "| field | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    own = _field_docstrings(struct)
    described = msgspec.inspect.type_info(struct)
    assert isinstance(described, msgspec.inspect.StructType)
    for field in described.fields:
        section = struct.__name__ if field.name in meanings.get(struct.__name__, {}) else "common"
        meaning = own.get(field.name) or meanings[section].get(field.name)
        if field.name not in own:
            unused.discard((section, field.name))
        if meaning is None:
            raise _missing(f"{struct.__name__}.{field.name}")
        default = "" if field.default is NODEFAULT else f"`{field.default!r}`"
        yield f"| `{field.name}` | {_spelled(field.type)} | {default} | {meaning} |"
    yield ""


def _field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings below the fields in the source, by field name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(body.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = _one_line(text).rstrip(".")
            case _:
                pass
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _missing(what: str) -> UndocumentedError:
    return UndocumentedError(
        f"{what} has no meaning: give it a docstring in its module of wire/ or a line in docs/wire_fields.toml"
    )


def _inner_structs(sent: tuple[type[msgspec.Struct], ...]) -> list[type[msgspec.Struct]]:
    found: dict[type[msgspec.Struct], None] = {}

    def visit(described: Any) -> None:
        match described:
            case msgspec.inspect.StructType():
                if described.cls not in found and described.cls not in sent:
                    found[described.cls] = None
                for field in described.fields:
                    visit(field.type)
            case msgspec.inspect.Metadata():
                visit(described.type)
            case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
                visit(described.item_type)
            case msgspec.inspect.TupleType():
                for item in described.item_types:
                    visit(item)
            case msgspec.inspect.DictType():
                visit(described.value_type)
            case msgspec.inspect.UnionType():
                for member in described.types:
                    visit(member)
            case _:
                pass

    for struct in sent:
        visit(msgspec.inspect.type_info(struct))
    return sorted(found, key=lambda struct: struct.__name__)


def _spelled(described: Any) -> str:
    """Return a type with its bounds in readable form."""
    kinds = msgspec.inspect
    match described:
        case kinds.Metadata():
            return _spelled(described.type)
        case kinds.IntType():
            return f"int {_bound(described.ge)}..{_bound(described.le)}" if described.le is not None else "int"
        case kinds.FloatType():
            return "float" if described.le is None else f"float {described.ge:g}..{described.le:g}"
        case kinds.StrType() | kinds.BytesType():
            kind = "text" if isinstance(described, kinds.StrType) else "bytes"
            if described.min_length is not None and described.min_length == described.max_length:
                return f"{kind}, exactly {described.max_length}"
            bound = f" up to {described.max_length}" if described.max_length is not None else ""
            return f"{kind}{bound}" + (
                f" matching `{described.pattern}`" if getattr(described, "pattern", None) else ""
            )
        case kinds.BoolType():
            return "bool"
        case kinds.NoneType():
            return "none"
        case kinds.RawType():
            return "msgpack"
        case kinds.LiteralType():
            return " or ".join(f"`{value}`" for value in described.values)
        case kinds.StructType():
            return f"[{described.cls.__name__}](#{described.cls.__name__.lower()})"
        case kinds.VarTupleType():
            bound = "" if described.max_length is None else f", up to {described.max_length}"
            return f"list{bound}, of {_spelled(described.item_type)}"
        case kinds.TupleType():
            return "(" + ", ".join(_spelled(item) for item in described.item_types) + ")"
        case kinds.DictType():
            bound = "" if described.max_length is None else f", up to {described.max_length}"
            return f"map{bound}, of {_spelled(described.key_type)} to {_spelled(described.value_type)}"
        case kinds.UnionType():
            return " or ".join(_spelled(member) for member in described.types)
        case _:
            raise UndocumentedError(f"no spelling for {described!r}")


def _bound(value: int | None) -> str:
    if value is None:
        return ""
    power = value.bit_length() - 1
    return f"2^{power}" if value > 2**15 and value == 2**power else str(value)


def recipes_page() -> str:
    """Return a section per table of a recipe, with all its keys."""
    meanings = tomllib.loads((DOCS / "recipe_fields.toml").read_text(encoding="utf-8"))
    if set(_inner_structs((RecipeTables,))) != set(RECIPE_TABLES.values()) or set(meanings) != set(RECIPE_TABLES):
        raise UndocumentedError("docs/generate.py or docs/recipe_fields.toml must have exactly the tables of a recipe")
    lines: list[str] = []
    for name, struct in RECIPE_TABLES.items():
        lines += [f"## [{name}]", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        described = msgspec.inspect.type_info(struct)
        assert isinstance(described, msgspec.inspect.StructType)
        if odd := {field.name for field in described.fields} ^ set(meanings[name]):
            raise UndocumentedError(
                f"recipe_fields.toml and the code have different keys in [{name}]: {', '.join(sorted(odd))}"
            )
        for field in described.fields:
            written = _written(field.default, field.default_factory)
            lines.append(f"| `{field.name}` | {_in_recipe(field.type)} | {written} | {meanings[name][field.name]} |")
        lines.append("")
    return "\n".join(lines)


def _in_recipe(described: Any) -> str:
    """Return a type in the terms of a recipe's author."""
    kinds = msgspec.inspect
    match described:
        case kinds.StructType():
            name = next(name for name, struct in RECIPE_TABLES.items() if struct is described.cls)
            return f"[table](#{name.replace('.', '')})"
        case kinds.UnionType():
            return " or ".join(
                _in_recipe(member) for member in described.types if not isinstance(member, kinds.NoneType)
            )
        case kinds.ListType() | kinds.VarTupleType():
            return f"list of {_in_recipe(described.item_type)}"
        case kinds.TupleType():
            return "[" + ", ".join(_in_recipe(item) for item in described.item_types) + "]"
        case kinds.DictType():
            return "table"
        case kinds.StrType():
            return "text"
        case kinds.IntType():
            return "whole number" if not described.ge else f"whole number from {described.ge}"
        case kinds.FloatType():
            return "number"
        case kinds.Metadata():
            return _in_recipe(described.type)
        case _:
            return _spelled(described)


def _written(default: Any, factory: Any) -> str:
    """Return a default value in TOML syntax."""
    value = default if factory is NODEFAULT else factory()
    match value:
        case _ if value is NODEFAULT:
            return "needed"
        case None:
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case msgspec.Struct():
            return ""
        case tuple() | list():
            return f"`[{', '.join(map(str, value))}]`"
        case _:
            return f"`{value}`"


def machines_page() -> str:
    """Return a diagram of every state machine, from its table."""
    lines: list[str] = []
    for title, module, arrows in _machines():
        lines += [f"## {title}", "", _one_line(inspect.getdoc(module) or "").split(". ")[0] + ".", ""]
        lines += ["```mermaid", "stateDiagram-v2", *_drawn(arrows), "```", ""]
    return "\n".join(lines)


def _machines() -> Iterator[tuple[str, ModuleType, list[Arrow]]]:
    for module, machine in ((membership, membership.MEMBERSHIP), (join_code, join_code.JOIN_CODE), (job, job.JOB)):
        yield machine.name.capitalize(), module, [(*row[:3],) for row in rows(machine)]
    yield "Driver", driver, [(*row[:3],) for row in rows(driver.TABLE)]
    yield "Stage", stage, [(*row[:3],) for row in rows(stage.TABLE)]
    yield "Serving", serving, [(*row[:3],) for row in rows(serving.TABLE)]


def _drawn(arrows: list[Arrow]) -> Iterator[str]:
    """Yield Mermaid lines; events with the same source and target share an arrow."""
    events: dict[tuple[str, str], list[str]] = {}
    for source, event, target in arrows:
        events.setdefault((source, target), []).append(event)
    for (source, target), names in events.items():
        label = f": {', '.join(dict.fromkeys(names))}" if any(names) else ""
        yield f"    {'[*]' if source == START else _phase(source)} --> {_phase(target)}{label}"


def _phase(name: str) -> str:
    return name.replace("-", "_").replace(" ", "_")


def analysis_page() -> str:
    """Return the comparison that `fusion analyze` makes from the shipped catalogue."""
    return document(shipped_comparisons())


def models_page() -> str:
    """Return the results of `benchmarks/universality.py`, and the operators of each backend."""
    found = json.loads((DOCS / "models.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    passing = sum(row["passes"] for row in rows)
    lines = [
        f"{passing} of {len(rows)} rows pass ({100 * passing / len(rows):.0f} %). In a row that passes, every check "
        f"that applies succeeded on every backend tried. {versions}.",
    ]
    columns = [(what, name) for what in ("forward", "gradients", "serving") for name in BACKENDS]
    columns.remove(("gradients", "onnxruntime"))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines += ["", f"## {kind[0].upper()}{kind[1:]}", ""]
        titles = " | ".join(f"{what}: {name}" for what, name in columns)
        lines.append(f"| model | parameters | files | {titles} |")
        lines.append("|---|---:|---|" + "---:|" * len(columns))
        for row in rows:
            if row["kind"] == kind:
                cells = " | ".join(_model_cell(row, what, name) for what, name in columns)
                lines.append(f"| {row['name']} | {row['parameters']:,} | {_files_cell(row)} | {cells} |")
    if any(row["files"]["state"] != "not" and not {*row["forward"]} <= {*row["from_files"]} for row in rows):
        lines += ["", "`*`: tried on a new model of the same configuration, not on one read from files."]
    lines += ["", "## Which features are missing, and why?", ""]
    lines += [*_model_reasons(rows)] or ["Nothing."]
    return "\n".join([*lines, "", *_families(), "", *_coverage()]) + "\n"


SERVED: Final = {
    "cached": "from caches",
    "computed anew": "computed anew",
    "refused": "refused",
    "missed": "**wrong**",
    "unready": "not ready in time",
    "broken": "not by transformers itself",
}
"""How `benchmarks/families.py` found a family -> the words of the page."""


def _families() -> Iterator[str]:
    """Yield what serves every causal family of transformers, and how many are refused."""
    found = json.loads((DOCS / "families.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    counts = {how: sum(row["how"] == how for row in rows) for how in SERVED}
    slowest = max(rows, key=lambda row: row["ready_s"])
    yield "## Which causal families of transformers are served?"
    yield ""
    yield (
        f"Transformers {found['transformers']} knows causal language models under "
        f"{len(rows) + len(found['untried'])} names, of which {len(rows)} were tried."
    )
    yield ""
    yield from _table(("how it is served", "families"), ((SERVED[how], str(counts[how])) for how in SERVED))
    if found["untried"]:
        yield ""
        yield f"Not tried yet: {', '.join(found['untried'])}."
    yield ""
    yield (
        "`ready` is the processor time of one thread from the files to three stages with their weights, at most "
        f"{slowest['ready_s']:.0f} s ({slowest['name']}). Families that transformers itself does not run are listed "
        "with what it raises."
    )
    yield ""
    shown = ((row["name"], SERVED[row["how"]], f"{row['ready_s']:.0f} s", _line(row["reason"])) for row in rows)
    yield from _table(("family", "served", "ready", "reason"), shown)


def _line(text: str) -> str:
    """Return the text as it can stand in a table's cell."""
    return " ".join(text.split()).replace("|", "\\|") or "-"


def _files_cell(row: Mapping[str, Any]) -> str:
    match row["files"]["state"]:
        case "not":
            return "-"
        case "equal":
            return "equal"
        case _:
            return "**missed**"


def _model_cell(row: Mapping[str, Any], what: str, name: str) -> str:
    if name in row["refused"]:
        return "lacks"
    cell = row[what].get(name)
    if cell is None and row["capture"]["state"] == "equal":
        return "not tried"
    if cell is None or cell["state"] == "not":
        return "-"
    unread = "" if name in row["from_files"] or row["files"]["state"] == "not" else "*"
    return f"{cell['difference']:.0e}{unread}" if cell["state"] == "equal" else "**missed**"


def _model_reasons(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["capture"]["state"] == "missed":
            yield f"- {row['name']}: not captured. {row['capture']['reason']}"
        if row["files"]["state"] == "missed":
            yield f"- {row['name']}: files: {row['files']['reason']}"
        for name, operators in row["refused"].items():
            yield f"- {row['name']}: {name} lacks {operators}."
        told: set[str] = set()
        for what in ("forward", "gradients", "serving"):
            for name, cell in row[what].items():
                reason = cell["reason"]
                if cell["state"] == "missed":
                    yield f"- {row['name']}: {what} on {name}: {reason}"
                elif reason and reason not in told:
                    told.add(reason)
                    yield f"- {row['name']}: no cached serving. {reason}"


def _coverage() -> Iterator[str]:
    """Yield a table of the operators each backend lacks. Every backend has the size operators, so they are left out."""
    operators = [name for name, operator in OPERATORS.items() if operator.category != "size"]
    yield "## Operators"
    yield ""
    yield f"A graph may hold {len(operators)} operators. The table shows how many of them each backend has."
    yield ""
    yield "| backend | has | lacks |"
    yield "|---|---:|---|"
    for name in BACKENDS:
        lacking = open_backend(name, device="cpu").unsupported(operators)
        yield f"| {name} | {len(operators) - len(lacking)} | {', '.join(f'`{op}`' for op in lacking) or '-'} |"


def privacy_page() -> str:
    """Return the results of the shipped audit: levels, boundaries by depth and defence, attacks, updates, budgets."""
    found = shipped()
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    lines = [
        *privacy.facts(found),
        f"Made on {found.date} by `{found.command}` in {format_seconds(found.seconds)} ({found.machine}; {versions}).",
        "",
        "## Levels",
        "",
        *(f"- **{name}**: {who}." for name, who in ADVERSARIES.items()),
        "",
        *_table(("level", *ADVERSARIES), privacy.level_rows(found)),
        "",
        "Percentages are the private tokens that the strongest attack recovered: the lowest and the highest value over "
        "all depths.",
    ]
    for title, cell in (
        ("Tokens recovered by the white-box attack", lambda one: privacy.share(one.white_box.top1)),
        (
            "Tokens recovered by the strongest attack",
            lambda one: f"{privacy.share(one.worst.top1)} ({one.worst.attack})",
        ),
        ("Loss, nats per token", lambda one: f"{one.loss:.3f}"),
    ):
        lines += ["", f"## {title}", "", *_by_depth(found, cell)]
    lines += ["", "## Every attack", ""]
    lines += _table(privacy.boundary_headers(found), privacy.boundary_rows(found))
    lines += ["", "## Texts recovered from gradients", ""]
    lines += _table(privacy.UPDATE_HEADERS, map(privacy.update_row, found.updates))
    lines += ["", "## Cost of the attacks", "", *_table(privacy.BUDGET_HEADERS, privacy.budget_rows(found))]
    lines += ["", "## Positive controls", ""]
    passed = ((control.name, privacy.share(control.got)) for control in found.controls)
    lines += _table(("case in which the attack must succeed", "recovered"), passed)
    return "\n".join(lines) + "\n"


def _by_depth(found: Findings, cell: Callable[[BoundaryFindings], str]) -> Iterator[str]:
    """Return a table with a row for each depth and a column for each defence."""
    at = ((depth, (found.at(defence, depth) for defence in found.defences)) for depth in found.depths)
    rows = ((str(depth), *("at home" if one is None else cell(one) for one in row)) for depth, row in at)
    return _table(("depth", *found.defences), rows)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headers) + " |"
    yield "| " + " | ".join("---" for _ in headers) + " |"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def planning_page() -> str:
    """Return the results of `benchmarks/planner_pools.py`: a row per kind of pool, a column per number of machines."""
    found = json.loads((DOCS / "planning.json").read_text(encoding="utf-8"))
    cells = {(row["kind"], row["peers"]): row["pools"] for row in found["rows"]}
    kinds, sizes = dict.fromkeys(kind for kind, _ in cells), sorted({peers for _, peers in cells})
    lines = ["| kind | " + " | ".join(f"{peers:,} machines" for peers in sizes) + " |", "|---|" + "---|" * len(sizes)]
    for kind in kinds:
        columns = (_pools_cell(cells[kind, peers]) if (kind, peers) in cells else "not tried" for peers in sizes)
        lines.append(f"| {kind} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _pools_cell(pools: Sequence[Mapping[str, Any]]) -> str:
    gaps = sorted(100 * pool["gap"] for pool in pools if pool["gap"] is not None)
    proven = sum(pool["exact"] for pool in pools)
    without = len(pools) - len(gaps)
    parts = ["proven" if proven == len(pools) else f"{proven} of {len(pools)} proven"]
    if gaps and proven < len(gaps):
        parts.append(f"gap up to {gaps[-1]:.2g} %" if gaps[-1] >= 0.01 else "gap below 0.01 %")
    if without:
        parts.append(f"{without} without a plan")
    seconds = sorted(pool["seconds"] for pool in pools)
    parts.append(f"{seconds[0]:.1f} to {seconds[-1]:.1f} s" if len(pools) > 1 else f"{seconds[0]:.1f} s")
    return ", ".join(parts)


GENERATED: Final = {
    "planning.md": planning_page,
    "privacy.md": privacy_page,
    "models.md": models_page,
    "wire.md": wire_page,
    "machines.md": machines_page,
    "modules.md": module_map.modules_page,
    "recipes.md": recipes_page,
    "analysis.md": analysis_page,
}


def rendered(name: str) -> str:
    """Return the whole page: the hand-written part, the marker, the generated part."""
    by_hand, marker, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise UndocumentedError(f"docs/{name} has lost its marker line: {MARKER}")
    return f"{by_hand}{MARKER}\n\n{GENERATED[name]()}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    check = parser.parse_args(arguments).check
    stale = [name for name in GENERATED if rendered(name) != (DOCS / name).read_text(encoding="utf-8")]
    if not check:
        for name in stale:
            (DOCS / name).write_text(rendered(name), encoding="utf-8")
    for name in stale:
        sys.stdout.write(f"docs/{name} {'is out of date: run `make docs`' if check else 'written'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
