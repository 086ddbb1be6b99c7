"""What people get wrong, one row each: a sentence that names it, the right exit code, no traceback, nothing left."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.live_pool import Done, LivePool, fusion, write_recipe, write_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    """Nobody lends anything in it."""
    with LivePool(tmp_path_factory.mktemp("pool")) as opened:
        yield opened


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    write_text(tmp_path / "text.txt")
    (tmp_path / "file").write_text("x")
    return tmp_path


def train(pool: LivePool, place: Path, *more: object, **changes: object) -> Done:
    return fusion("train", write_recipe(place / "r.toml", **changes), "--home", pool.owner, *more)


def refused(done: Done, code: int, *said: str) -> None:
    assert done.code == code, done.err + done.out
    for words in said:
        assert words in done.err, done.err
    assert "Traceback" not in done.err
    assert "internal error" not in done.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__learnig_rate": 1.0}, ("'learnig_rate'", "did you mean 'learning_rate'")),
        ({"trian__a": 1}, ("unknown table 'trian'", "did you mean 'train'")),
        ({"job__steps": "ten"}, ("'steps' in [job]", "expected a whole number", "'ten'")),
        ({"train__batch_size": 5}, ("batch_size 5", "2 equal microbatches")),
        ({"model__path": "x"}, ("exactly one of", "config and path")),
        ({"train__optimizer": {"kind": "adam"}}, ("one of 'adamw', 'sgd'", "'adam'")),
        ({"train__warmup_steps": 9}, ("warmup_steps 9", "4 steps")),
        ({"evaluation": {"every": 2}}, ("[evaluation]", "evaluation_fraction")),
        ({"job__directory": "file"}, ("file is a file, not a directory", "[job] directory")),
    ],
)
def test_recipes(pool: LivePool, place: Path, changes: dict[str, object], said: tuple[str, ...]):
    before = sorted(place.rglob("*"))
    refused(train(pool, place, **changes), 2, *said)
    assert [path for path in sorted(place.rglob("*")) if path.name != "r.toml"] == before


@pytest.mark.parametrize(
    ("content", "said"), [(None, "no recipe at"), ("[job\nname = 3", "not valid TOML"), (b"\xff\xfe", "not UTF-8")]
)
def test_files_that_are_no_recipe(pool: LivePool, place: Path, content: str | bytes | None, said: str):
    path = place / "odd.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(fusion("train", path, "--home", pool.owner), 2, said)


@pytest.fixture
def nobody_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command goes on although nobody lends a machine."""
    from fusionai.client.pool.session import PoolSession

    async def somebody(self: PoolSession) -> tuple[object, ...]:
        return (object(),)

    monkeypatch.setattr(PoolSession, "pool", somebody)


def test_nobody_lends_a_machine(pool: LivePool, place: Path):
    done = train(pool, place)
    refused(done, 1, "no peer is free in pool 'pool'", "fusion invite")
    assert "reading the data" not in done.out  # which may take long


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--device", "tpu"), 2, "'tpu' is not one of"),
        (("--threads", "0"), 2, "0 is not in the range"),
        (("--json", "nothing/figures.json"), 2, "no directory nothing"),
        (("--invite", "hello"), 2, "expected an invitation starting with 'fusion1-'"),
        (("--invite", "fusion2-abc"), 2, "expected an invitation starting with 'fusion1-'"),
        (("--home", "stranger"), 2, "has not joined a pool"),
    ],
)
def test_flags_of_train(
    pool: LivePool, place: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], code: int, said: str
):
    monkeypatch.chdir(place)
    refused(train(pool, place, *more), code, said)
    assert not (place / "run").exists()


def test_a_device_that_is_not_there_is_said_before_anything_is_read(pool: LivePool, place: Path, nobody_needed: None):
    import torch

    device = "mps" if torch.cuda.is_available() else "cuda"
    done = train(pool, place, "--device", device)
    refused(done, 2, f"no {device} device", "fusion doctor")
    assert "reading the data" not in done.out


def test_invitations(pool: LivePool, place: Path):
    once = pool.invite()
    for _ in range(2):  # the same machine may come again
        assert fusion("join", once, "--owner", "--home", place / "first").code == 0
    refused(fusion("join", once, "--owner", "--home", place / "second"), 2, "used up")
    refused(fusion("join", once[:-9], "--owner", "--home", place / "second"), 2, "checksum")
    refused(fusion("join", pool.invite("--lifetime", "0.000001s"), "--owner", "--home", place / "second"), 2, "expired")
    assert not (place / "second" / "owner" / "membership.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--share", "0%"), "above 0%"),
        (("--threads", "0"), "0 is not in the range"),
        (("--backend", "abacus"), "'abacus' is not"),
        (("--max-memory", "900000GB"), "--max-memory is 900 TB, but cpu has"),
    ],
)
def test_flags_of_join(pool: LivePool, place: Path, more: tuple[str, ...], said: str):
    home = ("--home", place / "home", "--device", "cpu")
    done = fusion("join", pool.invite(), *home, "--host", "127.0.0.1", *more)
    refused(done, 2, said)


def test_a_port_in_use(pool: LivePool, place: Path):
    home = ("--home", place / "home", "--device", "cpu", "--threads", "1")
    refused(fusion("join", pool.invite(), *home, "--host", "127.0.0.1", "--port", pool.port), 2, "already in use")


def test_a_home_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    refused(fusion("pool", "--home", tmp_path / "new" / "home"), 2, f"{tmp_path} is not writable", "--home")
    (tmp_path / "file").write_text("")
    refused(fusion("pool", "--home", tmp_path / "file" / "home"), 2, "file is a file")


@pytest.mark.parametrize("command", ["pool", "jobs"])
def test_figures_have_their_schema(pool: LivePool, place: Path, command: str):
    assert fusion(command, "--home", pool.owner, "--json", place / "figures.json").code == 0
    assert json.loads((place / "figures.json").read_text())["schema"] == f"fusionai.{command}/1"
