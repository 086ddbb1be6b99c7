"""A captured model, cut and trained stage by stage, equals transformers in one process bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from fusionai.backends.interface import Call, StageProgram
from fusionai.backends.torch import reference
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import DirectorySource
from fusionai.execution.training.boundary import boundaries
from fusionai.execution.training.work import StagePass
from fusionai.ir.partition import cut_blocks
from fusionai.primitives.errors import DataError, ModelError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import OptimizerSpec, StageOptions
from harness.cut_training import run_microbatch, sum_shared
from harness.patience import CEILING_S

pytestmark = pytest.mark.slow

STEPS, MICROBATCHES, BATCH, LENGTH, VOCABULARY = 4, 3, 2, 17, 128
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2_TIED = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def host(array: np.ndarray) -> HostTensor:
    return host_tensor(str(array.dtype), array.shape, bytearray(array.tobytes()))


def array_of(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def checkpoint(path: Path, fields: dict[str, object]) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Larger than the default, so that the layers matter and gradients are clipped.
                parameter.normal_(0.0, 0.15)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    return path


def token_steps(seed: int = 0) -> list[list[reference.Microbatch]]:
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, (STEPS, MICROBATCHES, BATCH, LENGTH))
    return [[(ids, ids.copy()) for ids in step] for step in drawn]


class Chain:
    """A graph cut into stages, all in this process, driven as a pool drives them."""

    def __init__(self, captured: Captured, stages: int, spec: reference.ReferenceSpec, *, lag: int = 0) -> None:
        graph = captured.graph
        blocks = 1 + max(node.block for node in graph.nodes)
        bounds = [round(i * blocks / stages) for i in range(stages + 1)]
        self.partition = cut_blocks(graph, list(pairwise(bounds)))
        self.backend = TorchBackend("cpu", threads=1)
        self.spec = spec
        self.lag = lag
        self.order = {param.key: param.order for param in graph.params.values() if param.trainable}
        options = StageOptions(
            optimizer=spec.optimizer,
            precision=spec.precision,
            microbatches=MICROBATCHES,
            in_flight=MICROBATCHES,
            weight_lag=lag,
        )
        self.passes: list[StagePass] = []
        for stage, boundary in zip(self.partition.stages, boundaries(self.partition), strict=True):
            program = self.backend.load(
                stage.graph, grad_inputs=boundary.grad_inputs, options=options, memory_limit_bytes=1 << 30
            )
            keys = sorted({param.key for param in stage.graph.params.values()})
            program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(keys))
            self.passes.append(StagePass(program, boundary, options))

    @property
    def programs(self) -> list[StageProgram]:
        return [one.program for one in self.passes]

    def step(self, number: int, microbatches: list[reference.Microbatch]) -> tuple[float, float]:
        """(mean loss, total gradient norm)."""
        losses = []
        for microbatch, (input_ids, labels) in enumerate(microbatches):
            losses.append(run_microbatch(self.passes, Call("train", number, microbatch), _fed(input_ids, labels)))
            if self.lag:
                self._weights(number, microbatch - self.lag)
        for late in range(len(microbatches) - self.lag, len(microbatches) if self.lag else 0):
            self._weights(number, late)
        sum_shared(self.passes)
        for parameter in self.partition.shared:
            home, *others = parameter.stages
            total = list(self.programs[home].export_gradients([parameter.key]))
            for stage in others:
                self.programs[stage].import_gradients(total, add=False)
        norms: dict[str, float] = {}
        for program in self.programs:
            norms.update(program.gradient_norms())
        assert self.spec.max_norm is not None
        ordered = [norms[key] for key in sorted(norms, key=self.order.__getitem__)]
        total_norm, scale = self.backend.clip_scale(ordered, self.spec.max_norm)
        for program in self.programs:
            program.apply(scale=scale, learning_rate=self.spec.learning_rate)
        return sum(losses) / len(losses), total_norm

    def _weights(self, number: int, microbatch: int) -> None:
        for program in self.programs:
            if microbatch >= 0:
                program.weight_gradients(Call("train", number, microbatch))


def _fed(input_ids: np.ndarray, labels: np.ndarray) -> dict[str, HostTensor]:
    shifted = np.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    positions = np.tile(np.arange(input_ids.shape[1]), (input_ids.shape[0], 1))
    return {"input_ids": host(input_ids), "labels": host(shifted), "position_ids": host(positions)}


@pytest.mark.parametrize(
    ("fields", "precision", "lag"),
    [
        (LLAMA, "fp32", 0),
        pytest.param(LLAMA, "fp32", 2, marks=pytest.mark.long),
        pytest.param(LLAMA, "bf16", 0, marks=pytest.mark.long),
        (LLAMA, "bf16", 1),
        (GPT2_TIED, "fp32", 0),
    ],
    ids=["llama", "llama zero bubble", "bf16", "bf16 zero bubble", "gpt2 tied"],
)
def test_four_stages_train_as_one_process(tmp_path: Path, fields: dict[str, object], precision: str, lag: int) -> None:
    path = checkpoint(tmp_path / "model", fields)
    spec = reference.ReferenceSpec(
        optimizer=OptimizerSpec(weight_decay=0.1), learning_rate=3e-3, max_norm=1.0, precision=precision
    )
    steps = token_steps()
    expected = reference.run_reference(path, steps, spec, save_to=tmp_path / "trained")
    captured = capture(DirectorySource(path), batch=(1, BATCH), sequence=(1, LENGTH))
    chain = Chain(captured, 4, spec, lag=lag)
    assert [program.resident_bytes > 0 for program in chain.programs] == [True] * 4
    results = [chain.step(number, microbatches) for number, microbatches in enumerate(steps)]
    assert [loss for loss, _ in results] == list(expected.losses)
    assert [norm for _, norm in results] == list(expected.total_norms)
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    compared = 0
    for program in chain.programs:
        for name, tensor in program.export_state(["model"]):
            if (key := name.removeprefix("model/")) in trained:
                np.testing.assert_array_equal(array_of(tensor), trained[key])
                compared += 1
    assert compared >= len(trained)


def test_the_reference_runs_as_a_process_of_its_own(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", LLAMA)
    steps = token_steps()
    stacked = np.stack([np.stack([ids for ids, _ in step]) for step in steps])
    save_file({"input_ids": stacked, "labels": stacked.copy()}, tmp_path / "batches.safetensors")
    spec = reference.ReferenceSpec(learning_rate=1e-3, schedule="cosine", warmup_steps=1)

    def ask(**fields: object) -> dict[str, object]:
        job = reference.ReferenceJob(
            checkpoint=str(path),
            result=str(tmp_path / "result.json"),
            batches=str(tmp_path / "batches.safetensors"),
            spec=spec,
            **fields,  # type: ignore[arg-type]
        )
        (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
        command = [sys.executable, "-m", "fusionai.backends.torch.reference", str(tmp_path / "job.json")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=CEILING_S)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "result.json").read_bytes())

    trained = ask(task="train", save_to=str(tmp_path / "trained"))
    expected = reference.run_reference(path, steps, spec)
    assert trained["losses"] == list(expected.losses)
    assert trained["learning_rates"] == list(expected.learning_rates)
    assert expected.learning_rates[0] == 0.0 < expected.learning_rates[1]
    assert trained["tokens_per_s"] > 0
    before = reference.evaluate(path, steps)
    assert before == pytest.approx(np.mean([reference.evaluate(path, [step]) for step in steps]))
    assert reference.evaluate(tmp_path / "trained", steps) != before
    tokens = reference.generate(path, (1, 2, 3), 6)
    assert len(tokens) == 6
    assert reference.generate(path, (1, 2, 3, *tokens[:2]), 4) == tokens[2:]


def test_a_job_file_that_says_nonsense_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.json"
    job.write_text('{"task": "train", "checkpoint": "x", "result": "y", "threds": 2}')
    assert reference.main([str(job)]) == 2
    assert "threds" in capsys.readouterr().err
    assert reference.main([]) == 2
    assert reference.main([str(tmp_path / "nothing.json")]) == 2
    job.write_text('{"task": "train", "checkpoint": "nowhere", "result": "y", "batches": ""}')
    capsys.readouterr()
    assert reference.main([str(job)]) == 2


def test_batches_of_another_form_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batches.safetensors"
    save_file({"input_ids": np.zeros((1, 2), dtype=np.int64)}, path)
    with pytest.raises(DataError, match=r"got input_ids \[1, 2\]"):
        list(reference.read_batches(path))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        reference.evaluate(tmp_path, token_steps())
