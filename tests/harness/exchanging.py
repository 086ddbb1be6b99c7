"""Jobs in memory that train one model and exchange between their machines, as replicas of one job do.

`run` starts the replicas, `Story` is what came of them. `harness.pool` has the machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.client.training.job_directory import go_back
from fusionai.coordination.training.exchanges import Early, Exchanges
from fusionai.ir.weights import initialise
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.training.joint_exchange import JointExchange, JointFiles, JointSeat, RoundDone
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged
from harness.pool import OWNER, Data, Job, MemoryPool, Run, tokens

VOCABULARY, EVERY, LAG, STEPS, SEED, RATE, MOMENTUM = 1031, 3, 2, 9, 7, 0.9, 0.5
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
CUTS = {"a": ((0, 2), (2, 4), (4, 5)), "b": ((0, 2), (2, 4), (4, 5)), "c": ((0, 3), (3, 4), (4, 5))}
"""Replica c is cut elsewhere."""
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}


@cache
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 16))


@cache
def first_values() -> dict[str, HostTensor]:
    """The trainable parameters that every replica begins with: initialised as the stages do it."""
    specs = {spec.key: spec for spec in llama().graph.params.values() if spec.trainable}
    given = dict(llama().state([key for key in sorted(specs) if specs[key].init is None]))
    for key, spec in specs.items():
        if spec.init is not None:
            made = np.asarray(initialise(key, spec.shape, spec.dtype, spec.init, SEED))
            given[key] = host_tensor(spec.dtype, spec.shape, made.tobytes())
    return given


def data_of(replica: str) -> Data:
    """Each replica sees other batches."""
    make = tokens(VOCABULARY, 2, 6)
    return Data(lambda step, microbatch: make(step, 100 * "abc".index(replica) + microbatch))


Watch = Callable[[dict[str, Job], PeerId, PeerId, wire.Message], None]


@dataclass
class Story:
    """`runs` by replica: the last start of each. `line_bytes`: of exchanges to and from the owner's machine, by kind of
    message."""

    runs: dict[str, Run] = field(default_factory=dict)
    rounds: list[RoundDone] = field(default_factory=list)
    line_bytes: dict[str, int] = field(default_factory=dict)
    linked_bytes: int = 0
    behind: dict[str, str] = field(default_factory=dict)


def counted(story: Story, sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
    kinds = (
        wire.ExchangePart,
        wire.ExchangeRound,
        wire.DifferenceReady,
        wire.ExchangeWhole,
        wire.ExchangeAdopt,
    )
    if not isinstance(message, kinds):
        return
    headers = getattr(message, "tensors", ())
    sizes = {"uint8": 1, "float32": 4}
    nbytes = len(wire.encode(message)) + sum(sizes[one.dtype] * int(np.prod(one.shape)) for one in headers)
    if OWNER in (sender, receiver):
        name = type(message).__name__
        story.line_bytes[name] = story.line_bytes.get(name, 0) + nbytes
    else:
        story.linked_bytes += nbytes


@dataclass(frozen=True)
class Restart:
    """The owner's process is killed by the test (`Job.die`) and starts again. `power_cut`: so do all machines."""

    power_cut: bool = False


def run(
    directory: Path,
    *,
    jobs: Sequence[str] = "abc",
    watch: Watch = lambda jobs, sender, receiver, message: None,
    codec: Exchanged = "int4",
    spared: Sequence[str] = (),
    owned: frozenset[int] = frozenset({2}),
    begun: Mapping[str, int] = {},
    deadline_s: float = 60.0,
    kill_after: int | None = None,
    restart: Restart | None = None,
    **changes: object,
) -> Story:
    """Run replicas `jobs` to their end. `spared`: those whose stages have standbys. `owned`: stages on the owner's
    machine. `begun`: replica -> steps of the whole run after which it begins. `kill_after`: all are killed once this
    step is official. `changes`: other fields of `Job`."""
    story, started = Story(), dict[str, Job]()
    steps, every, lag = (
        int(str(changes.get(name, usual))) for name, usual in (("steps", STEPS), ("sync_every", EVERY), ("sync_lag", 0))
    )
    early = changes.get("sync_early", (0, 0, 0))
    assert isinstance(early, tuple)
    exchanges = Exchanges(every=every, lag=lag, steps=steps, early=Early(*early))

    def job_of(pool: MemoryPool, seat: JointSeat, name: str) -> Job:
        fields: dict[str, object] = {
            "ranges": CUTS[name],
            "owned": owned,
            "data": data_of(name),
            "microbatches": 2,
            "checkpoint_every": EVERY,
            "replans": True,
            "sync_every": EVERY,
            "sync_codec": codec,
            "sync_rate": RATE,
            "sync_momentum": MOMENTUM,
            "seed": SEED,
            "standbys": {0: 2, 1: 3} if name in spared else {},
            "sync_begun": begun.get(name, 0),
            **changes,
            "steps": steps - begun.get(name, 0),
        }
        (directory / name).mkdir(exist_ok=True)
        return Job(
            pool=pool, directory=directory / name, graph=llama().graph, state=llama().state, exchange=seat,
            **fields,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    async def one(pool: MemoryPool, seat: JointSeat, name: str, *, power_cut: bool) -> None:
        job = started[name] = job_of(pool, seat, name)
        running = asyncio.create_task(
            job.run(epilogue=lambda _: seat.settled(), kill_after=kill_after, power_cut=power_cut)
        )
        while not running.done():
            await asyncio.wait({running}, timeout=0.1)
            if (reason := seat.exchange.behind.get(name)) is not None:
                story.behind[name] = reason
                running.cancel()
                await asyncio.wait({running})
                return
        story.runs[name] = running.result()
        if story.runs[name].end is not None:
            seat.exchange.leave(name)

    async def start(pools: Mapping[str, MemoryPool], *, power_cut: bool) -> None:
        files = JointFiles(directory / "outer")
        exchange = JointExchange(files, exchanges=exchanges, deadline_s=deadline_s, on_round=story.rounds.append)
        try:
            seats: dict[str, JointSeat] = {}
            for name in jobs:
                exchange.seat(name, begun.get(name, 0))
                seats[name] = JointSeat(exchange, name, WEIGHTS[name])
            await asyncio.gather(*(one(pool, seats[name], name, power_cut=power_cut) for name, pool in pools.items()))
        finally:
            await exchange.close()

    async def everything() -> None:
        async with AsyncExitStack() as stack:
            pools: dict[str, MemoryPool] = {}
            before: MemoryPool | None = None
            for name in jobs:
                peers = 2 - len(owned - {2}) + 2 * (name in spared)
                pool = MemoryPool(
                    peers, lambda: TorchBackend(device="cpu", threads=1), beside=before, job=JobId(f"job-{name}")
                )

                def seen(sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
                    counted(story, sender, receiver, message)
                    watch(started, sender, receiver, message)

                pool.on_message = seen
                pools[name] = before = await stack.enter_async_context(pool)
            await start(pools, power_cut=False)
            if restart is not None:
                assert all(done.end is None for done in story.runs.values()), "the process was killed"
                places = {number: (directory / name, begun.get(name, 0)) for number, name in enumerate(jobs)}
                go_back(places, exchanges)
                await start(pools, power_cut=restart.power_cut)

    directory.mkdir(exist_ok=True)
    asyncio.run(everything())
    for name, done in story.runs.items() if kill_after is None else ():
        assert done.end is not None, name
        assert done.end.failed is None, (name, done.end.failed)
    return story


def states(story: Story, step: int) -> dict[str, dict[str, np.ndarray]]:
    return {name: done.weights(step) for name, done in story.runs.items()}


def assert_same(one: Story, other: Story, step: int = STEPS) -> None:
    for name, expected in states(other, step).items():
        found = one.runs[name].weights(step)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=f"{name} {key}")


AGREED = ("anchor", "outer_momentum")


def assert_agreed(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    for key in first_values():
        for slot in AGREED:
            entry = f"optimizer/{key}/{slot}"
            np.testing.assert_array_equal(one[entry].reshape(-1), other[entry].reshape(-1), err_msg=entry)
