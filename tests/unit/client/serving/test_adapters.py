"""From where adapters are loaded while a model is served, and which place they get."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionai.capture.models.adapter import AdapterSlots
from fusionai.client.serving.adapters import AdapterRoom, RunningAdapters
from fusionai.primitives.errors import UsageError
from fusionai.storage.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig, encode_adapter_config


class Engine:
    """Three places, the first taken at the start; keeps what it was to load."""

    def __init__(self) -> None:
        self.adapters = {"law": 1}
        self.busy: set[int] = set()
        self.loaded: list[tuple[str, int]] = []
        self.changing = asyncio.Lock()

    @property
    def free_adapters(self) -> tuple[int, ...]:
        return tuple({1, 2, 3} - {*self.adapters.values()} - self.busy)

    async def load_adapter(self, name: str, number: int) -> None:
        self.loaded.append((name, number))
        self.adapters[name] = number

    def drop_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)


class Weights(dict[str, Any]):
    def replace(self, tensors: Any) -> None:
        self.update(tensors)


class Model:
    slots = AdapterSlots((None, None, None), (4, 8, 2), {"q": (3, 4)})

    class files:
        name = "tiny"


def adapter(directory: Path, rank: int) -> Path:
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    config = encode_adapter_config(AdapterConfig(rank=rank, alpha=2.0 * rank, targets=("q",)), base=None, task=None)
    (directory / CONFIG_FILE).write_bytes(config)
    ones = {"A": np.ones((rank, 3), np.float32), "B": np.ones((4, rank), np.float32)}
    tensors = {f"base_model.model.q.lora_{part}.weight": values for part, values in ones.items()}
    save_file(tensors, directory / WEIGHTS_FILE)
    return directory


@pytest.fixture
def made(tmp_path: Path) -> tuple[RunningAdapters, Any, Weights]:
    for rank in (2, 8, 9):
        adapter(tmp_path / "all" / f"rank-{rank}", rank)
    adapter(tmp_path / "outside", 2)
    engine, weights = Engine(), Weights()
    model: Any = Model()
    return RunningAdapters(tmp_path / "all", model, weights, engine), engine, weights  # type: ignore[arg-type]


def test_the_smallest_place_that_fits_is_taken_and_given_back(made: tuple[RunningAdapters, Any, Weights]) -> None:
    running, engine, weights = made

    async def story() -> None:
        await running.load("small", "rank-2")
        assert engine.loaded == [("small", 3)]
        down = np.frombuffer(weights["q.adapters_a"].data, np.float32).reshape(14, 3)
        up = np.frombuffer(weights["q.adapters_b"].data, np.float32).reshape(4, 14)
        assert (down[:12] == 0).all()
        assert (down[12:] == 1).all()
        assert (up[:, 12:] == 2).all()  # alpha over rank
        await running.load("large", "rank-8")
        assert running.names == ("law", "small", "large")
        with pytest.raises(UsageError, match="no place is free for an adapter of rank 2: of 3 places, 0 are free"):
            await running.load("third", "rank-2")
        engine.busy.add(3)
        await running.unload("small")
        with pytest.raises(UsageError, match="no place is free"):
            await running.load("third", "rank-2")
        engine.busy.clear()
        await running.load("third", "rank-2")
        assert engine.loaded[-1] == ("third", 3)

    asyncio.run(story())


@pytest.mark.parametrize(
    "path", ["../outside", ".", "", "rank-2/..", "{}/outside", "/", "linked", "holds-link", "none"]
)
def test_nothing_outside_the_directory_is_read(
    made: tuple[RunningAdapters, Any, Weights], tmp_path: Path, path: str
) -> None:
    (tmp_path / "all" / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "all" / "holds-link").mkdir()
    (tmp_path / "all" / "holds-link" / CONFIG_FILE).symlink_to(tmp_path / "outside" / CONFIG_FILE)
    with pytest.raises(UsageError, match=r"below|leads out of"):
        asyncio.run(made[0].load("a", path.format(tmp_path)))
    assert not made[1].loaded


@pytest.mark.parametrize(("name", "word"), [("tiny", "in use"), ("law", "in use"), ("a b", "no name"), ("", "no name")])
def test_names_are_checked(made: tuple[RunningAdapters, Any, Weights], name: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        asyncio.run(made[0].load(name, "rank-2"))


def test_an_adapter_of_too_high_a_rank_has_no_place(made: tuple[RunningAdapters, Any, Weights]) -> None:
    with pytest.raises(UsageError, match=r"rank 9.*--adapter-rank"):
        asyncio.run(made[0].load("a", "rank-9"))
    assert AdapterRoom(Path(), 2, 16).ranks == (16, 16)
