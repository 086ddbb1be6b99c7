"""Heads compute what transformers' own do, or the published formula, with the weights of their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fusionai.capture.capture import Captured
from fusionai.capture.heads import CapturedHead, eagle_head, featured, mtp_head
from fusionai.capture.models.eagle import EagleFiles, eagle_files
from fusionai.capture.models.source import DirectorySource
from fusionai.capture.served import capture_served
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import Segment, ServeOptions
from harness.head_models import (
    DEEPSEEK,
    GLM,
    MELLUM,
    VOCABULARY,
    loaded_head,
    save_eagle_head,
    save_model_with_head,
)
from harness.small_llama import SMALL_LLAMA

pytestmark = pytest.mark.slow
OPTIONS = ServeOptions(page_tokens=4, pages=8, sessions=2, pass_tokens=16, retain=False)
POSITIONS, WIDTH = 7, 16


def array(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def computed(head: CapturedHead, model: Captured, ids: torch.Tensor, states: torch.Tensor) -> Mapping[str, np.ndarray]:
    loaded = loaded_head(head, model, OPTIONS)
    if loaded.projection is not None:
        given = {"states": host_tensor("float32", tuple(states.shape), states.numpy().reshape(-1).data)}
        states = torch.from_numpy(array(loaded.projection.run((), given, wanted=["hidden"])["hidden"]).copy())
    inputs = {
        "input_ids": host_tensor("int64", (1, POSITIONS), ids.numpy().reshape(-1).data),
        "states": host_tensor("float32", tuple(states.shape), states.numpy().reshape(-1).data),
    }
    made = loaded.program.run([Segment(1, 0, POSITIONS, 0, (0, 1))], inputs, wanted=["logits", "hidden"])
    return {name: array(tensor) for name, tensor in made.items()}


def given(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (1, POSITIONS), generator=random)
    return ids, torch.randn((1, POSITIONS, size), generator=random)


@pytest.mark.parametrize("config", [GLM, DEEPSEEK, MELLUM], ids=lambda config: config["model_type"])
def test_heads_in_the_models_files_compute_what_transformers_does(config: dict[str, Any], tmp_path: Path) -> None:
    own: Any = save_model_with_head(config, tmp_path)
    model = capture_served(DirectorySource(tmp_path))
    head = mtp_head(model)
    assert head is not None
    assert head.part.shared == {"model.embed_tokens.weight", "lm_head.weight"}
    ids, states = given(WIDTH)
    made = computed(head, model, ids, states)
    with torch.no_grad():
        hidden = own.forward_layer(0, states, torch.arange(POSITIONS)[None], None, input_ids=ids)
        logits = own._project_to_logits(hidden)
    np.testing.assert_allclose(made["hidden"], hidden.numpy(), atol=1e-5)
    np.testing.assert_allclose(made["logits"], logits.numpy(), atol=1e-5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL_LLAMA)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain(llama: Path) -> Captured:
    return capture_served(DirectorySource(llama))


def eagle(directory: Path) -> EagleFiles:
    found = eagle_files(directory)
    assert found is not None
    return found


def test_an_eagle_head_computes_the_published_formula(llama: Path, plain: Captured, tmp_path: Path) -> None:
    save_eagle_head(tmp_path, WIDTH, 3 * WIDTH)
    files = eagle(tmp_path)
    model = featured(files, plain)
    head = eagle_head(files, model)
    ids, features = given(3 * WIDTH)
    made = computed(head, model, ids, features)
    embedding = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    logits, hidden = published(load_file(tmp_path / "model.safetensors"), embedding, ids[0], features[0])
    np.testing.assert_allclose(made["hidden"][0], hidden.numpy(), atol=1e-4)
    np.testing.assert_allclose(made["logits"][0], logits.numpy(), atol=1e-4)
    assert head.tokens is not None
    known = np.flatnonzero(load_file(tmp_path / "model.safetensors")["t2d"].numpy())
    assert head.tokens.tolist() == known.tolist()


def published(
    state: Mapping[str, torch.Tensor], embedding: torch.Tensor, ids: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer, written out."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * state[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(POSITIONS)[:, None] * 10_000.0 ** (-torch.arange(0, 4, 2) / 4)
        cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin

    layer = {name.removeprefix("midlayer."): one for name, one in state.items()}
    x = features @ state["fc.weight"].T
    joined = torch.cat((norm(embedding[ids], "midlayer.input_layernorm"), norm(x, "midlayer.hidden_norm")), -1)
    q, k, v = ((joined @ layer[f"self_attn.{name}_proj.weight"].T).view(POSITIONS, -1, 4) for name in "qkv")
    q, k = turned(q), turned(k).repeat_interleave(2, 1)
    attended = F.scaled_dot_product_attention(
        *(one.transpose(0, 1) for one in (q, k, v.repeat_interleave(2, 1))), is_causal=True
    )
    x = x + attended.transpose(0, 1).reshape(POSITIONS, -1) @ layer["self_attn.o_proj.weight"].T
    y = norm(x, "midlayer.post_attention_layernorm")
    gated = F.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
    hidden = x + gated @ layer["mlp.down_proj.weight"].T
    return norm(hidden, "norm") @ state["lm_head.weight"].T, hidden


def test_the_features_are_what_enters_the_layers(llama: Path, plain: Captured, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from fusionai.backends.torch.backend import TorchBackend
    from fusionai.ir.serving import serving_graph

    save_eagle_head(tmp_path, WIDTH, 3 * WIDTH)
    model = featured(eagle(tmp_path), plain)
    graph = serving_graph(model.graph)
    program = TorchBackend(device="cpu", threads=1).serve(graph, options=OPTIONS)
    program.import_weights(model.state({spec.key for spec in graph.params.values()}))
    ids, _ = given(1)
    inputs = {"input_ids": host_tensor("int64", (1, POSITIONS), ids.numpy().reshape(-1).data)}
    made = array(program.run([Segment(1, 0, POSITIONS, 0, (0, 1))], inputs, wanted=["features", "logits"])["features"])
    with torch.no_grad():
        states = AutoModelForCausalLM.from_pretrained(llama)(ids, output_hidden_states=True).hidden_states
    np.testing.assert_allclose(made, torch.cat(states[:3], -1).numpy(), atol=1e-4)


def changed(directory: Path, name: str, value: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    state = load_file(path)
    if value is None:
        del state[name]
    else:
        state[name] = value
    save_file(state, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("midlayer.mlp.up_proj.weight", None, "lacks 'midlayer.mlp.up_proj.weight', expected with the shape [24, 16]"),
        ("norm.weight", torch.ones(5), "'norm.weight' .* has the shape [5], expected [16]"),
        ("d2t", None, "lacks 'd2t', expected with the shape [40]"),
        ("d2t", torch.zeros(3, dtype=torch.int64), "'d2t' .* has the shape [3], expected [40]"),
        ("d2t", torch.full((40,), 99), "'d2t' .* does not name 40 different tokens below 61"),
        ("fc.weight", torch.ones(16, 30), "'fc.weight' .* has the shape [16, 30], expected [16, 48]"),
    ],
)
def test_an_eagle_head_that_does_not_fit_is_refused(
    plain: Captured, tmp_path: Path, name: str, value: torch.Tensor | None, said: str
) -> None:
    save_eagle_head(tmp_path, WIDTH, 3 * WIDTH)
    changed(tmp_path, name, value)
    files = eagle(tmp_path)
    with pytest.raises(ModelError, match=said.replace("[", r"\[").replace("]", r"\]")):
        eagle_head(files, featured(files, plain))


def test_other_directories_hold_no_eagle_head(llama: Path, tmp_path: Path) -> None:
    assert eagle_files(llama) is None
    save_eagle_head(tmp_path, WIDTH, 3 * WIDTH)
    changed(tmp_path, "midlayer.hidden_norm.weight", None)
    changed(tmp_path, "fc.weight", torch.ones(16, 32))
    with pytest.raises(ModelError, match="a head of EAGLE-1 or EAGLE-2"):
        eagle_files(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickles"):
        eagle_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.3.hnorm.weight", None, "lack 1 of the model's parameters, first 'layers.0.hnorm.weight'"),
        ("model.layers.3.eh_proj.weight", torch.ones(16, 30), "has the shape [16, 30], the model expects [16, 32]"),
    ],
)
def test_a_head_in_the_models_files_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, value: torch.Tensor | None, said: str
) -> None:
    save_model_with_head(GLM, tmp_path)
    changed(tmp_path, name, value)
    model = capture_served(DirectorySource(tmp_path))
    with pytest.raises(ModelError, match=said.replace("[", r"\[").replace("]", r"\]")):
        mtp_head(model)


def test_models_without_a_head_have_none(plain: Captured) -> None:
    assert mtp_head(plain) is None
