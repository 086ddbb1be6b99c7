"""What our channels make of home links: bulk and small messages over lines of a given speed, delay and loss.

    python benchmarks/links.py [--rounds 3] [--seconds 6] [--json FILE]

Two processes in network namespaces of their own, between them a link made in user space (tests/harness/shaped_link.py):
packets queue, wait and get lost, so that the kernel's congestion control meets what it would meet. One channel carries
tensors of 2 MB, one after the other; another carries 8 KB there and back, as a decoding stage would. In turns: bulk as
we ship it, paced below what the line was `measured` to carry, as every peer does that joins; `followed`, where nobody
has measured, as for a job's owner; and by CUBIC as it is, which most systems have.

Quoted: bulk over what TCP can carry on that line at most (52 of a packet's bytes are headers) beside those small
messages, which take a twentieth of the slowest line, the first two seconds left out and told apart; an 8 KB round trip
beside the bulk, over the same when the line is idle. Loopback's congestion control is no matter, so nothing here says
anything about a LAN.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from fusionai.cli.running import run
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import ChannelClosed
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.channels import uplink
from fusionai.transport.channels.link import answer_probe, measure_link
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.identity import load_identity
from fusionai.wire.messages import Pong, Probe, TensorHeader
from transport import credentials

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness.shaped_link import Shape, ShapedLink, unavailable

SMALL_BYTES: Final = 8 * 1024
PIECE_BYTES: Final = 2 * 2**20
AHEAD: Final = 8
"""Pieces sent and not acknowledged."""
IDLE_TURNS: Final = 25
RAMP_S: Final = 2.0
PORT: Final = 4711
CASES: Final = {
    "100 Mbit/s, 20 ms": (Shape(100e6, 0.010), 0.95),
    "1 Gbit/s, 5 ms": (Shape(1e9, 0.0025, mtu_bytes=9000), 0.95),
    "100 Mbit/s, 80 ms, 0.5 % lost": (Shape(100e6, 0.040, loss=0.005), 0.8),
    "20 Mbit/s, 30 ms": (Shape(20e6, 0.015), 0.95),
}
"""Round trips; what bulk is to reach."""
UNDER_LOAD_GOAL: Final = 1.5
WAYS: Final = ("measured", "followed", "cubic")


def probe(count: int) -> tuple[Probe, Any]:
    header = TensorHeader("x", "uint8", (count,))
    return Probe(sequence=0, sent_at_s=0.0, tensors=(header,)), host_tensor("uint8", (count,), os.urandom(count))


async def serve(channel: Channel) -> None:
    """Small ones go back as they are, pieces are acknowledged; over a channel for probes, those are answered."""
    with contextlib.suppress(ChannelClosed):
        while True:
            envelope = await channel.receive()
            if channel.stream == "state":
                await answer_probe(channel, envelope)
                continue
            tensors = list(envelope.tensors.values())
            if tensors[0].nbytes == SMALL_BYTES:
                await channel.send(envelope.message, tensors)
            else:
                await channel.send(Pong(sequence=0, sent_at_s=0.0))


async def far(home: str, host: str) -> None:
    await TcpTransport(credentials(home, "server")).listen(serve, host=host, port=PORT)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def near(home: str, host: str, seconds: float, way: str) -> dict[str, float]:
    rates, server = TransferLimits(), load_identity(Path(home) / "server").peer
    transport, address = TcpTransport(credentials(home, "client"), rates=rates), [f"tcp://{host}:{PORT}"]
    if way == "measured":
        channel = await transport.dial(address, expect=server, stream="state")
        rates.uplink.measured((await measure_link(channel, SystemClock())).bandwidth_bytes_per_s)
        await channel.close()
    small = await transport.dial(address, expect=server, stream="control")
    large = await transport.dial(address, expect=server, stream="tensors")
    message, tensor = probe(SMALL_BYTES)

    async def turn() -> float:
        began_s = time.perf_counter()
        await small.send(message, (tensor,))
        await small.receive()
        return time.perf_counter() - began_s

    idle_s = [await turn() for _ in range(IDLE_TURNS)]
    arrived: list[float] = []
    room = asyncio.Semaphore(AHEAD)

    async def send() -> None:
        piece, content = probe(PIECE_BYTES)
        while True:
            await room.acquire()
            await large.send(piece, (content,))

    async def acknowledged() -> None:
        while True:
            await large.receive()
            arrived.append(time.perf_counter())
            room.release()

    began_s = time.perf_counter()
    tasks = [asyncio.create_task(send()), asyncio.create_task(acknowledged())]
    await asyncio.sleep(RAMP_S)
    loaded_s: list[float] = []
    small_began_s = time.perf_counter()
    while time.perf_counter() < began_s + RAMP_S + seconds:
        loaded_s.append(await turn())
        await asyncio.sleep(0.02)
    small_bytes_per_s = len(loaded_s) * SMALL_BYTES / (time.perf_counter() - small_began_s)
    for task in tasks:
        task.cancel()
    after = [at_s for at_s in arrived if at_s > began_s + RAMP_S]
    before = len(arrived) - len(after)
    return {
        "ramp_bytes_per_s": before * PIECE_BYTES / RAMP_S,
        "bulk_bytes_per_s": (len(after) - 1) * PIECE_BYTES / (after[-1] - after[0]) if len(after) > 1 else 0.0,
        "small_bytes_per_s": small_bytes_per_s,
        "idle_s": statistics.median(idle_s),
        "loaded_s": statistics.median(loaded_s),
        "loaded_p95_s": statistics.quantiles(loaded_s, n=20)[-1],
    }


def measured(home: str, shape: Shape, seconds: float, seed: int, way: str) -> dict[str, float]:
    """One run over a link of its own."""
    with ShapedLink(shape, seed=seed) as link:
        argv = [sys.executable, str(Path(__file__).resolve()), "--home", home, "--host", link.address("far")]
        argv += ["--way", way]
        server = link.start("far", [*argv, "--side", "far"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if server.stdout.readline().strip() != "ready":
                raise SystemExit("the far end did not start")
            client = link.start(
                "near", [*argv, "--side", "near", "--seconds", str(seconds)], stdout=subprocess.PIPE, text=True
            )
            told, _ = client.communicate(timeout=120)
        finally:
            server.kill()
            server.wait()
    if client.returncode:
        raise SystemExit(f"the near end failed with {client.returncode}")
    return {**json.loads(told), "lost": float(link.lost), "dropped": float(link.dropped)}


def compare(arguments: argparse.Namespace, home: str) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for place, (name, (shape, goal)) in enumerate(CASES.items()):
        if arguments.only is not None and place not in arguments.only:
            continue
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(arguments.rounds):
            for way, found in runs.items():
                found.append(measured(home, shape, arguments.seconds, number, way))
        rows = {}
        for way, found in runs.items():
            rows[way] = {
                "bulk": statistics.median(
                    run["bulk_bytes_per_s"] / (shape.goodput_bytes_per_s - run["small_bytes_per_s"]) for run in found
                ),
                "first_seconds": statistics.median(
                    run["ramp_bytes_per_s"] / shape.goodput_bytes_per_s for run in found
                ),
                "idle_s": statistics.median(run["idle_s"] for run in found),
                "loaded_over_idle": statistics.median(run["loaded_s"] / run["idle_s"] for run in found),
                "loaded_p95_over_idle": statistics.median(run["loaded_p95_s"] / run["idle_s"] for run in found),
                "runs": found,
            }
            print(
                f"{name:30} {way:8} bulk {rows[way]['bulk']:6.1%} of what is left (goal {goal:.0%}), first "
                f"{RAMP_S:g} s {rows[way]['first_seconds']:6.1%}; 8 KB {rows[way]['idle_s'] * 1000:6.1f} ms, "
                f"beside bulk x{rows[way]['loaded_over_idle']:.2f} (goal {UNDER_LOAD_GOAL}), p95 "
                f"x{rows[way]['loaded_p95_over_idle']:.2f}",
                file=sys.stderr,
                flush=True,
            )
        cases[name] = {"goal": goal, **rows}
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="+", choices=range(len(CASES)), help="of the links only these")
    parser.add_argument("--seconds", type=float, default=6.0, help="of bulk, after the first two")
    parser.add_argument("--json", type=Path, metavar="FILE")
    for hidden in ("--side", "--home", "--host"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--way", default=WAYS[0], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way == "cubic":
        uplink.SAMPLE_EVERY_S, uplink.LOSSY_PATHS = math.inf, "cubic"
    match arguments.side:
        case "far":
            run(far(arguments.home, arguments.host))
        case "near":
            print(json.dumps(run(near(arguments.home, arguments.host, arguments.seconds, arguments.way))))
        case _:
            if reason := unavailable():
                raise SystemExit(f"no shaped links here: {reason}")
            with tempfile.TemporaryDirectory(prefix="fusion-bench-") as home:
                for name in ("server", "client"):
                    credentials(home, name)
                cases = compare(arguments, home)
            report = {"schema": "fusionai.benchmark.links/1", "cpus": os.cpu_count(), "cases": cases}
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
