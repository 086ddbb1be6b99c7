"""An adapter on a base kept in few bits: the bits of peft in one process on the numbers that those stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.adapter import Lora
from fusionai.capture.models.source import DirectorySource
from fusionai.ir.schema import Stored, content_hash
from fusionai.ir.weights import pack_stored, stored_bytes, with_stored
from fusionai.training import progress
from fusionai.wire import messages as wire
from harness.one_process import as_it_stands
from harness.opened_weights import unpack_stored
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")]

VOCABULARY, STEPS, MICROBATCHES = 64, 4, 2
DATA = Data(tokens(VOCABULARY, 2, 10))
RANGES = ((0, 2), (2, 4), (4, 5))
LORA = Lora(rank=4, alpha=8.0)


@dataclass(frozen=True)
class Base:
    directory: Path
    captured: Captured


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    place = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return Base(place, capture(DirectorySource(place), batch=(1, 4), sequence=(1, 32), adapter=LORA))


def run(
    directory: Path, base: Base, form: Stored, watch: Callable[[MemoryPool, wire.Message], None] | None = None
) -> Run:
    async def start() -> Run:
        standbys = {} if watch is None else {0: 2, 1: 3}
        async with MemoryPool(2 + len(standbys), lambda: TorchBackend(device="cpu", threads=1)) as pool:
            if watch is not None:
                pool.on_message = lambda _sender, _receiver, message: watch(pool, message)
            job = Job(
                pool=pool,
                directory=directory,
                graph=with_stored(base.captured.graph, form),
                state=base.captured.state,
                ranges=RANGES,
                owned=frozenset({2}),
                data=DATA,
                steps=STEPS,
                microbatches=MICROBATCHES,
                base_stays=True,
                standbys=standbys,
                replans=watch is not None,
            )
            return await job.run()

    return asyncio.run(start())


def in_one_process(base: Base, form: Stored, done: Run) -> list[float]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(base.directory)
    packed = {spec.key: spec for spec in with_stored(base.captured.graph, form).params.values() if spec.stored}
    model = get_peft_model(whole, LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear"))
    begun = done.weights(0)
    replaced = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(begun[f"model/{key}"].copy()))
            elif key in packed:
                data = pack_stored(parameter.numpy(), packed[key].stored)
                parameter.copy_(torch.from_numpy(unpack_stored(data, tuple(parameter.shape), packed[key].stored)))
                replaced += 1
    assert replaced == len(packed) > 0
    return as_it_stands(model, done)


@pytest.mark.parametrize("form", ["int4", pytest.param("int8", marks=pytest.mark.long)])
def test_losses_are_those_of_one_process_and_outlive_a_machine(base: Base, form: Stored, tmp_path: Path) -> None:
    """What is sent and kept of a frozen weight is its packed bytes, to the standby as well."""
    sent: dict[str, set[int]] = {}
    copied: dict[tuple[wire.Fence, int, str], int] = {}

    def watch(pool: MemoryPool, message: wire.Message) -> None:
        if isinstance(message, wire.StateChunk | wire.Snapshot):
            for header in message.tensors:
                sent.setdefault(header.name, set()).add(int(np.prod(header.shape)) if header.dtype == "uint8" else -1)
                if isinstance(message, wire.Snapshot):
                    at = message.fence, message.stage, header.name
                    copied[at] = copied.get(at, 0) + 1
        if isinstance(message, wire.Commit) and message.record.step == 2 and peer_id(1) not in struck:
            struck.append(peer_id(1))
            pool.kill(peer_id(1))

    struck: list[str] = []
    done = run(tmp_path / "undisturbed", base, form)
    assert done.end is not None
    assert done.end.failed is None
    assert done.losses == in_one_process(base, form, done)
    disturbed = run(tmp_path / "disturbed", base, form, watch)
    assert struck
    assert any(isinstance(event, progress.FaultSeen) for event in disturbed.events)
    assert disturbed.losses == done.losses
    for spec in with_stored(base.captured.graph, form).params.values():
        if spec.stored:
            assert sent[f"model/{spec.key}"] == {stored_bytes(tuple(spec.shape), spec.stored)}
    frozen = {f"model/{spec.key}" for spec in base.captured.graph.params.values() if not spec.trainable}
    assert {count for (*_, name), count in copied.items() if name in frozen} == {1}, "once in a round"
    assert max(count for (*_, name), count in copied.items() if name not in frozen) > 1


def test_another_form_is_another_graph(base: Base) -> None:
    """So that nobody goes on from a state that was made otherwise."""
    forms: tuple[Stored, ...] = ("", "bf16", "int8", "int4")
    hashes = {content_hash(with_stored(base.captured.graph, form)) for form in forms}
    assert len(hashes) == len(forms)
