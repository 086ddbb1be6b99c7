"""A rank of torch.distributed.pipelining (1F1B over gloo) under `benchmarks/recovery.py`, saving safetensors.

    RANK=0 WORLD_SIZE=4 python benchmarks/recovery_pipelining.py --store FILE --checkpoints DIR --steps 60

Says what happens as lines of JSON: `begun` (with `step`, where it starts), `step` (the last rank with its `loss`),
`error`, `done`. A checkpoint of a step counts when every rank has written it; the newest such one is where a start
begins.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from plain_training import Part, clip
from recovery_model import Text, config, optimizer, say

MICROBATCHES = 8


def run(options: argparse.Namespace) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    sizes = config(options.layers)
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    part = Part(sizes, rank, ranks)
    part.train()
    inner = optimizer(list(part.parameters()))

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, sizes.vocab_size), labels[:, 1:].reshape(-1))

    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    first = newest(options.checkpoints, ranks)
    if first:
        load(place(options.checkpoints, first, rank), part, inner)
    text = Text()
    say("begun", step=first)
    for step in range(first, options.steps):
        ids = text.batch(step)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids)
        elif rank == ranks - 1:
            schedule.step(target=ids, losses=losses)
        else:
            schedule.step()
        clip(part, 1.0)
        inner.step()
        inner.zero_grad()
        if losses:
            say("step", step=step, loss=float(torch.stack(losses).mean()))
        else:
            say("step", step=step)
        if (step + 1) % options.every == 0:
            save(place(options.checkpoints, step + 1, rank), part, inner)
    say("done")
    dist.destroy_process_group()


def save(path: Path, part: Part, inner: torch.optim.Optimizer) -> None:
    """Tensors only: of the optimizer `<parameter's number>/<slot>`; its settings are the program's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    tensors = {f"model/{key}": value for key, value in part.state_dict().items()}
    for number, slots in inner.state_dict()["state"].items():
        tensors |= {f"optimizer/{number}/{slot}": value for slot, value in slots.items()}
    save_file(tensors, unfinished)
    unfinished.replace(path)


def load(path: Path, part: Part, inner: torch.optim.Optimizer) -> None:
    model: dict[str, torch.Tensor] = {}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(path).items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            model[rest] = value
        else:
            number, _, slot = rest.partition("/")
            state.setdefault(int(number), {})[slot] = value
    part.load_state_dict(model)
    inner.load_state_dict({"state": state, "param_groups": inner.state_dict()["param_groups"]})


def newest(folder: Path, ranks: int) -> int:
    """The last step of which every rank has saved its part; 0 without one."""
    steps = [int(path.name) for path in folder.iterdir() if len(list(path.glob("*.safetensors"))) == ranks]
    return max(steps, default=0)


def place(folder: Path, step: int, rank: int) -> Path:
    return folder / str(step) / f"{rank}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    try:
        run(options)
    except RuntimeError as problem:  # what torch raises when a connection is gone
        say("error", text=str(problem).splitlines()[0][:200])
        os._exit(1)  # the process group would wait for its peers


if __name__ == "__main__":
    main()
