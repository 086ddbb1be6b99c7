"""How fast are our channels beside the plain alternatives? Loopback, both ends in processes of their own.

Two questions: an 8 KB round trip (decoding sends that much per token and stage) and 32 MB one way with an
acknowledgement (a boundary tensor in training). Four answers, taken in turns within every round so that whatever else
the machine does hits all alike:

    fusion    our TcpTransport: mutual TLS 1.3, frames, schema checks
    raw       a bare asyncio protocol on the same event loop and the same TLS: the floor of a round trip
    blocking  blocking TLS sockets, sendall and recv_into: the ceiling of one thread's throughput
    gloo      torch.distributed send and recv, which neither encrypts nor authenticates (left out without torch)

Run: python benchmarks/transport.py [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fusionai.cli.running import loop_factory, run
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import MemberCredentials, load_authority
from fusionai.transport.security.identity import load_identity
from fusionai.wire.messages import Pong, Probe, TensorHeader

SMALL_BYTES = 8 * 1024
LARGE_BYTES = 32 * 2**20
ROUND_TRIPS = 400
TRANSFERS = 4
TARGETS = {"round_trip": ("fusion", "raw", 1.5), "throughput": ("fusion", "blocking", 0.9)}


def credentials(home: str, name: str) -> MemberCredentials:
    """The same pool in every process: what exists already is loaded."""
    authority = load_authority(Path(home) / "authority", "benchmark", now_wall_s=time.time())
    identity = load_identity(Path(home) / name)
    certificate = authority.issue(identity.public_key, "member", now_wall_s=time.time())
    return MemberCredentials(identity, certificate, authority.certificate)


# Each variant: a server that reports its port, and a client that answers "small" and "large" with seconds per turn.


def fusion_server(home: str, pipe: Connection) -> None:
    async def serve(channel: Channel) -> None:
        while True:
            envelope = await channel.receive()
            tensors = list(envelope.tensors.values())
            if tensors[0].nbytes == SMALL_BYTES:
                await channel.send(envelope.message, tensors)
            else:
                await channel.send(Pong(sequence=0, sent_at_s=0.0))

    async def main() -> None:
        listener = await TcpTransport(credentials(home, "server")).listen(serve, host="127.0.0.1", port=0)
        pipe.send(int(listener.addresses[0].rpartition(":")[2]))
        await asyncio.Event().wait()

    run(main())


def fusion_client(home: str, port: int, pipe: Connection) -> None:
    def probe(count: int) -> tuple[Probe, Any]:
        header = TensorHeader("x", "uint8", (count,))
        return Probe(sequence=0, sent_at_s=0.0, tensors=(header,)), host_tensor("uint8", (count,), os.urandom(count))

    async def main() -> None:
        server = load_identity(Path(home) / "server").peer
        channel = await TcpTransport(credentials(home, "client")).dial(
            [f"tcp://127.0.0.1:{port}"], expect=server, stream="tensors"
        )
        small, large = probe(SMALL_BYTES), probe(LARGE_BYTES)
        while (order := await asyncio.to_thread(pipe.recv)) != "stop":
            message, tensor = small if order == "small" else large
            turns = ROUND_TRIPS if order == "small" else TRANSFERS
            started_s = time.perf_counter()
            for _ in range(turns):
                await channel.send(message, (tensor,))
                await channel.receive()
            pipe.send((time.perf_counter() - started_s) / turns)
        await channel.close()

    run(main())


class RawSide(asyncio.Protocol):
    """Counts bytes; on the serving side echoes 8 KB at a time."""

    def __init__(self, echoes: bool) -> None:
        self.echoes = echoes
        self.got = bytearray()
        self.whole: asyncio.Event = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.got += data
        if len(self.got) >= SMALL_BYTES:
            if self.echoes:
                self.transport.write(bytes(self.got))  # pyright: ignore[reportAttributeAccessIssue]
            self.got.clear()
            self.whole.set()


def raw_server(home: str, pipe: Connection) -> None:
    async def main() -> None:
        context = credentials(home, "server").listening_context(strangers=False)
        server = await asyncio.get_running_loop().create_server(
            lambda: RawSide(echoes=True), "127.0.0.1", 0, ssl=context
        )
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    run(main())


def raw_client(home: str, port: int, pipe: Connection) -> None:
    async def main() -> None:
        context = credentials(home, "client").dialling_context()
        transport, side = await asyncio.get_running_loop().create_connection(
            lambda: RawSide(echoes=False), "127.0.0.1", port, ssl=context
        )
        payload = os.urandom(SMALL_BYTES)
        while (order := await asyncio.to_thread(pipe.recv)) != "stop":
            assert order == "small"
            started_s = time.perf_counter()
            for _ in range(ROUND_TRIPS):
                side.whole.clear()
                transport.write(payload)
                await side.whole.wait()
            pipe.send((time.perf_counter() - started_s) / ROUND_TRIPS)

    run(main())


def receive_exactly(sock: ssl.SSLSocket, buffer: memoryview) -> None:
    got = 0
    while got < len(buffer):
        count = sock.recv_into(buffer[got:])
        if count == 0:
            raise EOFError
        got += count


def blocking_server(home: str, pipe: Connection) -> None:
    context = credentials(home, "server").listening_context(strangers=False)
    with socket.create_server(("127.0.0.1", 0)) as door:
        pipe.send(door.getsockname()[1])
        plain, _ = door.accept()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(plain, server_side=True) as sock:
            order = memoryview(bytearray(1))
            while sock.recv_into(order):
                # A buffer per message, as any receiver that keeps what it gets needs.
                buffer = memoryview(bytearray(SMALL_BYTES if order[0] == 0 else LARGE_BYTES))
                receive_exactly(sock, buffer)
                sock.sendall(buffer if order[0] == 0 else b"\x01")


def blocking_client(home: str, port: int, pipe: Connection) -> None:
    context = credentials(home, "client").dialling_context()
    plain = socket.create_connection(("127.0.0.1", port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(plain) as sock:
        small, large = b"\x00" + os.urandom(SMALL_BYTES), os.urandom(LARGE_BYTES)
        answer = memoryview(bytearray(SMALL_BYTES))
        while (order := pipe.recv()) != "stop":
            turns = ROUND_TRIPS if order == "small" else TRANSFERS
            started_s = time.perf_counter()
            for _ in range(turns):
                if order == "small":
                    sock.sendall(small)
                    receive_exactly(sock, answer)
                else:
                    sock.sendall(b"\x01")
                    sock.sendall(large)
                    receive_exactly(sock, answer[:1])
            pipe.send((time.perf_counter() - started_s) / turns)


def gloo_server(_home: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    pipe.send(port)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
    small, large, done = torch.empty(SMALL_BYTES, dtype=torch.uint8), None, torch.ones(1, dtype=torch.uint8)
    order = torch.empty(1, dtype=torch.int64)
    while True:
        dist.recv(order, 1)
        if order.item() == 0:
            for _ in range(ROUND_TRIPS):
                dist.recv(small, 1)
                dist.send(small, 1)
        elif order.item() == 1:
            for _ in range(TRANSFERS):
                large = torch.empty(LARGE_BYTES, dtype=torch.uint8)
                dist.recv(large, 1)
                dist.send(done, 1)
        else:
            return


def gloo_client(_home: str, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    small, large = torch.zeros(SMALL_BYTES, dtype=torch.uint8), torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    done = torch.empty(1, dtype=torch.uint8)
    while (order := pipe.recv()) != "stop":
        turns = ROUND_TRIPS if order == "small" else TRANSFERS
        dist.send(torch.tensor([0 if order == "small" else 1]), 0)
        started_s = time.perf_counter()
        for _ in range(turns):
            if order == "small":
                dist.send(small, 0)
                dist.recv(small, 0)
            else:
                dist.send(large, 0)
                dist.recv(done, 0)
        pipe.send((time.perf_counter() - started_s) / turns)
    dist.send(torch.tensor([2]), 0)


VARIANTS: dict[str, tuple[Callable[..., None], Callable[..., None], tuple[str, ...]]] = {
    "fusion": (fusion_server, fusion_client, ("small", "large")),
    "raw": (raw_server, raw_client, ("small",)),
    "blocking": (blocking_server, blocking_client, ("small", "large")),
    "gloo": (gloo_server, gloo_client, ("small", "large")),
}


def pinned(work: Callable[..., None], place: int, *arguments: Any) -> None:
    """Run on a core of its own where the platform allows. Whether two processes that wake each other happen to share a
    core decides half of an 8 KB round trip; pinned, every variant pays for the same two cores."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place % len(cores)]})
    work(*arguments)


class Pair:
    """The two processes of one variant, the server on one core, the client on another."""

    def __init__(self, name: str, home: str) -> None:
        serve, ask, self.orders = VARIANTS[name]
        spawn = multiprocessing.get_context("spawn")
        from_server, server_end = spawn.Pipe()
        self.pipe, client_end = spawn.Pipe()
        self.server = spawn.Process(target=pinned, args=(serve, 0, home, server_end), daemon=True)
        self.server.start()
        self.client = spawn.Process(target=pinned, args=(ask, 1, home, from_server.recv(), client_end), daemon=True)
        self.client.start()

    def seconds(self, order: str) -> float:
        self.pipe.send(order)
        if not self.pipe.poll(120):
            raise TimeoutError(f"no answer to {order} within 120 s")
        return self.pipe.recv()

    def stop(self) -> None:
        self.pipe.send("stop")
        self.client.join(5)
        self.server.terminate()
        self.server.join(5)


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def measure(rounds: int, names: list[str]) -> dict[str, Any]:
    """Per variant the spread over rounds, and per target the spread of the ratio within each round."""
    with tempfile.TemporaryDirectory() as home:
        credentials(home, "server"), credentials(home, "client")
        pairs = {name: Pair(name, home) for name in names}
        taken: dict[str, dict[str, list[float]]] = {"small": {}, "large": {}}
        for number in range(rounds + 1):
            for order, by_name in taken.items():
                # The order turns with every round, so that no variant always runs on another's warm caches.
                turned = names[number % len(names) :] + names[: number % len(names)]
                for name in turned:
                    if order in pairs[name].orders:
                        seconds = pairs[name].seconds(order)
                        if number > 0:
                            by_name.setdefault(name, []).append(seconds)
        for pair in pairs.values():
            pair.stop()
    megabytes_per_s = {
        name: [LARGE_BYTES / 1e6 / seconds for seconds in values] for name, values in taken["large"].items()
    }
    figures = {"round_trip": taken["small"], "throughput": megabytes_per_s}
    return {
        "round_trip_us": {name: spread([s * 1e6 for s in values]) for name, values in taken["small"].items()},
        "throughput_mb_per_s": {name: spread(values) for name, values in megabytes_per_s.items()},
        "ratios": {
            f"{what} fusion/{other}": spread(
                [a / b for a, b in zip(figures[what]["fusion"], figures[what][other], strict=True)]
            )
            for what in figures
            for other in figures[what]
            if other != "fusion"
        },
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Our channels beside raw asyncio, blocking TLS sockets and gloo.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args(argv)
    names = list(VARIANTS)
    try:
        import torch  # noqa: F401
    except ImportError:
        names.remove("gloo")
    result = {
        "schema": "fusionai.bench.transport/1",
        "rounds": arguments.rounds,
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "event_loop": "asyncio" if loop_factory() is None else "uvloop",
        "small_bytes": SMALL_BYTES,
        "large_bytes": LARGE_BYTES,
        **measure(arguments.rounds, names),
    }
    for title in ("round_trip_us", "throughput_mb_per_s", "ratios"):
        print(title)
        for name, values in result[title].items():
            print(f"  {name:32} " + "  ".join(f"{key} {value:9.2f}" for key, value in values.items()))
    met = True
    for what, (ours, other, bound) in TARGETS.items():
        median = result["ratios"][f"{what} {ours}/{other}"]["median"]
        good = median <= bound if what == "round_trip" else median >= bound
        met &= good
        print(f"{what}: {median:.2f} of {other}, target {'<=' if what == 'round_trip' else '>='} {bound}: {good}")
    result["targets_met"] = met
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
