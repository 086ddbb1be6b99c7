"""What the weights of a model are: hashed once, found again, served from where they lie."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fusionai.primitives.errors import ModelError, StorageError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.storage import weight_manifest
from fusionai.storage.assembly import Assembly, Extent
from fusionai.storage.safetensors_file import write_safetensors
from fusionai.storage.weight_manifest import ModelWeights, manifest
from fusionai.storage.weight_store import WeightStore
from fusionai.wire.job import PIECE_BYTES, WeightSpec

MIB = 2**20


def tensor(*shape: int, seed: int = 0, dtype: str = "float32") -> HostTensor:
    content = np.random.Generator(np.random.Philox(seed)).bytes(int(np.prod(shape)) * ITEMSIZE_BYTES[dtype])
    return host_tensor(dtype, shape, content)


TENSORS = {
    "model.embed": tensor(1024, 700, seed=1, dtype="bfloat16"),
    "model.norm": tensor(16, seed=2),
    "model.nothing": tensor(0, 4),
}
MADE = {"rotary.inv_freq": tensor(32, seed=3), "stacked.experts": tensor(4, 8, seed=4)}


class Model:
    """A directory with a file of weights, and what else a capture gives."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.file = root / "model.safetensors"
        write_safetensors(self.file, TENSORS)
        self.asked: list[str] = []
        self.located = {"embed": (self.file, "model.embed"), "head": (self.file, "model.embed")} | {
            name.removeprefix("model."): (self.file, name) for name in TENSORS
        }

    def state(self, keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        for key in keys:
            self.asked.append(key)
            if key not in MADE:
                raise ModelError(f"the model has no state {key!r}.")
            yield key, MADE[key]

    def describe(self, keys: Iterable[str], store: WeightStore, memory: Path | None = None) -> ModelWeights:
        return manifest(keys, self.state, store, located=self.located, memory=memory)


def test_parts_of_several_tensors_are_described_as_one(tmp_path: Path) -> None:
    """As stacked experts are: in two files, cut across pieces, hashed once, read again by pieces."""
    gates = [tensor(700, 1024, seed=10 + number, dtype="bfloat16") for number in range(3)]
    files = {f"gate.{number}": tmp_path / f"{number % 2}.safetensors" for number in range(3)}
    for path in set(files.values()):
        write_safetensors(path, {name: gates[int(name[-1])] for name in files if files[name] == path})
    stacked = Assembly((3, 700, 1024), tuple(Extent(name, 0, 700 * 1024) for name in files))
    second_half = Assembly((350, 1024), (Extent("gate.1", 350 * 1024, 350 * 1024),))
    store, memory = WeightStore(tmp_path / "weights"), tmp_path / "memory.json"

    def nothing(keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        assert not list(keys)
        yield from ()

    def described(progress: Callable[[int, int], None] | None = None) -> ModelWeights:
        return manifest(
            ["gates", "half"], nothing, store, assembled={"gates": stacked, "half": second_half}, files=files,
            memory=memory, on_progress=progress,
        )  # fmt: skip

    weights = described()
    whole = b"".join(bytes(gate.data) for gate in gates)
    check(weights.specs[0], weights, host_tensor("bfloat16", (3, 700, 1024), whole))
    check(weights.specs[1], weights, host_tensor("bfloat16", (350, 1024), bytes(gates[1].data)[350 * 2048 :]))
    assert not any(path.stat().st_size for path in (tmp_path / "weights").iterdir()), "all of it is in the files"
    hashed: list[int] = []
    assert described(lambda done, _: hashed.append(done)).specs == weights.specs
    assert not hashed, "remembered"
    os.utime(tmp_path / "0.safetensors", ns=(1, 1))
    assert described(lambda done, _: hashed.append(done)).specs == weights.specs
    assert hashed[-1] == len(whole), "one of its files is another; what lies in the other alone is still known"


def test_parts_of_several_types_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": tensor(4), "b": tensor(4, dtype="bfloat16")})
    both = Assembly((8,), (Extent("a", 0, 4), Extent("b", 0, 4)))

    def state(keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        yield from ((key, tensor(8)) for key in keys)

    store = WeightStore(tmp_path / "weights")
    weights = manifest(["both"], state, store, assembled={"both": both}, files={"a": path, "b": path})
    check(weights.specs[0], weights, tensor(8))


def check(spec: WeightSpec, weights: ModelWeights, expected: HostTensor) -> None:
    data = bytes(expected.data)
    assert (spec.dtype, spec.shape) == (expected.dtype, expected.shape)
    assert spec.digest == hashlib.sha256(data).digest()
    cut = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    assert spec.pieces == tuple(hashlib.sha256(piece).digest() for piece in cut)
    assert weights.read(spec) == expected
    for first, piece in enumerate(cut):
        assert weights.pieces(spec.digest, first, 1) == piece
        assert weights.pieces(spec.digest, first, 64) == b"".join(cut[first:])
    assert weights.pieces(spec.digest, len(cut), 1) == b""


def test_keys_from_files_and_keys_that_are_made(tmp_path: Path) -> None:
    model, store = Model(tmp_path / "model"), WeightStore(tmp_path / "weights")
    keys = ("norm", "rotary.inv_freq", "head", "nothing", "embed", "stacked.experts", "norm")
    weights = model.describe(keys, store)
    assert tuple(spec.key for spec in weights.specs) == keys[:-1]
    expected = {"head": TENSORS["model.embed"], **MADE} | {
        name.removeprefix("model."): value for name, value in TENSORS.items()
    }
    for spec in weights.specs:
        check(spec, weights, expected[spec.key])
    assert sorted(model.asked) == sorted(MADE)
    # Only what is not in files takes room in the store, and is held there until the job is over.
    kept_bytes = sum(path.stat().st_size for path in (tmp_path / "weights").iterdir())
    assert kept_bytes == sum(value.nbytes for value in MADE.values())
    small = WeightStore(tmp_path / "small", 400)
    held = model.describe(["stacked.experts", "rotary.inv_freq"], small)
    with pytest.raises(StorageError, match="no room"):
        small.make_room(300)
    held.close()
    held.close()
    small.make_room(300)
    with pytest.raises(StorageError):
        held.read(held.specs[0])


def test_a_model_without_files(tmp_path: Path) -> None:
    model, store = Model(tmp_path / "model"), WeightStore(tmp_path / "weights")
    weights = manifest(MADE, model.state, store)
    for spec in weights.specs:
        check(spec, weights, MADE[spec.key])
    with pytest.raises(ModelError, match="no state 'lacking'"):
        manifest(["lacking"], model.state, store)
    with pytest.raises(StorageError, match="has no bytes for 1 of its tensors, such as lacking"):
        manifest(["lacking"], lambda _keys: iter(()), store)


def counted(patch: pytest.MonkeyPatch) -> list[str]:
    """Keys whose bytes are hashed from now on."""
    hashed: list[str] = []
    original = weight_manifest.make_spec

    def make_spec(key: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes]) -> WeightSpec:
        hashed.append(key)
        return original(key, dtype, shape, pieces)

    patch.setattr(weight_manifest, "make_spec", make_spec)
    return hashed


def test_a_second_start_hashes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, memory = (
        Model(tmp_path / "model"),
        WeightStore(tmp_path / "weights"),
        tmp_path / "home" / "known.json",
    )
    hashed = counted(monkeypatch)
    first = model.describe(["norm"], store, memory)
    assert hashed == ["model.norm"]
    second = model.describe(["embed", "norm"], store, memory)
    assert hashed == ["model.norm", "model.embed"]
    third = model.describe(["norm", "embed"], WeightStore(tmp_path / "other"), memory)
    assert hashed == ["model.norm", "model.embed"]
    assert third.specs == (second.specs[1], second.specs[0])
    assert first.specs == second.specs[1:]
    # Another file of the same name and size.
    stat = model.file.stat()
    os.utime(model.file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    model.describe(["norm"], store, memory)
    assert hashed == ["model.norm", "model.embed", "model.norm"]
    assert [path.name for path in memory.parent.iterdir() if path.name != ".lock"] == ["known.json"]


def spoil(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def spoilt(content: bytes) -> bytes:
        decoded = json.loads(content)
        change(decoded)
        return json.dumps(decoded).encode()

    return spoilt


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-10],
        lambda _content: b"",
        lambda _content: b"\xff\xfe",
        spoil(lambda decoded: decoded.update(version=2)),
        spoil(lambda decoded: decoded.update(more=1)),
        spoil(lambda decoded: decoded["files"][0]["tensors"]["model.norm"].__setitem__(4, [])),  # pyright: ignore
        spoil(lambda decoded: decoded["files"][0]["tensors"]["model.norm"].__setitem__(3, "AAAA")),  # pyright: ignore
    ],
    ids=["torn", "empty", "not text", "version", "unknown field", "no pieces", "short digest"],
)
def test_a_damaged_memory_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    model, store, memory = Model(tmp_path / "model"), WeightStore(tmp_path / "weights"), tmp_path / "known.json"
    first = model.describe(["norm"], store, memory)
    memory.write_bytes(damage(memory.read_bytes()))
    hashed = counted(monkeypatch)
    assert model.describe(["norm"], store, memory).specs == first.specs
    assert hashed == ["model.norm"]
    assert "is damaged and ignored" in caplog.text
    model.describe(["norm"], store, memory)
    assert hashed == ["model.norm"]


def test_a_memory_that_can_not_be_kept_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, store = Model(tmp_path / "model"), WeightStore(tmp_path / "weights")
    (tmp_path / "file").write_text("")
    assert model.describe(["norm"], store, tmp_path / "file" / "known.json").specs
    assert "can't be cached" in caplog.text


def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = Model(tmp_path / "model"), WeightStore(tmp_path / "weights")
    original = weight_manifest.make_spec

    def make_spec(*arguments: object) -> WeightSpec:
        os.utime(model.file, ns=(1, 1))
        return original(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(weight_manifest, "make_spec", make_spec)
    with pytest.raises(StorageError, match="was changed while it was read"):
        model.describe(["norm"], store, tmp_path / "known.json")
    assert not (tmp_path / "known.json").exists()


def test_a_file_that_got_shorter_later(tmp_path: Path) -> None:
    model, store = Model(tmp_path / "model"), WeightStore(tmp_path / "weights")
    weights = model.describe(["norm"], store)
    os.truncate(model.file, 100)
    for read in (lambda: weights.read(weights.specs[0]), lambda: weights.pieces(weights.specs[0].digest, 0, 1)):
        with pytest.raises(StorageError, match="is damaged: it ends within"):
            read()


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"big": tensor(64 * MIB, dtype="uint8")})
    tracemalloc.start()
    told: list[tuple[int, int]] = []
    manifest(
        ["big"],
        lambda _keys: iter(()),
        WeightStore(tmp_path / "weights"),
        located={"big": (path, "big")},
        on_progress=lambda *progress: told.append(progress),
    )
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 * MIB
    assert told == [(64 * MIB, 64 * MIB)]


def test_values_are_replaced_and_the_former_ones_are_let_go(tmp_path: Path) -> None:
    model, store = Model(tmp_path / "model"), WeightStore(tmp_path / "weights")
    weights = model.describe(["norm", *MADE], store)
    former = {spec.key: spec for spec in weights.specs}
    other = tensor(4, 8, seed=9)
    weights.replace([("stacked.experts", other)])
    assert [spec.key for spec in weights.specs] == ["norm", *MADE]
    found = {spec.key: spec for spec in weights.specs}
    assert found["stacked.experts"].digest != former["stacked.experts"].digest
    assert found["norm"] == former["norm"]
    check(found["stacked.experts"], weights, other)
    check(found["rotary.inv_freq"], weights, MADE["rotary.inv_freq"])
    weights.close()
