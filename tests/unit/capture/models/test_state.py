"""The bytes a capture owes: from the module, from its checkpoint, or made again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import from_host
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models import state
from fusionai.capture.models.source import ConfigSource, DirectorySource, FactorySource
from fusionai.capture.models.state import to_host
from fusionai.primitives.errors import ModelError

pytestmark = pytest.mark.slow
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 23, "pad_token_id": 0}
LLAMA |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model, saved by transformers itself."""
    import transformers

    path = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(5)
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pretrained(saved: Path) -> Captured:
    return capture(DirectorySource(saved), sequence=(1, 16))


def test_pretrained_weights_come_from_the_file(saved: Path, pretrained: Captured) -> None:
    stored = load_file(saved / "model.safetensors")
    parameters = [spec for spec in pretrained.graph.params.values() if spec.kind == "parameter"]
    assert all(spec.init is None for spec in parameters)
    assert {spec.key for spec in parameters} <= set(pretrained.owed)
    streamed = dict(pretrained.state([spec.key for spec in parameters]))
    assert set(streamed) == {spec.key for spec in parameters}
    for spec in parameters:
        assert torch.equal(from_host(streamed[spec.key], torch.float32), stored[spec.key])
    assert self_check(pretrained).forward_diff == 0.0


def test_weights_are_read_one_at_a_time(pretrained: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = state.read_tensor
    monkeypatch.setattr(
        state, "read_tensor", lambda path, name, *rest: read.append(name) or original(path, name, *rest)
    )
    key, _ = next(pretrained.state(["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]))
    assert read == [key]


def test_weights_of_another_model_are_refused(saved: Path, tmp_path: Path) -> None:
    stored = load_file(saved / "model.safetensors")
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    lacking = {key: value for key, value in stored.items() if key != "model.norm.weight"}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack 1 of the model's parameters, first 'model\.norm\.weight'"):
        capture(DirectorySource(tmp_path), sequence=(1, 16))
    save_file(lacking | {"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"shape \[3\], the model expects \[16\]"):
        capture(DirectorySource(tmp_path), sequence=(1, 16))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="can't be read"):
        capture(DirectorySource(tmp_path), sequence=(1, 16))


def test_a_new_model_owes_only_what_has_no_program() -> None:
    captured = capture(ConfigSource(LLAMA), sequence=(1, 16))
    assert captured.owed == ("model.rotary_emb.inv_freq",)
    assert captured.config is not None
    assert captured.config["hidden_size"] == 16
    with pytest.raises(ModelError, match=r"no state 'model\.norm\.wieght'"):
        next(captured.state(["model.norm.wieght"]))


def test_parameters_without_a_program_do_not_depend_on_what_is_asked() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.orthogonal_(self.a.weight)
            nn.init.orthogonal_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    captured = capture(FactorySource(Net), task="none", example_inputs={"x": torch.randn(2, 4)}, seed=9)
    assert set(captured.owed) == {"a.weight", "b.weight"}
    together = {key: bytes(tensor.data) for key, tensor in captured.state(captured.owed)}
    alone = {key: bytes(tensor.data) for name in captured.owed for key, tensor in captured.state([name])}
    assert together == alone
    assert together["a.weight"] != together["b.weight"]
    assert self_check(captured).forward_diff == 0.0


@pytest.mark.parametrize(
    ("norm", "copied"),
    [
        (nn.utils.weight_norm, False),
        (nn.utils.parametrizations.weight_norm, False),
        (nn.utils.parametrizations.weight_norm, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_lengths_and_directions_come_from_one_draw_whatever_their_size(
    norm: Callable[[nn.Module], nn.Module], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def net() -> nn.Module:
        first = norm(nn.Linear(6, 6))
        second = copy.deepcopy(first) if copied else norm(nn.Linear(6, 6))
        return nn.Sequential(first, second, nn.Linear(6, 6))

    monkeypatch.setattr(state, "GROUP_BYTES", 100)  # less than a direction
    captured = capture(FactorySource(net), task="none", example_inputs={"input": torch.randn(2, 6)}, seed=9)
    assert not [key for key in captured.owed if key.startswith("2.")]
    made = {key: from_host(tensor, torch.float32) for key, tensor in captured.state(captured.owed)}
    lengths, directions = ([value for value in made.values() if value.shape[1] == width] for width in (1, 6))
    assert (len(lengths), len(directions)) == (2, 2)
    for length, direction in zip(lengths, directions, strict=True):
        assert torch.equal(length, torch.norm_except_dim(direction, 2, 0))
    assert torch.equal(*directions) is copied
    assert self_check(captured).forward_diff == 0.0


class WithSpares(nn.Module):
    """Most of its tensors affect no output."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.tied = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.tied.weight = self.spare.weight
        self.drawn = nn.Parameter(torch.randn(3).sin())
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_tensors_that_affect_no_output_have_their_initial_values() -> None:
    captured = capture(FactorySource(WithSpares), task="none", example_inputs={"x": torch.randn(2, 4)}, seed=9)
    assert captured.unread() == ("drawn", "table", "spare.weight", "spare.bias", "tied.bias")
    made = dict(captured.source.initial(captured.unread(), seed=9))
    again = dict(captured.source.initial(captured.unread()[::-1], seed=9))
    assert {key: bytes(tensor.data) for key, tensor in made.items()} == {
        key: bytes(tensor.data) for key, tensor in again.items()
    }
    assert from_host(made["table"], torch.int64).tolist() == [0, 1, 2, 3, 4]
    bound = from_host(made["spare.weight"], torch.float32).abs().max()
    assert 0 < bound <= 0.5, "the values of nn.Linear's own rule"
    other = dict(captured.source.initial(["spare.weight"], seed=8))
    assert other["spare.weight"].data != made["spare.weight"].data
    # Beside what the graph reads, these are all that a plain module expects.
    read = {spec.key for spec in captured.graph.params.values()}
    assert {*read, *made, "tied.weight"} == set(WithSpares().state_dict())


def test_initial_values_of_a_pretrained_model_are_those_of_its_files(saved: Path, pretrained: Captured) -> None:
    (value,) = dict(pretrained.source.initial(["model.norm.weight"], seed=0)).values()
    stored = load_file(saved / "model.safetensors")["model.norm.weight"]
    assert torch.equal(from_host(value, torch.float32), stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_bytes_are_the_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    host = to_host(tensor)
    assert (host.dtype, host.shape) == (str(dtype).removeprefix("torch."), shape)
    assert torch.equal(from_host(host, dtype), tensor)
