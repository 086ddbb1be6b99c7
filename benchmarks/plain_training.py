"""The rivals of `benchmarks/training.py`, one process of them: plain PyTorch, or a rank of torch's pipeline.

    python benchmarks/plain_training.py single THREADS --config JSON --steps N
    RANK=0 WORLD_SIZE=2 python benchmarks/plain_training.py pipeline 2 --config JSON --steps N --store FILE

Prints one JSON line with the seconds of each step. Nothing of this project runs here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

ROWS, LENGTH, MICROBATCHES = 8, 256, 8


def single(config: LlamaConfig, steps: int, device: str) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    seconds = []
    for step in range(steps):
        ids = batch(config, step).to(device)
        start_s = time.perf_counter()
        for part in ids.chunk(MICROBATCHES):
            loss = model(input_ids=part, labels=part).loss
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronise(device)
        seconds.append(time.perf_counter() - start_s)
    return seconds


class Part(nn.Module):
    """Consecutive layers, with the embedding in the first part and norm and head in the last."""

    def __init__(self, config: LlamaConfig, rank: int, ranks: int) -> None:
        super().__init__()
        layers = config.num_hidden_layers
        mine = range(layers * rank // ranks, layers * (rank + 1) // ranks)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if rank == 0 else None
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in mine)
        self.rotary = LlamaRotaryEmbedding(config)
        last = rank == ranks - 1
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if last else None
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) if self.embed is not None else x
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            out: Any = layer(hidden, position_embeddings=rotary, position_ids=positions, attention_mask=None)
            hidden = out[0] if isinstance(out, tuple) else out
        if self.norm is not None and self.head is not None:
            return self.head(self.norm(hidden))
        return hidden


def pipeline(config: LlamaConfig, ranks: int, steps: int, store: str, device: str) -> list[float]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    part = Part(config, rank, ranks).to(device)
    part.train()
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-4, weight_decay=0.1)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, config.vocab_size), labels[:, 1:].reshape(-1))

    schedule = Schedule1F1B(
        PipelineStage(part, rank, ranks, torch.device(device)), n_microbatches=MICROBATCHES, loss_fn=loss_of
    )
    seconds = []
    for step in range(steps):
        ids = batch(config, step).to(device)
        dist.barrier()
        start_s = time.perf_counter()
        if rank == 0:
            schedule.step(ids)
        elif rank == ranks - 1:
            schedule.step(target=ids)
        else:
            schedule.step()
        clip(part, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start_s)
    dist.destroy_process_group()
    return seconds


def clip(part: nn.Module, limit: float) -> None:
    """Clip by the norm over all ranks."""
    square = sum((p.grad.float().pow(2).sum() for p in part.parameters() if p.grad is not None), torch.zeros(()))
    dist.all_reduce(square)
    scale = min(1.0, limit / (float(square.sqrt()) + 1e-6))
    for parameter in part.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def batch(config: LlamaConfig, step: int) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["single", "pipeline"])
    parser.add_argument("count", type=int)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--store", default="")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    settings = json.loads(options.config)
    settings.pop("model_type")
    config = LlamaConfig(**settings, attn_implementation="sdpa")
    if options.what == "single":
        torch.set_num_threads(options.count)
        seconds = single(config, options.steps, options.device)
    else:
        torch.set_num_threads(1)
        seconds = pipeline(config, options.count, options.steps, options.store, options.device)
    print(json.dumps({"step_s": seconds, "threads": torch.get_num_threads()}), flush=True)


if __name__ == "__main__":
    main()
