from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.storage.assembly import Assembly, Extent
from fusionai.storage.atomic import write_atomic
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointReader, CheckpointWriter
from fusionai.storage.reader import complete_checkpoints, latest, open_latest, prune, step_directory, sweep
from fusionai.storage.safetensors_file import SafetensorsFile, write_safetensors
from harness.examples import examples
from harness.model_files import model_tensors

HEADER = CheckpointHeader(
    graph_hash="g" * 64,
    data_fingerprint="d",
    recipe={"job": {"name": "t"}},
    aliases={"head.weight": "embed.weight"},
    private_keys=frozenset({"rotary.frequencies"}),
)
FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}


def tensor(*shape: int, seed: int = 0, dtype: str = "float32") -> HostTensor:
    content = np.random.Generator(np.random.Philox(seed)).bytes(int(np.prod(shape)) * ITEMSIZE_BYTES[dtype])
    return host_tensor(dtype, shape, content)


def state() -> dict[str, HostTensor]:
    """Two stages' worth of entries."""
    entries: dict[str, HostTensor] = {"model/rotary.frequencies": tensor(4, seed=99)}
    for number, key in enumerate(("embed.weight", "layers.0.w", "layers.1.w", "norm.weight")):
        entries[f"model/{key}"] = tensor(8, 16, seed=number)
        entries[f"optimizer/{key}/exp_avg"] = tensor(8, 16, seed=10 + number)
        entries[f"optimizer/{key}/step"] = tensor(seed=20 + number)
    return entries


def write(root: Path, step: int, entries: dict[str, HostTensor] | None = None, shard_bytes: int = 10**9) -> Path:
    entries = state() if entries is None else entries
    with CheckpointWriter(root, step, HEADER, files=FILES, shard_bytes=shard_bytes) as writer:
        for name, value in entries.items():
            writer.add(name, value)
        return writer.finish(expected=entries)


def same(left: HostTensor, right: HostTensor) -> bool:
    return (left.dtype, left.shape, bytes(left.data)) == (right.dtype, right.shape, bytes(right.data))


@pytest.mark.parametrize("shard_bytes", [10**9, 1200, 1])
def test_what_goes_in_comes_out(tmp_path: Path, shard_bytes: int) -> None:
    place = write(tmp_path, 12, shard_bytes=shard_bytes)
    assert place == tmp_path / "step-00000012"
    assert [path.name for path in tmp_path.iterdir()] == [place.name]
    reader = CheckpointReader(place)
    reader.verify()
    entries = state()
    assert reader.names == tuple(sorted(entries))
    assert reader.step == 12
    assert all(same(reader.read(name), value) for name, value in entries.items())
    assert (reader.manifest.graph_hash, reader.manifest.recipe, reader.manifest.aliases) == (
        HEADER.graph_hash,
        HEADER.recipe,
        HEADER.aliases,
    )
    with pytest.raises(StorageError, match="no entry 'model/none'"):
        reader.read("model/none")


def test_the_root_is_a_hugging_face_directory(tmp_path: Path) -> None:
    single, sharded = write(tmp_path, 1), write(tmp_path, 2, shard_bytes=1200)
    names = {path.name for path in single.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", "fusion"}
    assert (single / "config.json").read_bytes() == FILES["config.json"]
    keys = ("embed.weight", "layers.0.w", "layers.1.w", "norm.weight")
    for place in (single, sharded):
        model = model_tensors(place)
        assert tuple(model) == keys, "neither aliases nor private keys"
        assert all(same(model[key], state()[f"model/{key}"]) for key in keys)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert index["metadata"]["total_size"] == 4 * 8 * 16 * 4
    assert not (sharded / "model.safetensors").exists()


def test_shards_bound_what_is_held(tmp_path: Path) -> None:
    entries = {f"model/w{number}": tensor(100, seed=number) for number in range(9)} | {"model/big": tensor(700)}
    place = write(tmp_path, 1, entries, shard_bytes=1000)
    sizes = {path.name: [t.nbytes for _, t in SafetensorsFile(path)] for path in place.glob("model-*")}
    assert len(sizes) == 6
    assert all(sum(held) <= 1000 or len(held) == 1 for held in sizes.values())


def test_the_writer_keeps_its_own_copy(tmp_path: Path) -> None:
    buffer = bytearray(b"\x01" * 16)
    with CheckpointWriter(tmp_path, 1, HEADER, files={}) as writer:
        writer.add("model/w", host_tensor("float32", (4,), buffer))
        buffer[:] = bytes(16)
        place = writer.finish()
    assert bytes(CheckpointReader(place).read("model/w").data) == b"\x01" * 16


LAID_OUT = msgspec.structs.replace(
    HEADER,
    layout={
        "layers.0.experts.0.w": Assembly((4, 16), (Extent("layers.0.w", 0, 64),)),
        "layers.0.experts.1.w": Assembly((4, 16), (Extent("layers.0.w", 64, 64),)),
        "joined.w": Assembly((16, 16), (Extent("layers.1.w", 0, 128), Extent("norm.weight", 0, 128))),
        "first.weight": Assembly((8, 16), (Extent("embed.weight", 0, 128),)),
        "never.w": Assembly((2,), (Extent("one.w", 0, 1), Extent("other.w", 0, 1))),
    },
)


@pytest.mark.parametrize("shard_bytes", [10**9, 300])
def test_a_layout_names_and_cuts_what_the_files_hold(tmp_path: Path, shard_bytes: int) -> None:
    """Split, joined, renamed; what waits for a key that never comes keeps its own name. The state comes back."""
    entries = state() | {"model/one.w": tensor(1, seed=5)}
    with CheckpointWriter(tmp_path, 3, LAID_OUT, files=FILES, shard_bytes=shard_bytes) as writer:
        for name, value in entries.items():
            writer.add(name, value)
            assert same(writer.value(name), value)
            writer.add(name, value)
        with pytest.raises(StorageError, match=r"different values of model/norm\.weight"):
            writer.add("model/norm.weight", tensor(8, 16, seed=77))
        place = writer.finish(expected=entries)
    model = model_tensors(place)
    experts = ("layers.0.experts.0.w", "layers.0.experts.1.w")
    assert tuple(model) == ("first.weight", "joined.w", *experts, "one.w")
    fused = entries["model/layers.0.w"]
    assert [bytes(model[name].data) for name in experts] == [bytes(fused.data[:256]), bytes(fused.data[256:])]
    reader = CheckpointReader(place)
    reader.verify()
    assert reader.names == tuple(sorted(entries))
    assert all(same(reader.read(name), value) for name, value in entries.items())


@pytest.mark.parametrize("shard_bytes", [10**9, 1])
def test_tied_parameters_come_twice_and_must_be_equal(tmp_path: Path, shard_bytes: int) -> None:
    with CheckpointWriter(tmp_path, 1, HEADER, files={}, shard_bytes=shard_bytes) as writer:
        writer.add("model/w", tensor(4, seed=1))
        writer.add("model/other", tensor(4, seed=2))
        writer.add("model/w", tensor(4, seed=1))
        with pytest.raises(StorageError, match="two stages hold different values of model/w"):
            writer.add("model/w", tensor(4, seed=3))
        with pytest.raises(StorageError, match="different values"):
            writer.add("model/w", tensor(2, 2, seed=1))
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_or_wrong_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    entries = state()
    with CheckpointWriter(tmp_path, 3, HEADER, files=FILES) as writer:
        for name, value in entries.items():
            writer.add(name, value)
        with pytest.raises(StorageError, match=r"step 3: 2 entries are missing, such as model/absent, optimizer/x"):
            writer.finish(expected=[*entries, "model/absent", "optimizer/x/step"])
        with pytest.raises(StorageError, match="expected an entry model/"):
            writer.add("gradients/w", tensor(1))
    for name in ("../x", "model.safetensors"):
        with pytest.raises(ValueError, match="can't stand beside"):
            CheckpointWriter(tmp_path, 3, HEADER, files={name: b""})
    assert list(tmp_path.iterdir()) == []


class Disk:
    """A disk that is full after so many writes and fsyncs (Python's own file objects can't be patched otherwise)."""

    def __init__(self, patch: pytest.MonkeyPatch, operations: int) -> None:
        self.left = operations
        self._sync, self._open = os.fsync, Path.open
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(Path, "open", lambda path, *args, **kwargs: self.open(path, *args, **kwargs))

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")

    def fsync(self, descriptor: int) -> None:
        self.spend()
        self._sync(descriptor)

    def open(self, path: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        if mode != "rb" and mode != "r":
            self.spend()
        return self._open(path, mode, *args, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]


def refusal(root: Path, step: int) -> str:
    """What writing a checkpoint expected, empty when it went well."""
    try:
        write(root, step, shard_bytes=1200)
    except StorageError as problem:
        return str(problem)
    return ""


def test_a_full_disk_at_any_point_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = write(tmp_path, 1)
    for operations in range(40):
        with monkeypatch.context() as patch:
            Disk(patch, operations)
            expected = refusal(tmp_path, 2)
        assert not list(tmp_path.glob("*.partial"))
        CheckpointReader(previous).verify()
        newest = open_latest(tmp_path)
        assert newest is not None
        if newest.step == 2:
            # Complete; at most the last sync, of the name itself, was refused.
            assert all(same(newest.read(name), value) for name, value in state().items())
            assert operations > 10
            break
        assert "no space left on the disk" in expected
    else:
        pytest.fail("the checkpoint was never written")


def test_a_kill_leaves_a_partial_that_the_next_start_removes(tmp_path: Path) -> None:
    write(tmp_path, 1)
    pid = os.fork()
    if pid == 0:
        writer = CheckpointWriter(tmp_path, 2, HEADER, files=FILES, shard_bytes=600)
        for name, value in state().items():
            writer.add(name, value)
        os._exit(0)
    os.waitpid(pid, 0)
    partial = tmp_path / "step-00000002.partial"
    assert partial.is_dir()
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert sweep(tmp_path) == (partial,)
    assert not partial.exists()
    write(tmp_path, 2)
    assert latest(tmp_path) == tmp_path / "step-00000002"
    assert sweep(tmp_path / "nowhere") == ()


def test_writing_a_step_again_keeps_the_first_unless_it_is_damaged(tmp_path: Path) -> None:
    place = write(tmp_path, 5)
    before = (place / "fusion" / "manifest.json").stat().st_ino
    assert write(tmp_path, 5) == place
    assert (place / "fusion" / "manifest.json").stat().st_ino == before
    (place / "model.safetensors").write_bytes(b"broken")
    assert write(tmp_path, 5) == place
    CheckpointReader(place).verify()
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


def files_of(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def test_every_file_is_checked_and_named(tmp_path: Path) -> None:
    older, place = write(tmp_path, 1), write(tmp_path, 2)
    for path in files_of(place):
        content = path.read_bytes()
        for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            if damaged == content[:-1] and path.name == "manifest.sha256":
                continue  # only its line end is gone
            with pytest.raises(StorageError) as caught:
                open_latest(tmp_path)
            named = path if path.name != "manifest.sha256" or damaged is None else path.with_name("manifest.json")
            assert str(named) in str(caught.value)
            found = open_latest(tmp_path, fall_back=True)
            assert found is not None
            assert found.directory == older
        path.write_bytes(content)
    newest = open_latest(tmp_path)
    assert newest is not None
    assert newest.directory == place


def test_when_every_checkpoint_is_damaged_the_newest_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / "config.json").write_text("x")
    with pytest.raises(StorageError, match=r"step-00000002/config\.json is damaged: expected 23 bytes, got 1\."):
        open_latest(tmp_path, fall_back=True)
    assert open_latest(tmp_path / "empty") is None


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    import hashlib

    place = write(tmp_path, 1)
    path = place / "fusion" / "manifest.json"
    for name in ("/etc/passwd", "../../x"):
        manifest = json.loads(path.read_text())
        manifest["files"][name] = {"sha256": "", "size_bytes": 0}
        path.write_text(json.dumps(manifest))
        path.with_name("manifest.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
        with pytest.raises(StorageError, match="which is outside the checkpoint"):
            CheckpointReader(place).verify()


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (3, 1, 20, 100_000_000):
        write(tmp_path, step, {"model/w": tensor(2)})
    (tmp_path / "notes").mkdir()
    assert prune(tmp_path, 2) == (step_directory(tmp_path, 3), step_directory(tmp_path, 1))
    assert complete_checkpoints(tmp_path) == (step_directory(tmp_path, 100_000_000), step_directory(tmp_path, 20))
    assert (tmp_path / "notes").is_dir()
    with pytest.raises(ValueError, match="at least one"):
        prune(tmp_path, 0)


def test_pruning_keeps_the_newest_that_others_may_begin_with(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        step_directory(tmp_path, step).mkdir()
    assert prune(tmp_path, 2, since=29) == (step_directory(tmp_path, 30), step_directory(tmp_path, 10))
    assert prune(tmp_path, 2, since=5) == (step_directory(tmp_path, 20),)
    assert prune(tmp_path, 1, since=60) == (step_directory(tmp_path, 40),)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, HostTensor]:
    names = draw(
        st.lists(st.text(min_size=1, max_size=20).filter(lambda n: n != "__metadata__"), max_size=6, unique=True)
    )
    return {
        name: tensor(
            *draw(st.lists(st.integers(0, 4), max_size=4)),
            seed=number,
            dtype=draw(st.sampled_from(sorted(ITEMSIZE_BYTES))),
        )
        for number, name in enumerate(names)
    }


@given(content=tensors())
@settings(max_examples=examples(40), deadline=None)
def test_safetensors_round_trip_and_the_reference_reads_it(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, HostTensor]
) -> None:
    from safetensors import safe_open

    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    written = write_safetensors(path, content)
    assert path.stat().st_size == written.size_bytes
    read = dict(SafetensorsFile(path))
    assert read.keys() == content.keys()
    assert all(same(read[name], value) for name, value in content.items())
    with safe_open(path, framework="numpy") as reference:
        assert set(reference.keys()) == set(content)
        for name, value in content.items():
            assert reference.get_slice(name).get_shape() == list(value.shape)
            if value.dtype != "bfloat16":
                assert reference.get_tensor(name).tobytes() == bytes(value.data)


def hostile() -> Iterator[tuple[bytes, str]]:
    def file(header: object, data: bytes = b"\0" * 8) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    def one(**change: object) -> bytes:
        return file({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}})

    yield b"", "does not fit"
    yield b"\xff" * 8, "does not fit"
    yield (10**15).to_bytes(8, "little") + b"{}", "does not fit"
    yield file([]), "can't be decoded"
    yield one(shape=[2**62, 2**62]), "offsets that do not match"
    yield one(shape=[-2]), "can't be decoded"
    yield one(shape=[1] * 17), "can't be decoded"
    yield one(dtype="F4"), "unsupported type"
    yield one(data_offsets=[0, 16], shape=[4]), "take 16 bytes, but 8 bytes follow"
    yield one(data_offsets=[8, 0]), "offsets that do not match"
    yield one(more=1), "can't be decoded"
    yield file({}), "take 0 bytes, but 8 bytes follow"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    yield file({"a": entry, "b": entry}), "offsets that do not match"


@pytest.mark.parametrize(("content", "message"), list(hostile()))
def test_hostile_weights_are_refused_before_anything_is_allocated(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=message):
        SafetensorsFile(path)


def test_atomic_writing_keeps_the_old_file_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "file"
    write_atomic(path, b"old")
    for operations in range(2):
        with monkeypatch.context() as patch:
            Disk(patch, operations)
            with pytest.raises(StorageError, match="no space left on the disk"):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
        assert [child.name for child in path.parent.iterdir()] == ["file"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    with pytest.raises(StorageError, match="can't be written: "):
        write_atomic(path / "below", b"")


@pytest.mark.slow
def test_transformers_loads_a_checkpoint_with_the_same_weights_and_loss(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(20).reshape(2, 10)
    loss = model(input_ids=ids, labels=ids).loss.item()
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        model = model.to(dtype)
        for shard_bytes in (10**9, 10_000):
            root = tmp_path / f"{name}-{shard_bytes}"
            config.dtype = name
            saved = {"config.json": config.to_json_string().encode()}
            with CheckpointWriter(root, 1, CheckpointHeader(graph_hash=""), files=saved, shard_bytes=shard_bytes) as w:
                for key, value in model.named_parameters():
                    raw = value.detach().contiguous().view(torch.uint8).numpy()
                    w.add(f"model/{key}", host_tensor(name, tuple(value.shape), raw.data))
                place = w.finish()
            loaded = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()
            ours, theirs = model.state_dict(), loaded.state_dict()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
            if dtype == torch.float32:
                assert loaded(input_ids=ids, labels=ids).loss.item() == loss
