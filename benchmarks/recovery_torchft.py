"""torchft under `benchmarks/recovery.py`: its lighthouse, or one of two data-parallel replicas over gloo.

    python benchmarks/recovery_torchft.py lighthouse
    python benchmarks/recovery_torchft.py replica 0 --lighthouse http://127.0.0.1:PORT --steps 60

Says what happens as lines of JSON: `lighthouse`, `loaded` (then it waits for a line), `begun`, `attempt` (with
`committed`, `replicas`, `loss` over the replica's own rows), `done`. The batch follows torchft's committed step, which
is kinder to it than its own data loader: samples of a discarded attempt are tried again instead of skipped. Timeouts
are torchft's defaults. Gradients are averaged with `Manager.allreduce` in one flat buffer; `--wrapper` takes torchft's
own `DistributedDataParallel` instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from transformers import LlamaForCausalLM

from recovery_model import ROWS, Text, config, optimizer, say

REPLICAS = 2


def lighthouse() -> None:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    say("lighthouse", address=f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}")
    while True:
        time.sleep(3600)


def replica(index: int, address: str, layers: int, steps: int, wrapped: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(layers))
    inner = optimizer(list(model.parameters()))

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica-{index}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="127.0.0.1",
    )
    parallel = DistributedDataParallel(manager, model) if wrapped else model
    stepping = Optimizer(manager, inner)
    text = Text()
    say("loaded")
    sys.stdin.readline()  # replicas that begin together have the same first quorum
    share = ROWS // REPLICAS
    say("begun")
    while (step := manager.current_step()) < steps:
        rows = text.batch(step)[index * share : (index + 1) * share]
        stepping.zero_grad()
        loss = parallel(input_ids=rows, labels=rows).loss
        loss.backward()
        if not wrapped:
            average(manager, list(model.parameters()))
        stepping.step()
        committed = manager.current_step() != step
        healed = manager.current_step() if committed and manager.current_step() != step + 1 else None
        replicas = manager.num_participants()
        say("attempt", step=step, committed=committed, replicas=replicas, loss=float(loss.detach()), healed=healed)
    square = sum((float(parameter.detach().double().pow(2).sum()) for parameter in model.parameters()), 0.0)
    say("done", square=square.hex())
    manager.shutdown(wait=False)


def average(manager: Manager, parameters: list[torch.nn.Parameter]) -> None:
    """Over the replicas that take part; after a failure the step is not committed, so what is here does not matter."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(averaged.view_as(gradient))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["lighthouse", "replica"])
    parser.add_argument("index", type=int, nargs="?", default=0)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--wrapper", action="store_true")
    options = parser.parse_args()
    if options.what == "lighthouse":
        lighthouse()
    else:
        replica(options.index, options.lighthouse, options.layers, options.steps, options.wrapper)


if __name__ == "__main__":
    main()
