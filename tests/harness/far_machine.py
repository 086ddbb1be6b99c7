"""A machine of a pool without its framework, for tests of the ways between machines: what `fusion join` is made of.

    python far_machine.py serve HOME INVITATION        prints its peer id and addresses when registered, then serves
    python far_machine.py reach HOME INVITATION PEER   dials that peer, measures the link, prints one line of JSON
    python far_machine.py broker HOME HOST             prints an invitation per line it reads

Neighbours: `harness.homes` puts it behind a router.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from fusionai.broker.options import BrokerOptions
from fusionai.broker.server import run_broker
from fusionai.cli.running import run
from fusionai.client.pool.job_trust import job_trust
from fusionai.client.pool.session import PoolSession
from fusionai.peer.device import candidates
from fusionai.peer.registration import Registration
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.channels.link import answer_probe, measure_link
from fusionai.transport.enrolment import enrol
from fusionai.transport.interface import Channel
from fusionai.transport.peer_transport import PeerTransport


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def serve(home: Path, invitation: str) -> None:
    membership = await enrol(invitation, home, "provider")
    transport = PeerTransport(membership.credentials, membership.broker)

    async def accept(channel: Channel) -> None:
        while await answer_probe(channel, await channel.receive()):
            pass

    listener = await transport.listen(accept, host="0.0.0.0", port=0)

    async def candidates_now() -> tuple[str, ...]:
        return await candidates(transport, listener, membership.broker.known)

    addresses = await candidates_now()
    registration = Registration(
        transport,
        membership.broker,
        boot=time.time_ns(),
        profile=PeerProfile(peer=membership.peer, flops_per_s=1e9, memory_bytes=10**9),
        addresses=addresses,
        jobs=tuple,
        on_registered=lambda _: say(peer=membership.peer, addresses=addresses),
        on_leave=lambda _: None,
        on_lost=lambda: None,
        on_meet=lambda notice, broker: transport.answer(notice, (broker.host, broker.port)),
        links=lambda: transport.links,
        addresses_now=candidates_now,
        moved=lambda: transport.moved,
    )
    await registration.run()


async def reach(home: Path, invitation: str, peer: PeerId) -> None:
    membership = await enrol(invitation, home, "owner")
    trust = job_trust(home, membership, "open", confidential=False)
    async with PoolSession(membership, trust=trust) as session:
        for _ in sys.stdin:
            started_s = time.monotonic()
            try:
                members = {member.view.peer: member.view.addresses for member in await session.pool()}
                channel = await session.transport.dial(members[peer], expect=peer, stream="tensors", timeout_s=3.5)
            except FusionError as error:
                say(error=str(error))
                continue
            took_s = time.monotonic() - started_s
            link = await measure_link(channel, SystemClock(), largest_probe_bytes=2**20)
            say(
                route=channel.route,
                took_s=took_s,
                round_trip_s=link.round_trip_s,
                bytes_per_s=link.bandwidth_bytes_per_s,
                host=channel.remote.host,
            )
            await channel.close()


async def broker(home: Path, host: str) -> None:
    await run_broker(
        BrokerOptions(home=home, host=host, port=4711),
        announce=lambda opened: say(invitation=opened.invitation),
        stop=asyncio.Event(),
    )


def main(kind: str, home: str, *more: str) -> None:
    match kind:
        case "serve":
            run(serve(Path(home), *more))
        case "reach":
            run(reach(Path(home), more[0], PeerId(more[1])))
        case _:
            run(broker(Path(home), *more))


if __name__ == "__main__":
    main(*sys.argv[1:])
