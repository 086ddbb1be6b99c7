"""What a fresh clone needs: pins that satisfy the requirements, contracts that cover every package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
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


def test_every_pin_has_hashes_for_the_release():
    text = (ROOT / "release" / "requirements.txt").read_text(encoding="utf-8")
    entries = text.replace("\\\n", " ").splitlines()
    hashed = {line.split()[0]: line.count("--hash=sha256:") for line in entries if line and line[0] not in "# "}
    pinned = {f"{canonical(name)}=={version}" for name, version in PINS.items()}
    assert {name.partition(" ")[0] for name in hashed} == pinned, "run: make release-files"
    assert all(hashed.values())


def test_every_pin_has_a_line_in_the_list_of_licences():
    lines = (ROOT / "release" / "licences.md").read_text(encoding="utf-8").splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    listed = {canonical(name): version.partition("+")[0] for name, version, *_ in cells}
    wanted = {canonical(name): version for name, version in PINS.items() if canonical(name) in listed}
    assert {name: listed[name] for name in wanted} == wanted, "run: make release-files"
    runtime = {canonical(Requirement(one).name) for one in PROJECT["project"]["dependencies"]}
    assert runtime <= listed.keys()


def test_pins_are_exact_and_of_no_particular_build():
    assert all(re.fullmatch(r"[\w.]+", version) and "+" not in version for version in PINS.values())


def test_the_layers_name_every_package():
    layers = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")["layers"]
    named = {name.strip().removeprefix("fusionai.") for layer in layers for name in layer.split("|")}
    packages = {path.parent.name for path in (ROOT / "src/fusionai").glob("*/__init__.py")}
    assert packages == named


def test_make_check_runs_lint_types_and_contracts():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for first_line in (r"^check: setup\n.* -j 2 TYPES=--changed (.*)$", r"^test: setup\n.* -j 2 (.*)$"):
        needs = re.search(first_line, makefile, flags=re.MULTILINE)
        assert needs is not None
        assert {"lint", "types", "contracts"} <= set(needs[1].split())
    for command in ("ruff check", "ruff format --check", "basedpyright", "lint-imports"):
        assert command in makefile


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path / "out"), str(tmp_path)], check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {p.relative_to(tmp_path / "src").as_posix() for p in (tmp_path / "src").rglob("*") if p.is_file()}
    wanted = {path for path in wanted if "__pycache__" not in path and ".egg-info" not in path}
    assert wanted <= packed, f"missing from the wheel: {sorted(wanted - packed)}"
