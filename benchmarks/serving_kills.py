"""Machines of several pipelines are killed under load: do all tokens stay the same, and who waits how long?

    python benchmarks/serving_kills.py [--kills 20] [--pipelines 4] [--streams 16] [--json FILE]

Each pipeline is one process of this machine with the whole model, a small llama with random weights. Answers are asked
for all the time, so that `--streams` are under way. Again and again one machine is killed; its pipeline is dissolved
when it has waited for `DISSOLVED_S`; then the machine returns and becomes a pipeline again. For each kill:

- `moved_s`: the longest wait for a token of an answer that the killed machine had, which contains the time until the
  loss is noticed, waiting for a place elsewhere and reading the text again.
- `others_s`: the longest wait for a token of all other answers in `WINDOW_S` seconds after the kill, and
  `others_before_s`: the same in the seconds before it. All processes share the cores, and the answers that moved are
  more work for the rest, so this is the difference that a kill makes.
- Each answer's tokens are compared with those given before any kill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.serving import pipelines as opening
from fusionai.client.serving.serve import Served, serving
from fusionai.serving.interface import Emitted, Finished, Generation, Sampling
from fusionai.storage.atomic import write_atomic
from serving_models import make_model_of
from serving_streams import Say, prompt, request, shown, spread

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
TOKENS: Final = 150
WINDOW_S: Final = 2.0
FREE_S: Final = 1.0
DISSOLVED_S: Final = 2.0
LOOK_S: Final = 0.05


@dataclass(slots=True)
class Load:
    """Answers that are asked for again and again. `waits`: (time of a token, seconds since the one before, pipelines of
    the answer so far) of all answers, in order of time."""

    served: Served
    expected: list[list[int]]
    answers: int = 0
    moved: int = 0
    wrong: int = 0
    waits: list[tuple[float, float, tuple[int, ...]]] = field(default_factory=list)

    async def ask(self, number: int) -> None:
        """Ask for the same answer until cancelled."""
        while True:
            tokens, way = await self.answered(number)
            self.answers += 1
            self.moved += len(way) > 1
            self.wrong += tokens != self.expected[number]

    async def answered(self, number: int) -> tuple[list[int], tuple[int, ...]]:
        asked = prompt(number, self.served.model.vocabulary)
        stream = self.served.engine.submit(
            Generation(prompt=asked, max_tokens=TOKENS, sampling=Sampling(temperature=0.0))
        )
        tokens, way, before_s = list[int](), (stream.pipeline,), 0.0
        async for event in stream:
            if stream.pipeline != way[-1]:
                way = (*way, stream.pipeline)
            if isinstance(event, Emitted):
                now_s = time.perf_counter()
                if before_s:
                    self.waits.append((now_s, now_s - before_s, way))
                tokens.append(event.token)
                before_s = now_s
            elif isinstance(event, Finished) and event.reason != "length":
                raise SystemExit(f"an answer ended early: {event.reason} {event.detail}")
        return tokens, way

    def longest_s(self, since_s: float, until_s: float, *, of: int = 0, without: int = 0) -> float:
        """The longest wait that ended in this time. `of`: of answers that pipeline had and lost; `without`: of answers
        that this pipeline never had."""
        return max(
            (
                wait_s
                for at_s, wait_s, way in self.waits
                if since_s <= at_s <= until_s and (of in way[:-1] if of else without not in way)
            ),
            default=0.0,
        )


async def killed(served: Served, pool: LocalPool, load: Load, choose: random.Random) -> dict[str, float]:
    """Kill a machine of a pipeline that has answers, and return the longest waits."""
    load.waits.clear()
    await asyncio.sleep(WINDOW_S)
    stages = [stage for stage in served.engine.status.stages if stage.stage == 1]
    victim = choose.choice([one for one in stages if served.engine.routing.texts[one.pipeline]])
    at_s = time.perf_counter()
    before_s = load.longest_s(at_s - WINDOW_S, at_s, without=victim.pipeline)
    await pool.kill(victim.name)
    await asyncio.sleep(WINDOW_S)
    now_s = time.perf_counter()
    found = {
        "others_before_s": before_s,
        "others_s": load.longest_s(at_s, now_s, without=victim.pipeline),
        "moved_s": load.longest_s(at_s, now_s, of=victim.pipeline),
    }
    pipelines = len(served.engine.open)
    while victim.pipeline in served.engine.open:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    await pool.start_again(victim.name)
    while len(served.engine.open) < pipelines:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    return found


async def measured(arguments: argparse.Namespace, folder: Path, say: Say) -> None:
    opening.FREE_S, opening.DISSOLVE_S = FREE_S, DISSOLVED_S  # type: ignore[misc]
    model = make_model_of("llama", folder / "model", SIZES)
    names = [f"machine{number}" for number in range(arguments.pipelines)]
    choose = random.Random(arguments.seed)
    async with LocalPool(folder / "pool", [LocalPeer(name) for name in names], name="kills") as pool:
        asked = request(
            *(model, folder / "home"), weights="fp32", sessions=8, goal="throughput", invitation=pool.invitation
        )
        async with serving(asked, on_event=shown(say)) as served:
            while len(served.engine.open) < arguments.pipelines:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            load = Load(served, [])
            load.expected = [(await load.answered(number))[0] for number in range(arguments.streams)]
            asking = [asyncio.create_task(load.ask(number)) for number in range(arguments.streams)]
            found: list[dict[str, float]] = []
            for number in range(1, arguments.kills + 1):
                found.append(await killed(served, pool, load, choose))
                say(
                    f"kill {number}: "
                    + ", ".join(f"{name} {seconds:.3f}" for name, seconds in found[-1].items())
                    + f"; {load.answers} answers, {load.moved} moved, {load.wrong} wrong"
                )
            for one in asking:
                one.cancel()
            await asyncio.wait(asking)
            failed = [str(one.exception()) for one in asking if not one.cancelled() and one.exception()]
    results = {
        "kills": arguments.kills,
        "seed": arguments.seed,
        "answers": load.answers,
        "moved_answers": load.moved,
        "wrong_answers": load.wrong,
        "failed": failed,
        **{name: spread([one[name] for one in found]) for name in found[0]},
        "others_more_s": statistics.median(one["others_s"] - one["others_before_s"] for one in found),
    }
    say(json.dumps({name: value for name, value in results.items() if not isinstance(value, dict)}))
    if arguments.json is not None:
        write_atomic(arguments.json, json.dumps(results, indent=1).encode())
    if load.wrong or failed:
        raise SystemExit(f"{load.wrong} answers have other tokens than before, {len(failed)} failed: {failed[:1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pipelines", type=int, default=4, help="machines, each a pipeline")
    parser.add_argument("--streams", type=int, default=16, help="answers at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if min(arguments.kills, arguments.streams) < 1 or arguments.pipelines < 2:
        parser.error("expected at least one kill, one stream and two pipelines")

    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        asyncio.run(measured(arguments, Path(folder), lambda line: print(line, flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
