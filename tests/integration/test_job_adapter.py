"""Adapters over four stages: the same bits as peft in one process; and whole models tuned from a directory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from fusionai.backends.state import saved_entries, state_entries
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.adapter import Adapter, Lora, StartedLora, adapter_config
from fusionai.capture.models.source import DirectorySource
from fusionai.ir.blocks import held_in_front, sent_bytes
from fusionai.ir.validate import validate
from fusionai.primitives.errors import ModelError
from fusionai.storage.adapter_files import CONFIG_FILE, WEIGHTS_FILE, encode_adapter_config
from fusionai.wire.messages import OptimizerSpec, StageOptions
from harness.one_process import as_it_stands
from harness.pool import Data, Job, MemoryPool, Run, tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")]

VOCABULARY, STEPS, MICROBATCHES = 61, 4, 3
DATA = Data(tokens(VOCABULARY, 2, 10))
FOUR_AND_LOSS = ((0, 2), (2, 3), (3, 4), (4, 6), (6, 7))
LORA = Lora(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    place = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def captured_from(base: Path, adapter: Adapter | None = None) -> Captured:
    return capture(DirectorySource(base), batch=(1, 4), sequence=(1, 32), adapter=adapter)


@pytest.fixture(scope="module")
def adapted(base: Path) -> Captured:
    return captured_from(base, LORA)


def run(directory: Path, captured: Captured, *starts: dict[str, int], **changes: object) -> list[Run]:
    async def all_starts() -> list[Run]:
        async with MemoryPool(4, lambda: TorchBackend(device="cpu", threads=1)) as pool:
            fields: dict[str, object] = {
                "steps": STEPS,
                "ranges": FOUR_AND_LOSS,
                "owned": frozenset({4}),
                **changes,
            }
            job = Job(
                pool=pool,
                directory=directory,
                graph=captured.graph,
                state=captured.state,
                data=DATA,
                microbatches=MICROBATCHES,
                base_stays=captured.source.built.adapter is not None,
                **fields,  # pyright: ignore[reportArgumentType]
            )
            return [await job.run(**start) for start in starts or ({},)]  # pyright: ignore[reportArgumentType]

    return asyncio.run(all_starts())


def from_directory(base: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base)


def peft_model(base: Path, done: Run, adapter: Lora = LORA) -> nn.Module:
    """By peft alone, with the adapter that the run began with."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=adapter.rank, lora_alpha=int(adapter.alpha), target_modules="all-linear")
    model = get_peft_model(from_directory(base), config)
    begun = done.weights(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = "model/" + name.removeprefix("base_model.model.").replace(".default", "")
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(begun[key].copy()))
    return model


@pytest.fixture(scope="module")
def trained(adapted: Captured, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("job"), adapted, checkpoint_every=2)[0]


def saved_by(trained: Run, captured: Captured, step: int) -> Path:
    """The checkpoint of a step as `fusion train` leaves it: with the adapter's configuration beside the weights."""
    directory = trained.job.directory / f"step-{step:08d}"
    built = captured.source.built
    assert built.adapter is not None
    config = encode_adapter_config(adapter_config(built.module, built.adapter), base=None, task="CAUSAL_LM")
    (directory / CONFIG_FILE).write_bytes(config)
    return directory


def test_the_graph_is_the_module(adapted: Captured) -> None:
    assert self_check(adapted).forward_diff == 0.0


def test_losses_are_those_of_peft_in_one_process(base: Path, trained: Run) -> None:
    assert trained.end is not None
    assert trained.end.failed is None
    assert trained.losses == as_it_stands(peft_model(base, trained), trained)
    assert trained.losses[0] != trained.losses[-1]


def test_what_is_frozen_has_no_optimizer_state_and_is_in_no_checkpoint(adapted: Captured, trained: Run) -> None:
    cut = trained.job.cut()
    for stage in cut.stages:
        trainable = {spec.key for spec in stage.graph.params.values() if spec.trainable}
        assert all(".lora_" in key for key in trainable)
        slots = {entry.key for entry in state_entries(stage.graph, trained.job.optimizer).values() if entry.slot}
        assert slots == trainable
    keys = {spec.key for spec in adapted.graph.params.values() if spec.trainable}
    weights = trained.weights(STEPS)
    assert {name.removeprefix("model/") for name in weights if ".lora_" in name and name.startswith("model/")} == keys
    kinds = {spec.key: spec.kind for spec in adapted.graph.params.values()}
    frozen = {name for name in weights if ".lora_" not in name}
    assert all(kinds[name.removeprefix("model/")] != "parameter" for name in frozen)


def test_no_gradient_goes_back_to_what_trains_nothing(trained: Run) -> None:
    """The embedding alone: the layers after it send nothing back, while those of layers go back."""
    job = replace(trained.job, ranges=((0, 1), (1, 3), (3, 6), (6, 7)), owned=frozenset({0, 3}))
    embedding, first, *_ = (stage.boundary for stage in job.cut().stages)
    assert embedding.returned == ()
    assert any(port.other == 2 for port in first.returned)


def test_an_adapter_that_stays_with_the_owner_is_the_same_adapter(
    adapted: Captured, trained: Run, tmp_path: Path
) -> None:
    """Peers have frozen layers and nothing else; what is trained is sent to them and its gradient comes back."""
    held = replace(adapted, graph=held_in_front(adapted.graph))
    validate(held.graph)
    owned = frozenset({0, 4, 5})
    ranges = ((0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 7))
    first, second = run(
        tmp_path, held, {"kill_after": 1}, {}, ranges=ranges, owned=owned, checkpoint_every=1, standbys={2: 3}
    )
    assert first.end is None
    assert second.losses == trained.losses[-len(second.losses) :]
    weights = second.weights(STEPS)
    for name, value in trained.weights(STEPS).items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    stages = second.job.cut().stages
    for number, stage in enumerate(stages):
        trainable = [spec for spec in stage.graph.params.values() if spec.trainable]
        assert bool(trainable) == (number == 0)
        assert number in owned or not any(entry.slot for entry in stage.entries.values())
    sent = sum(spec.shape[0] * spec.shape[1] * 4 for spec in adapted.graph.params.values() if spec.trainable)
    assert sent_bytes(held.graph) == sent


def test_peft_loads_what_was_saved(base: Path, adapted: Captured, trained: Run) -> None:
    from peft import PeftModel

    directory = saved_by(trained, adapted, STEPS)
    assert (directory / WEIGHTS_FILE).is_file()
    assert not list(directory.glob("model*"))
    loaded = PeftModel.from_pretrained(from_directory(base), str(directory)).eval()
    own = peft_model(base, trained)
    as_it_stands(own, trained)
    own.eval()
    ids = torch.arange(12)[None] % VOCABULARY
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, own(input_ids=ids).logits)
        assert not torch.equal(loaded(input_ids=ids).logits, from_directory(base)(input_ids=ids).logits)


def test_a_job_goes_on_from_an_adapters_checkpoint(adapted: Captured, trained: Run, tmp_path: Path) -> None:
    first, second = run(tmp_path, adapted, {"kill_after": 1}, {}, checkpoint_every=1)
    assert first.end is None
    assert (first.losses + second.losses)[-STEPS:] == trained.losses or second.losses == trained.losses[
        -len(second.losses) :
    ]
    for name, value in trained.weights(STEPS).items():
        np.testing.assert_array_equal(value, second.weights(STEPS)[name], err_msg=name)


def test_an_adapter_is_trained_on(base: Path, adapted: Captured, trained: Run, tmp_path: Path) -> None:
    captured = captured_from(base, StartedLora(saved_by(trained, adapted, 2)))
    again = run(tmp_path, captured, steps=1)[0]
    np.testing.assert_array_equal(
        again.weights(0)["model/model.layers.1.mlp.up_proj.lora_B.weight"],
        trained.weights(2)["model/model.layers.1.mlp.up_proj.lora_B.weight"],
    )


def test_an_adapter_of_another_model_is_refused(base: Path, adapted: Captured, trained: Run, tmp_path: Path) -> None:
    directory = saved_by(trained, adapted, 2)
    other = tmp_path / "other"
    other.mkdir()
    config = msgspec.json.decode((base / "config.json").read_bytes())
    (other / "config.json").write_bytes(msgspec.json.encode(config | {"hidden_size": 32}))
    with pytest.raises(ModelError, match="another base model"):
        captured_from(other, StartedLora(directory))


def test_a_layer_that_is_not_there_is_named(base: Path) -> None:
    with pytest.raises(ModelError, match="q_projj") as problem:
        captured_from(base, replace(LORA, targets=("q_projj",)))
    assert "'q_proj'" in str(problem.value)


def test_the_whole_model_is_tuned_from_a_directory(base: Path, tmp_path: Path) -> None:
    done = run(tmp_path, captured_from(base))[0]
    assert done.losses == as_it_stands(from_directory(base), done)


def test_dropout_in_an_adapter_is_the_counters(base: Path, trained: Run, tmp_path: Path) -> None:
    """Its masks follow from step and microbatch: two runs are one, and not that without dropout."""
    captured = captured_from(base, replace(LORA, dropout=0.5))
    assert any(node.op == "fusion.dropout" for node in captured.graph.nodes)
    one, other = (run(tmp_path / name, captured)[0] for name in ("one", "other"))
    assert one.losses == other.losses
    assert one.losses != trained.losses


def test_saved_entries_are_all_of_a_whole_model(adapted: Captured) -> None:
    options = StageOptions(optimizer=OptimizerSpec())
    assert saved_entries(adapted.graph, options) == state_entries(adapted.graph, options.optimizer)
