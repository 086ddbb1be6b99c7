"""A malicious broker beside a served model: tickets of its own open no peer's door, for passes or for weights.

Whole jobs over the memory network with real stages. The broker here is the test: it has the key that signs tickets.
Neighbour: `tests/unit/peer/test_acceptor_placements` does the same to a training job's peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Standby
from fusionai.serving.interface import Generation, Sampling
from fusionai.transport.interface import Channel
from fusionai.transport.security.signed import Seal
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence
from harness.in_a_loop import in_a_loop
from harness.pool import JOB, OWNER, SEAL, peer_id
from harness.serving_pool import Served, served, tokens_of

pytestmark = pytest.mark.slow

INSERTED = peer_id(8)
BROKER = Seal(Ed25519PrivateKey.from_private_bytes(b"b" * 32), "trusted")
VOCABULARY = 61
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
RANGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
ASKED = Generation(prompt=(5, 9, 12), max_tokens=8, sampling=Sampling(temperature=0))


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 128), train=False)


def fence_of(running: Served) -> Fence:
    return running.engine._driver.fence


def placement(running: Served, seal: Seal, fence: Fence, *, job: str = JOB) -> bytes:
    """As the plan is, with the inserted key in the first peer's place."""
    places = [(one.stage, one.peer) for one in running.engine.deployment.plan.stages]
    return seal.placement(
        job, fence, stages=[(stage, INSERTED if peer == peer_id(0) else peer) for stage, peer in places], standbys=()
    )


async def knocked(
    running: Served, who: PeerId, at: PeerId, stream: wire.Stream, fence: Fence, shown: bytes
) -> tuple[Channel, wire.Message]:
    """With the ticket of a malicious broker."""
    pool = running.pool
    channel = await pool.network.transport(who).dial(pool.addresses[at], expect=at, stream=stream)
    ticket = pool.ticket(who, version=fence.plan_version)
    await channel.send(wire.OpenJob(job=JOB, fence=fence, ticket=ticket, placement=shown, task="serve"))
    return channel, (await channel.receive()).message


def shown_by(running: Served, fence: Fence) -> Iterator[bytes]:
    yield b""
    yield placement(running, BROKER, fence)
    yield placement(running, SEAL, Fence(fence.plan_version, fence.incarnation, fence.attempt + 7))
    yield placement(running, SEAL, fence, job="job-2")


@in_a_loop
async def test_a_key_in_no_placement_gets_neither_passes_nor_weights(llama: Captured, tmp_path: Path):
    async with served(llama, tmp_path, RANGES, vocabulary=VOCABULARY) as running:
        alone = await tokens_of(running.engine, ASKED)
        present = fence_of(running)
        later = Fence(present.plan_version + 1, present.incarnation, 0)
        refused = 0
        for fence in (present, later):
            for shown in shown_by(running, fence):
                for stream in ("tensors", "state"):
                    for host in running.pool.hosts:
                        _, answer = await knocked(running, INSERTED, host.peer, stream, fence, shown)
                        assert isinstance(answer, wire.Refused), (fence, stream)
                        assert answer.code == "bad_placement"
                        refused += 1
        assert refused == 2 * 4 * 2 * 3
        assert await tokens_of(running.engine, ASKED) == alone, "nobody noticed"


@in_a_loop
async def test_who_lost_its_part_gets_no_weights_by_what_it_once_was_shown(llama: Captured, tmp_path: Path):
    """A peer replaced by its standby: its old placement was true, and its ticket of the new plan is the broker's."""
    standbys = [Standby(stage=1, peer=peer_id(3))]
    async with served(llama, tmp_path, RANGES, standbys=standbys, spares=1, vocabulary=VOCABULARY) as running:
        await tokens_of(running.engine, ASKED)
        old = fence_of(running)
        true_once = SEAL.placement(
            JOB,
            old,
            stages=[(one.stage, one.peer) for one in running.engine.deployment.plan.stages],
            standbys=[(1, peer_id(3))],
        )
        neighbour = peer_id(1)
        channel, answer = await knocked(running, peer_id(0), neighbour, "state", old, true_once)
        assert isinstance(answer, wire.Done), "as long as it has its part"
        running.engine.shut_out(peer_id(0), "it is not trusted (any more)")
        assert len(await tokens_of(running.engine, ASKED)) == 8
        present = fence_of(running)
        assert present > old
        assert peer_id(0) not in {one.peer for one in running.engine.deployment.plan.stages}
        assert channel.closed, "its connection for weights has ended with its part"
        for fence, shown in ((present, true_once), (old, true_once), (Fence(9, 1, 0), true_once)):
            _, answer = await knocked(running, peer_id(0), neighbour, "state", fence, shown)
            assert isinstance(answer, wire.Refused), fence
            assert answer.code in ("bad_placement", "stale_fence")
        assert OWNER in {one.peer for one in running.engine.deployment.plan.stages}
