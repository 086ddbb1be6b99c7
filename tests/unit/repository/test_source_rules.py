"""Rules for the whole source, read from its syntax: what is never called, what is read where, what is typed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from harness.source_graph import ROOT, Module, modules

SOURCE = ROOT / "src" / "fusionai"
PACKAGES = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr"}
UNSAFE_ATTRIBUTES = {
    ("torch", "load"),
    ("export", "load"),
    ("jit", "load"),
    ("package", "PackageImporter"),
    ("numpy", "load"),
    ("np", "load"),
    ("sympy", "sympify"),
    ("yaml", "load"),
    ("os", "system"),
}
ENVIRONMENT_FILE = SOURCE / "primitives" / "environment.py"


@cache
def files() -> dict[Path, Module]:
    return {module.path: module for module in modules().values()}


def dotted(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Name():
            return (node.id,)
        case ast.Attribute():
            return (*dotted(node.value), node.attr)
        case _:
            return ("",)


def unsafe(module: Iterable[ast.AST]) -> Iterator[str]:
    for node in module:
        match node:
            case ast.Import():
                for alias in node.names:
                    if alias.name.partition(".")[0] in UNSAFE_MODULES:
                        yield f"{node.lineno}: import {alias.name}"
            case ast.ImportFrom():
                if (node.module or "").partition(".")[0] in UNSAFE_MODULES:
                    yield f"{node.lineno}: from {node.module}"
                for alias in node.names:
                    if alias.name == "sympify" or (node.module, alias.name) == ("torch", "load"):
                        yield f"{node.lineno}: from {node.module} import {alias.name}"
            case ast.Call():
                name = dotted(node.func)
                if len(name) == 1 and name[0] in UNSAFE_CALLS:
                    yield f"{node.lineno}: {name[0]}()"
                if name[-2:] in UNSAFE_ATTRIBUTES:
                    yield f"{node.lineno}: {'.'.join(name)}()"
                for keyword in node.keywords:
                    true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                    if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and true:
                        yield f"{node.lineno}: {keyword.arg}=True"
            case _:
                pass


def environment_reads(module: Iterable[ast.AST]) -> Iterator[str]:
    for node in module:
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv" | "putenv" | "environb"):
                yield f"{node.lineno}: os.{node.attr}"
            case ast.ImportFrom(module="os"):
                if any(alias.name in ("environ", "getenv", "environb") for alias in node.names):
                    yield f"{node.lineno}: from os import environ"
            case _:
                pass


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.export.load('x')",
        "from sympy import sympify",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "f(shell=True)",
    ],
)
def test_the_rule_finds_what_it_is_for(code: str):
    assert list(unsafe(ast.walk(ast.parse(code))))


def test_nothing_is_unpickled_or_evaluated():
    found = {relative(path): list(unsafe(module.nodes)) for path, module in files().items()}
    assert not {path: lines for path, lines in found.items() if lines}


def test_the_environment_is_read_in_one_file():
    found = {relative(path): list(environment_reads(module.nodes)) for path, module in files().items()}
    assert [path for path, lines in found.items() if lines] == [relative(ENVIRONMENT_FILE)]


def test_every_module_says_what_it_is():
    silent = [relative(path) for path, module in files().items() if not ast.get_docstring(module.tree)]
    assert not silent, f"without a module docstring: {silent}"


def test_every_package_names_packages_that_it_works_with():
    silent: list[str] = []
    for package in PACKAGES:
        said = ast.get_docstring(files()[package / "__init__.py"].tree) or ""
        others = {other.name for other in PACKAGES} - {package.name}
        if package.name != "primitives" and not set(re.findall(r"`(\w+)", said)) & others:
            silent.append(relative(package))
    assert not silent, f"a package's docstring says what it is responsible for, and which packages use it: {silent}"


def test_every_public_function_is_typed():
    bare = []
    for path, module in files().items():
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
                if node.returns is None or untyped:
                    bare.append(f"{relative(path)}:{node.lineno} {node.name}")
    assert not bare


def test_no_module_has_a_banned_name():
    banned = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    found = [relative(path) for path in files() if banned & {path.stem, path.parent.name}]
    assert not found


def test_annotations_are_postponed_everywhere():
    eager = []
    for path, module in files().items():
        body = [node for node in module.tree.body if not isinstance(node, ast.Expr)]
        if body and path.name != "__init__.py":
            first = body[0]
            if not (isinstance(first, ast.ImportFrom) and first.module == "__future__"):
                eager.append(relative(path))
    assert not eager
