"""What of the source is reached from the `fusion` command, read from its syntax alone.

A module is reached when a reached module imports it, at its top or inside a function, or names it as a whole string:
lazily loaded commands (`"fusionai.cli.training.demo:demo"`), `import_module`, processes started with `python -m`.

A definition at a module's top level is reached when code of a reached module or definition uses its name: by the name
in its own module, by an import, or as an attribute of its module. A method is reached when its class is and live code
reads an attribute of that name, of any object: types are not followed. Names that Python or a library calls (dunder
methods, overrides of a class from elsewhere) count as read.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
ENTRY = "fusionai.cli.main"


@dataclass(frozen=True, slots=True)
class Module:
    """One source file."""

    name: str
    path: Path
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    bindings: dict[str, tuple[str, str]]
    """What an imported name stands for: the module and the name in it, "" for the module itself."""


@dataclass(slots=True)
class Unit:
    """A piece of code that is reached or not as a whole: a module's top level, a definition, a method."""

    module: str
    name: str
    """"" for a module's top level, `Class.method` for a method."""
    names: set[str] = field(default_factory=set[str])
    """Names used, of this module or builtins."""
    attributes: set[str] = field(default_factory=set[str])
    """Attributes read of any object."""
    dotted: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Attributes of a name: (name, attribute)."""
    always: bool = False
    """Whether something other than the source calls it: a library's override, a registered function."""


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Module]:
    """Every module of the source by its name, parsed once per process."""
    # Half a million nodes are made, and none goes before the end: a third of the time would be the collector's.
    gc.disable()
    paths = {name_of(path): path for path in sorted((SOURCE / "fusionai").rglob("*.py"))}
    found: dict[str, Module] = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = tuple(ast.walk(tree))
        found[name] = Module(name, path, tree, nodes, _bindings(nodes, paths.keys()))
    gc.freeze()
    gc.enable()
    return found


def _bindings(nodes: Iterable[ast.AST], known: Collection[str]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(source)):
                for alias in node.names:
                    whole = f"{source}.{alias.name}"
                    bound = (source if alias.name == "*" else whole, "")
                    found[whole if alias.name == "*" else alias.asname or alias.name] = (
                        bound if bound[0] in known else (source, alias.name)
                    )
            case ast.Import():
                for alias in node.names:
                    if alias.asname is not None:
                        found[alias.asname] = (alias.name, "")
            case _:
                pass
    return found


def imported(module: Module) -> Iterator[str]:
    """The modules of the source that `module` imports or names, packages above them included."""
    known = modules()
    for node in module.nodes:
        match node:
            case ast.Import():
                targets = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(source)):
                targets = [source, *(f"{source}.{alias.name}" for alias in node.names)]
            case ast.Constant(value=str(text)) if text.startswith("fusionai"):
                target = text.partition(":")[0]
                targets = [target, f"{target}.__main__"]
            case _:
                continue
        for target in targets:
            parts = target.split(".")
            yield from (name for end in range(1, len(parts) + 1) if (name := ".".join(parts[:end])) in known)


@cache
def reached_modules() -> frozenset[str]:
    """The modules that some command may load."""
    reached: set[str] = set()
    waiting = {ENTRY}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= set(imported(modules()[name])) - reached
    return frozenset(reached)


def _fill(unit: Unit, nodes: Iterable[ast.AST]) -> Unit:
    for top in nodes:
        bound: set[str] = set()
        names: set[str] = set()
        for node in ast.walk(top):
            match node:
                case ast.Name():
                    (names if isinstance(node.ctx, ast.Load) else bound).add(node.id)
                case ast.arg():
                    bound.add(node.arg)
                case ast.Attribute(ctx=ast.Load()):
                    unit.attributes.add(node.attr)
                    if isinstance(node.value, ast.Name):
                        unit.dotted.add((node.value.id, node.attr))
                case ast.Constant(value=str(text)) if text.startswith("fusionai.") and ":" in text:
                    module, _, attribute = text.partition(":")
                    unit.dotted.add((module, attribute))
                case ast.Constant(value=str(text)) if text.isidentifier():
                    unit.attributes.add(text)
                case ast.MatchClass():
                    unit.attributes |= set(node.kwd_attrs)
                case _:
                    pass
        # A local variable hides what the module calls by the same name.
        unit.names |= names - bound if isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef) else names
    return unit


@cache
def units() -> tuple[Unit, ...]:
    """All of the source in pieces."""
    found: list[Unit] = []
    for module in modules().values():
        top = Unit(module.name, "")
        for node in module.tree.body:
            match node:
                case ast.ClassDef():
                    found.extend(_of_class(module, node))
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    unit = _fill(Unit(module.name, node.name), [node])
                    unit.always = any(_registers(decorator) for decorator in node.decorator_list)
                    found.append(unit)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    value = [node.annotation] if isinstance(node, ast.AnnAssign) else []
                    value += [node.value] if node.value is not None else []
                    found.append(_fill(Unit(module.name, name), value))
                case ast.Import() | ast.ImportFrom():
                    pass
                case _:
                    _fill(top, [node])
        found.append(top)
    return tuple(found)


def _of_class(module: Module, node: ast.ClassDef) -> Iterator[Unit]:
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
    rest = [child for child in node.body if child not in methods]
    yield _fill(Unit(module.name, node.name), [*node.bases, *node.keywords, *node.decorator_list, *rest])
    foreign = any(_is_foreign(module, base) for base in node.bases)
    for method in methods:
        unit = _fill(Unit(module.name, f"{node.name}.{method.name}"), [method])
        unit.always = foreign or (method.name.startswith("__") and method.name.endswith("__"))
        yield unit


def _registers(decorator: ast.expr) -> bool:
    """Whether a decorator hands the function to an object that calls it: `@group.command()`, `@click.pass_context`."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute)


_PLAIN = {"Protocol", "Struct", "Generic", "Enum", "StrEnum", "IntEnum", "NamedTuple", "TypedDict", "ABC", "Exception"}


def _is_foreign(module: Module, base: ast.expr) -> bool:
    """Whether a base class is of a library, so that its methods may be called from there."""
    match base:
        case ast.Subscript():
            return _is_foreign(module, base.value)
        case ast.Name():
            if base.id in _PLAIN:
                return False
            source = module.bindings.get(base.id, (module.name, ""))[0]
            if source not in modules():
                return True
            name = module.bindings.get(base.id, ("", base.id))[1]
            owner = modules()[source]
            for node in owner.tree.body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return any(_is_foreign(owner, inner) for inner in node.bases)
            return False
        case ast.Attribute():
            return base.attr not in _PLAIN
        case _:
            return True


@cache
def loaded_by_name() -> frozenset[str]:
    """Modules that are named as a whole string: their definitions are attributes of whatever the loader returns."""
    return frozenset(
        node.value
        for module in modules().values()
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules()
    )


@cache
def unreached() -> tuple[Unit, ...]:
    """Definitions and methods of reached modules that no reached code uses."""
    reached = reached_modules()
    by_place = {(unit.module, unit.name): unit for unit in units() if unit.module in reached}
    by_attribute: dict[str, list[Unit]] = {}
    methods: dict[tuple[str, str], list[Unit]] = {}
    for unit in by_place.values():
        owner, _, attribute = unit.name.rpartition(".")
        if owner:
            methods.setdefault((unit.module, owner), []).append(unit)
        if owner or unit.module in loaded_by_name():
            by_attribute.setdefault(attribute, []).append(unit)
    live: set[tuple[str, str]] = set()
    read: set[str] = set()
    waiting = [unit for unit in by_place.values() if not unit.name or (unit.always and "." not in unit.name)]
    while waiting:
        unit = waiting.pop()
        place = (unit.module, unit.name)
        if place in live:
            continue
        live.add(place)
        waiting += (one for one in methods.get(place, []) if one.always or one.name.rpartition(".")[2] in read)
        waiting += (by_place[target] for target in _targets(unit) if target in by_place)
        for attribute in unit.attributes - read:
            read.add(attribute)
            for one in by_attribute.get(attribute, []):
                owner = one.name.rpartition(".")[0]
                if not owner or (one.module, owner) in live:
                    waiting.append(one)
    return tuple(unit for place, unit in by_place.items() if place not in live)


def _targets(unit: Unit) -> Iterator[tuple[str, str]]:
    bindings = modules()[unit.module].bindings
    for name in unit.names:
        yield from handed_on(unit.module, name)
    for name, attribute in unit.dotted:
        module, inner = bindings.get(name, (name, ""))
        if not inner:
            yield from handed_on(module, attribute)


def handed_on(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Where `name` of `module` may be defined: there, or where it is imported from."""
    while module in modules():
        yield module, name
        bindings = modules()[module].bindings
        if name not in bindings:
            for whole, (source, _) in bindings.items():
                if whole.endswith(".*") and (not name or name in defined(source)):
                    yield from handed_on(source, name)
            return
        module, name = bindings[name]


@cache
def defined(module: str) -> frozenset[str]:
    """Names of what a module's top level defines."""
    found: set[str] = set()
    for node in modules()[module].tree.body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case _:
                pass
    return frozenset(found)
