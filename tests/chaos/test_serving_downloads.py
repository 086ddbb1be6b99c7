"""Weights on their way: a peer killed in the middle goes on where it was; the next one gets them from the first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from fusionai.client.serving.serve import ServeEvent
from fusionai.serving import job as progress
from fusionai.transport.enrolment import load_membership
from harness.fault_proxy import TO_TARGET, FaultProxy, Link, free_port
from harness.live_pool import LivePool
from harness.serving_siege import ServingSiege, besieging
from harness.serving_siege_streams import Reference, write_model

pytestmark = pytest.mark.long

STAGES: Final = 2
LARGE: Final = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "initializer_range": 0.1}
"""About 17 MB a layer, in tensors of 1 to 4 MB."""
BYTES_PER_S: Final = 8e6
"""What the killed peer's network takes in."""
STREAMS: Final = 2
EQUAL_BYTES: Final = 10_000
"""Tensors that both stages have alike (norms of a new model are all ones) come once."""
WORDS_BYTES: Final = 1_000_000
"""More than all a job owner says to a standby besides weights."""


@dataclass
class Kept:
    """A peer that everybody reaches through a proxy, first the job owner with the weights."""

    pool: LivePool
    name: str
    proxy: FaultProxy
    links: list[Link] = field(default_factory=list[Link])
    """All there ever were."""
    port: int = field(default_factory=free_port)

    def start(self, *invitation: str) -> None:
        self.proxy.aim(self.port)
        self.proxy.on_link = self.links.append
        self.pool.start(self.name, *invitation, "--port", self.port, "--address", self.proxy.address)

    @property
    def taken_bytes(self) -> int:
        """From whoever reached it."""
        return sum(link.traffic[TO_TARGET].passed_bytes for link in self.links)

    @property
    def peer(self) -> str:
        return load_membership(self.pool.directory / self.name).peer


@dataclass
class Half:
    """`reached` when the peer has between a quarter and three of four of its weights."""

    peer: str
    reached: asyncio.Event
    done_bytes: int = 0
    total_bytes: int = 0

    def hear(self, event: ServeEvent) -> None:
        match event:
            case progress.StageLoading(peer=self.peer, done_bytes=done, total_bytes=total) if not self.reached.is_set():
                if total <= 4 * done <= 3 * total:
                    self.done_bytes, self.total_bytes = done, total
                    self.reached.set()
            case _:
                pass


def fetched(siege: ServingSiege, peer: str) -> list[dict[str, int]]:
    """By source, of each stage that it loaded."""
    events = (event for _, event in siege.told)
    return [dict(one.fetched_bytes) for one in events if isinstance(one, progress.WeightsLoaded) and one.peer == peer]


@pytest.mark.timeout(1200)
def test_a_killed_download_goes_on_and_the_next_peer_has_its_weights_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    model = write_model(tmp_path / "large", **LARGE)
    with (
        LivePool(tmp_path, ("near",), broker_options=("--rest-after", "0")) as pool,
        FaultProxy() as far_proxy,
        FaultProxy() as third_proxy,
    ):
        far, third = Kept(pool, "far", far_proxy), Kept(pool, "third", third_proxy)
        far.start(pool.invite())
        pool.members["far"].wait_for("In pool")
        far_proxy.throttle(BYTES_PER_S, TO_TARGET)
        invitation = pool.invite()
        owner = load_membership(pool.owner / "owner").peer

        async def kill_and_start(half: Half) -> None:
            await half.reached.wait()
            pool.kill("far")
            far.start()

        async def story() -> tuple[ServingSiege, Half]:
            half = Half(far.peer, asyncio.Event())
            killing = asyncio.create_task(kill_and_start(half))
            try:
                async with besieging(pool, model, 5, stages=STAGES, on_event=half.hear) as siege:
                    assert half.reached.is_set(), "it had everything before it could be killed"
                    far_proxy.heal()
                    third.start(invitation)
                    async with siege.streams(STREAMS):
                        await siege.guarded()
                    return siege, half
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)

        siege, half = asyncio.run(story())
        second = fetched(siege, far.peer)
        given = fetched(siege, third.peer)
        stages = [fetched(siege, load_membership(pool.directory / "near").peer), second]
    rest_bytes = sum(second[0].values())
    from_owner_bytes = sum(one.get(owner, 0) for one in given)
    in_all_bytes = sum(sum(one.values()) for one in given)
    with capsys.disabled():
        print(  # noqa: T201
            f"\nkilled with {half.done_bytes} of {half.total_bytes} bytes, fetched {rest_bytes} more; the third peer "
            f"fetched {in_all_bytes}, {from_owner_bytes} of them from the job owner, whose connections brought it "
            f"{third.taken_bytes} bytes with everything else"
        )
    assert len(second) == 1
    assert 0 < rest_bytes <= half.total_bytes - half.done_bytes
    both_bytes = half.total_bytes + sum(stages[0][0].values())
    assert both_bytes - EQUAL_BYTES < in_all_bytes <= both_bytes, "it stands by for both stages"
    assert from_owner_bytes == 0
    assert third.taken_bytes < WORDS_BYTES
    Reference(model).compare([(answer.ask, answer.tokens) for answer in siege.answers])
