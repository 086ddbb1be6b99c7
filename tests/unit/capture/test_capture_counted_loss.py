"""Answers of unequal lengths: the mean over microbatches is transformers' mean over labels, not a mean of means."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import capture
from fusionai.capture.checking.comparison import from_host, relative_difference
from fusionai.capture.checking.self_check import reference_module, self_check
from fusionai.capture.models.source import ConfigSource
from fusionai.capture.models.state import to_host
from fusionai.wire.messages import StageOptions

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def test_the_mean_over_microbatches_is_the_mean_over_labels() -> None:
    captured = capture(ConfigSource(CONFIG), task="counted_lm", batch=(1, 2), sequence=(1, 16))
    assert self_check(captured).ok
    program = TorchBackend("cpu").load(captured.graph, grad_inputs=(), options=StageOptions(seed=0, microbatches=2))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    model = reference_module(captured, 0)
    ids = torch.randint(0, 61, (2, 2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :, 2:] = -100  # two labels (the first token of a row is none)
    labels[1, 0, :3] = -100  # 9 and 11
    count = sum(int((labels[m, :, 1:] != -100).sum()) for m in range(2))
    assert count == 22
    losses, plain = [], []
    for m in range(2):
        shifted = torch.full_like(ids[m], -100)
        shifted[:, :-1] = labels[m][:, 1:]
        inputs = {
            "input_ids": ids[m],
            "position_ids": torch.arange(12).expand(2, 12).contiguous(),
            "labels": shifted,
            "labels_per_microbatch": torch.tensor(count / 2),
        }
        call = Call("train", step=0, microbatch=m)
        got = program.forward(call, {name: to_host(tensor) for name, tensor in inputs.items()})
        losses.append(from_host(got["loss"], torch.float32).item())
        program.backward(call, {"loss": to_host(torch.tensor(0.5))})
        loss = model(input_ids=ids[m], labels=labels[m], num_items_in_batch=count).loss
        loss.backward()
        plain.append(loss.item())
    assert sum(losses) / 2 == pytest.approx(sum(plain), rel=1e-6)
    means = [model(input_ids=ids[m], labels=labels[m]).loss.item() for m in range(2)]
    assert sum(losses) / 2 != pytest.approx(sum(means) / 2, rel=1e-3)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for key, gradient in program.export_gradients(list(expected)):
        wanted = expected[key]
        assert wanted is not None
        assert relative_difference(gradient, wanted) < 1e-5
