"""Several pipelines of one model: does throughput grow with the machines, and does one stream stay as fast?

    python benchmarks/serving_pipelines.py [--machines 1,2,4,8] [--rounds 3] [--tokens 60] [--json FILE]

All machines are processes of this one, and each computes a tenth of the time (`fusion join --share 10%`), so that up to
eight of them share the cores without waiting for each other. Each holds the whole model, a llama with random weights.
For each number of machines, the model is served by as many pipelines, and 16 answers are given at once, then one alone.
The numbers of machines take turns within a round. What counts are ratios within a round:

- `M_machines_to_proportional`: 16 answers on M machines to M times those on one machine. A machine that computes 16
  answers together reads its weights once for all of them, so this ratio falls with the batches, however well the
  answers are spread.
- `M_machines_to_same_batches`: 16 answers on M machines to M times 16 / M answers on one machine, whose batches are
  equally large: what is lost by sharing, spreading and one owner.
- `M_machines_single_stream`: one stream beside one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.serving.serve import Served, serving
from fusionai.storage.atomic import write_atomic
from serving_models import make_model_of
from serving_streams import Figures, Say, one_stream, prompt, request, shown

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
STREAMS: Final = 16
SHARE: Final = 0.1
MEMORY_BYTES: Final = 600_000_000
SETTLED_S: Final = 0.2


async def together_per_s(served: Served, streams: int, tokens: int, salt: int) -> float:
    """Tokens per second of all answers, from the first token of the first answer to the last token of the last one."""
    asked = [prompt(1000 * salt + number, served.model.vocabulary) for number in range(streams)]
    found = await asyncio.gather(*(one_stream(served, one, tokens) for one in asked))
    begin, end = min(one.at_s[0] for one in found), max(one.at_s[-1] for one in found)
    return (sum(len(one.at_s) for one in found) - 1) / (end - begin)


async def measured(arguments: argparse.Namespace, folder: Path, say: Say) -> None:
    def keep(results: dict[str, Any]) -> None:
        if arguments.json is not None:
            write_atomic(arguments.json, json.dumps(results, indent=1).encode())

    figures = Figures(keep, say)
    figures.facts |= {"streams": STREAMS, "share": SHARE, "tokens": arguments.tokens}
    model = make_model_of("llama", folder / "model", SIZES)
    most = max(arguments.machines)
    peers = [LocalPeer(f"machine{number}", share=SHARE, memory_bytes=MEMORY_BYTES) for number in range(most)]
    async with LocalPool(folder / "pool", peers, name="pipelines") as pool:
        for number in range(1, arguments.rounds + 1):
            found: dict[int, tuple[float, float]] = {}
            same_batches: dict[int, float] = {}
            first = arguments.machines[0]
            for machines in arguments.machines:
                asked = request(
                    *(model, folder / "home"),
                    weights="fp32",
                    sessions=STREAMS,
                    goal="throughput",
                    spares=most - machines,
                    invitation=pool.invitation,
                )
                async with serving(asked, on_event=shown(say)) as served:
                    while len(served.engine.open) < machines:  # noqa: ASYNC110
                        await asyncio.sleep(SETTLED_S)
                    await together_per_s(served, STREAMS, 8, 0)
                    together = await together_per_s(served, STREAMS, arguments.tokens, number)
                    if machines == first:
                        for more in arguments.machines[1:]:
                            streams = max(1, STREAMS * first // more)
                            same_batches[more] = await together_per_s(served, streams, arguments.tokens, number + more)
                    single = await one_stream(served, prompt(number, served.model.vocabulary), arguments.tokens)
                    found[machines] = together, single.tokens_per_s
                say(f"{machines} machines: {together:.1f} tokens/s together, {single.tokens_per_s:.1f} alone")
            for machines in arguments.machines[1:]:
                grown = found[machines][0] / (machines / first)
                figures.note(f"{machines}_machines_to_proportional", grown / found[first][0])
                figures.note(f"{machines}_machines_to_same_batches", grown / same_batches[machines])
                figures.note(f"{machines}_machines_single_stream", found[machines][1] / found[first][1])
            figures.end_round(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--machines", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 4, 8], metavar="M,M..."
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each answer")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if len(arguments.machines) < 2 or min(arguments.machines) < 1:
        parser.error("expected at least two numbers of machines, from 1 on")

    with tempfile.TemporaryDirectory(prefix="pipelines-") as folder:
        asyncio.run(measured(arguments, Path(folder), lambda line: print(line, flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
