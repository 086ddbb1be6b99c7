"""What a fresh clone needs: pins that satisfy the requirements, contracts that cover every package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned_within_its_range():
    pins = {canonical(name): Version(version) for name, version in PINS.items()}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, wanted):
        assert pins[canonical(requirement.name)] in requirement.specifier


def test_pins_are_exact_and_of_no_particular_build():
    assert all(re.fullmatch(r"[\w.]+", version) and "+" not in version for version in PINS.values())


def test_the_layers_name_every_package():
    layers = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")["layers"]
    named = {name.strip().removeprefix("fusionai.") for layer in layers for name in layer.split("|")}
    packages = {path.parent.name for path in (ROOT / "src/fusionai").glob("*/__init__.py")}
    assert packages == named


def test_make_check_runs_lint_types_and_contracts():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("check", "test"):
        needs = re.search(rf"^{target}: (.*)$", makefile, flags=re.MULTILINE)
        assert needs is not None
        assert {"lint", "types", "contracts"} <= set(needs[1].split())
    for command in ("ruff check", "ruff format --check", "basedpyright", "lint-imports"):
        assert command in makefile


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
