"""Bulk over a line that is slow, long and loses packets: it arrives whole, and by BBR where the kernel has it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusionai.cli.running import run
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.channels.uplink import bulk_is_available
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.identity import load_identity
from fusionai.wire.messages import Pong, Probe, TensorHeader
from harness.credentials import CertifiedPool
from harness.patience import CEILING_S
from harness.shaped_link import Shape, ShapedLink, unavailable

pytestmark = pytest.mark.slow

PORT = 4712
PIECES = 3
PIECE_BYTES = 2**20


async def far(home: str, host: str) -> None:
    """Takes the pieces and says what came."""
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(channel: Channel) -> None:
        told = hashlib.sha256()
        for _ in range(PIECES):
            envelope = await channel.receive()
            told.update(envelope.tensors["x"].data)
        await channel.send(Pong(sequence=0, sent_at_s=0.0))
        done.set_result(told.hexdigest())
        await channel.receive()

    await TcpTransport(CertifiedPool(Path(home)).credentials("far")).listen(serve, host=host, port=PORT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdout.write(await done + "\n")


async def near(home: str, host: str) -> dict[str, str]:
    told = hashlib.sha256()
    channel = await TcpTransport(CertifiedPool(Path(home)).credentials("near")).dial(
        [f"tcp://{host}:{PORT}"], expect=load_identity(Path(home) / "far").peer, stream="tensors"
    )
    sock = channel._live_transport().get_extra_info("socket")
    for _ in range(PIECES):
        content = os.urandom(PIECE_BYTES)
        told.update(content)
        message = Probe(sequence=0, sent_at_s=0.0, tensors=(TensorHeader("x", "uint8", (PIECE_BYTES,)),))
        await channel.send(message, (host_tensor("uint8", (PIECE_BYTES,), content),))
    await channel.receive()
    used = sock.getsockopt(6, 13, 16).rstrip(b"\0").decode()
    return {"sent": told.hexdigest(), "congestion": used}


def test_bulk_crosses_a_long_line_that_loses_packets(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(f"no shaped link can be made here: {reason}")
    for name in ("far", "near"):
        CertifiedPool(tmp_path).credentials(name)
    with ShapedLink(Shape(50e6, 0.02, loss=0.01), seed=3) as link:
        argv = [sys.executable, __file__, str(tmp_path), link.address("far")]
        options = {
            "stdout": subprocess.PIPE,
            "text": True,
            "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        }
        server = link.start("far", [*argv, "far"], **options)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            client = link.start("near", [*argv, "near"], **options)
            told, _ = client.communicate(timeout=CEILING_S)
            assert client.returncode == 0
            arrived = server.stdout.readline().strip()
        finally:
            server.kill()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
    found = json.loads(told)
    assert found["sent"] == arrived
    assert found["congestion"] == ("bbr" if bulk_is_available() else found["congestion"])
    assert link.lost > 0


if __name__ == "__main__":
    _home, _host, _end = sys.argv[1:]
    if _end == "far":
        run(far(_home, _host))
    else:
        sys.stdout.write(json.dumps(run(near(_home, _host))) + "\n")
