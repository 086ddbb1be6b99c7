"""A path that goes silent, in network namespaces of its own: two processes, one address taken away, no goodbye.

Needs Linux, root and the tools `ip` and `unshare`; elsewhere it is skipped with that reason.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusionai.cli.running import run
from fusionai.primitives.errors import ChannelClosed, TransportError
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire.frame import describe
from fusionai.wire.messages import Fence, Ping, StateChunk
from harness.credentials import CertifiedPool
from harness.patience import CEILING_S

pytestmark = pytest.mark.slow

SERVER, CLIENT = "10.77.0.2", "10.77.0.1"
PORT = 4711


def privileged() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode == 0


async def serve(home: Path) -> None:
    """Vanishes at the first message: takes its address away, so that whatever comes is dropped without a word."""
    vanished = asyncio.Event()

    async def accept(channel: Channel) -> None:
        await channel.receive()
        flush = await asyncio.create_subprocess_exec("ip", "addr", "flush", "dev", "far")
        assert await flush.wait() == 0
        vanished.set()
        await asyncio.Event().wait()

    listener = await TcpTransport(CertifiedPool(home).credentials("server", "broker")).listen(
        accept, host=SERVER, port=PORT
    )
    await vanished.wait()
    await asyncio.sleep(30)
    await listener.close()


async def ask(home: Path, sending: bool) -> None:
    """Prints how long after the silence the channel ended."""
    transport = TcpTransport(CertifiedPool(home).credentials("client", "broker"))
    channel: Channel | None = None
    while channel is None:
        try:
            channel = await transport.dial([f"tcp://{SERVER}:{PORT}"], expect=None, stream="state", timeout_s=1.0)
        except TransportError:
            await asyncio.sleep(0.1)
    await channel.send(Ping(sequence=1, sent_at_s=0.0))
    started_s = time.monotonic()
    tensor = host_tensor("uint8", (2**20,), bytes(2**20))
    chunk = StateChunk(fence=Fence(1, 0, 0), stage=0, step=0, last=False, tensors=(describe("t", tensor),))
    try:
        while sending:
            await channel.send(chunk, [tensor])
        await channel.receive()
    except ChannelClosed:
        print(f"ended after {time.monotonic() - started_s:.2f}", flush=True)  # noqa: T201 - read by the test


def connect(home: Path, sending: bool) -> None:
    """Runs in a namespace of its own: starts the server in another, with a cable between them."""
    server = subprocess.Popen(["unshare", "-n", sys.executable, __file__, "serve", str(home)])
    try:
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{server.pid}/ns/net") == own:
            time.sleep(0.01)
        for command in (
            "ip link add near type veth peer name far",
            f"ip link set far netns {server.pid}",
            f"ip addr add {CLIENT}/24 dev near",
            "ip link set near up",
        ):
            subprocess.run(command.split(), check=True)
        run(ask(home, sending))
    finally:
        server.kill()
        server.wait()


def main(arguments: list[str]) -> None:
    match arguments:
        case ["serve", home]:
            while subprocess.run(["ip", "addr", "add", f"{SERVER}/24", "dev", "far"], capture_output=True).returncode:
                time.sleep(0.02)
            subprocess.run(["ip", "link", "set", "far", "up"], check=True)
            run(serve(Path(home)))
        case ["connect", home, how]:
            connect(Path(home), how == "sending")
        case _:
            raise AssertionError(arguments)


@pytest.mark.skipif(not privileged(), reason="needs Linux, root, ip and unshare to make network namespaces")
@pytest.mark.parametrize("how", ["sending", "idle"])
@pytest.mark.long
def test_a_path_that_goes_silent_is_noticed_within_seconds(how: str, tmp_path: Path):
    pool = CertifiedPool(tmp_path)
    pool.credentials("server", "broker"), pool.credentials("client", "broker")
    result = subprocess.run(
        ["unshare", "-n", sys.executable, __file__, "connect", str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    ended_s = float(result.stdout.split()[-1])
    # Three seconds of silence, up to a second between looks, and what the machine needs.
    assert 2.0 < ended_s < 8.0


if __name__ == "__main__":
    main(sys.argv[1:])
