"""Weights that lie in files of this machine are read in place as long as the files are what was hashed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fusionai.primitives.errors import StorageError
from fusionai.storage.assembly import Assembly, Extent
from fusionai.storage.weight_manifest import ModelWeights, WeightsInFiles, manifest
from fusionai.storage.weight_store import WeightStore

ARRAYS = {"a": np.arange(700_000, dtype=np.float32), "b": np.ones((3, 5), np.float32)}


def hashed(directory: Path) -> tuple[Path, ModelWeights]:
    path = directory / "model.safetensors"
    save_file(ARRAYS, path)
    located = {name: (path, name) for name in ARRAYS}
    own = WeightStore(directory / "own")
    return path, manifest(ARRAYS, lambda _keys: iter(()), own, located=located, memory=directory / "weights.json")


def test_what_the_memory_lists_is_here_without_being_fetched(tmp_path: Path) -> None:
    beside = WeightsInFiles(tmp_path / "weights.json")
    store = WeightStore(tmp_path / "peer", beside=beside.find)
    _, weights = hashed(tmp_path)  # after the store was made, as a peer starts before the model is looked at
    for spec in weights.specs:
        assert store.has(spec)
        assert store.missing(spec) == ()
        assert bytes(store.read(spec).data) == ARRAYS[spec.key].tobytes()
        assert store.pieces(spec.digest, 0, 1) == ARRAYS[spec.key].tobytes()[: 2**20]
        assert store.pieces(spec.digest, 1, 8) == ARRAYS[spec.key].tobytes()[2**20 :]
        assert store.pieces(spec.digest, 9, 8) == b""
    assert not any(path.stat().st_size for path in (tmp_path / "peer").iterdir())


@pytest.mark.parametrize("touched", ["changed", "gone"])
def test_a_file_that_is_another_now_is_not_read(tmp_path: Path, touched: str) -> None:
    path, weights = hashed(tmp_path)
    store = WeightStore(tmp_path / "peer", beside=WeightsInFiles(tmp_path / "weights.json").find)
    spec = weights.specs[0]
    assert store.has(spec)
    if touched == "gone":
        path.unlink()
    else:
        os.utime(path, ns=(1, 1))
    assert not store.has(spec)
    assert len(store.missing(spec)) == len(spec.pieces)
    assert store.pieces(spec.digest, 0, 1) == b""
    with pytest.raises(StorageError, match="not among the weights"):
        store.read(spec)


def test_what_the_store_has_itself_comes_first(tmp_path: Path) -> None:
    path, weights = hashed(tmp_path)
    store = WeightStore(tmp_path / "peer", beside=WeightsInFiles(tmp_path / "weights.json").find)
    spec = weights.specs[1]
    other = WeightStore(tmp_path / "peer")
    other.add(spec, memoryview(ARRAYS[spec.key].tobytes()))
    path.unlink()
    assert bytes(store.read(spec).data) == ARRAYS[spec.key].tobytes()


def test_without_a_memory_nothing_is_found(tmp_path: Path) -> None:
    assert WeightsInFiles(tmp_path / "none.json").find(b"x" * 32) is None


def test_what_is_made_of_parts_is_read_in_place_too(tmp_path: Path) -> None:
    save_file({"up": ARRAYS["a"], "down": ARRAYS["b"]}, tmp_path / "0.safetensors")
    save_file({"gate": ARRAYS["a"][::-1].copy()}, tmp_path / "1.safetensors")
    files = {"up": tmp_path / "0.safetensors", "gate": tmp_path / "1.safetensors"}
    both = Assembly((2, 700_000), (Extent("gate", 0, 700_000), Extent("up", 0, 700_000)))
    memory = tmp_path / "weights.json"
    own = WeightStore(tmp_path / "own")
    weights = manifest(
        ["both"], lambda _keys: iter(()), own, assembled={"both": both}, files=files, memory=memory
    )  # fmt: skip
    (spec,) = weights.specs
    store = WeightStore(tmp_path / "peer", beside=WeightsInFiles(memory).find)
    expected = ARRAYS["a"][::-1].tobytes() + ARRAYS["a"].tobytes()
    assert store.has(spec)
    assert bytes(store.read(spec).data) == expected
    assert store.pieces(spec.digest, 2, 2) == expected[2 * 2**20 : 4 * 2**20]
    os.utime(tmp_path / "1.safetensors", ns=(1, 1))
    assert not store.has(spec)
