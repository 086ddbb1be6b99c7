"""What heartbeats cost a broker: processor time of a real broker process with many members over mutual TLS on loopback.

    python benchmarks/heartbeats.py --members 100,1000 --seconds 15 --json FILE

Members are connections of this process; each sends a heartbeat every three seconds, as peers do. The figure is the
broker's processor time, as a fraction of one core and per heartbeat, joins not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil

from fusionai.primitives.environment import inherited
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import Membership, enrol
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire.messages import Heartbeat, HeartbeatAck, Register, Registered

HEARTBEAT_S = 3.0
BROKER = """
import asyncio, signal, sys
from pathlib import Path
from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import run_broker
from fusionai.cli.running import run

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = BrokerOptions(home=Path(sys.argv[1]), pool="home", host="127.0.0.1", port=0, invitation_uses=5000)
    await run_broker(options, announce=lambda a: print(a.invitation, flush=True), stop=stop)

run(main())
"""


async def measured(members: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        broker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BROKER, folder + "/broker", stdout=asyncio.subprocess.PIPE, env=inherited()
        )
        try:
            assert broker.stdout is not None
            invitation = (await broker.stdout.readline()).decode().strip()
            joined = [await enrol(invitation, Path(folder, f"member{n}"), "provider") for n in range(members)]
            talks = [await registered(membership) for membership in joined]
            beating = [asyncio.create_task(beat(talk, n / members)) for n, talk in enumerate(talks)]
            await asyncio.sleep(2 * HEARTBEAT_S)
            process = psutil.Process(broker.pid)
            before, beats = process.cpu_times(), BEATS[0]
            await asyncio.sleep(seconds)
            after, beats = process.cpu_times(), BEATS[0] - beats
            for task in beating:
                task.cancel()
            await asyncio.gather(*beating, return_exceptions=True)
            used_s = after.user + after.system - before.user - before.system
            return {"members": members, "core": used_s / seconds, "ms_per_heartbeat": 1000 * used_s / beats}
        finally:
            broker.terminate()
            await broker.wait()


BEATS = [0]


async def registered(membership: Membership) -> Conversation:
    channel = await TcpTransport(membership.credentials).dial(membership.broker.known, expect=None, stream="control")
    talk = Conversation(channel)
    profile = PeerProfile(peer=membership.peer, flops_per_s=1e9, memory_bytes=10**9)
    answer = await talk.ask(Register(boot=1, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=()))
    assert isinstance(answer, Registered)
    return talk


async def beat(talk: Conversation, phase: float) -> None:
    await asyncio.sleep(phase * HEARTBEAT_S)
    while True:
        assert isinstance(await talk.ask(Heartbeat(boot=1)), HeartbeatAck)
        BEATS[0] += 1
        await asyncio.sleep(HEARTBEAT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="100,1000", help="numbers of members, one run each (default 100,1000)")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds measured in each run (default 15)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = [asyncio.run(measured(int(members), arguments.seconds)) for members in arguments.members.split(",")]
    for row in rows:
        print(
            f"{row['members']:5.0f} members: {row['core']:6.1%} of a core, {row['ms_per_heartbeat']:.3f} ms a heartbeat"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "fusionai.benchmark.heartbeats/1", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
