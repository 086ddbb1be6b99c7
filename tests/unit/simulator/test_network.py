"""A transfer takes what the slower link takes; links are shared evenly, connections keep their order."""

from __future__ import annotations

import pytest

from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.network import CALM, MATHIS, SEGMENT_BYTES, SimulatedNetwork, Weather

BLOCK = BlockCost(
    block=0,
    forward_flops=1.0,
    backward_flops=1.0,
    parameter_bytes=0,
    trainable_bytes=0,
    activation_bytes=0,
    output_bytes=0,
    gradient_bytes=0,
)


def peer(name: str, up: float, down: float, latency_s: float = 0.0) -> PeerProfile:
    return PeerProfile(
        peer=name,
        flops_per_s=1.0,
        memory_bytes=1,
        uplink=Link(bandwidth_bytes_per_s=up, latency_s=latency_s),
        downlink=Link(bandwidth_bytes_per_s=down, latency_s=latency_s),
    )


class Stand:
    def __init__(self, *peers: PeerProfile, links: dict[str, Link] | None = None, weather: Weather = CALM) -> None:
        problem = Problem(
            graph_hash="g", blocks=(BLOCK,), peers=peers, microbatches=1, microbatch_tokens=1, links=links or {}
        )
        self.agenda = Agenda()
        self.network = SimulatedNetwork(self.agenda, StageCosts(problem), weather, seed=7)
        self.arrived: dict[str, float] = {}

    def send(self, sender: str, receiver: str, size_bytes: float, word: str) -> None:
        def deliver() -> None:
            self.arrived[word] = self.agenda.now_s

        self.network.send(sender, receiver, size_bytes, deliver)

    def ran(self) -> dict[str, float]:
        self.agenda.run()
        return self.arrived


@pytest.mark.parametrize(("up", "down"), [(10.0, 1000.0), (1000.0, 10.0), (10.0, 10.0)])
def test_an_undisturbed_transfer_takes_the_slower_link_and_the_latency(up: float, down: float) -> None:
    stand = Stand(peer("a", up, 1.0, 0.25), peer("b", 1.0, down, 0.5))
    stand.send("a", "b", 100.0, "all")
    stand.send("a", "b", 0.0, "word")
    # The sender's uplink and the receiver's downlink each have a latency of their own.
    assert stand.ran() == {"word": pytest.approx(0.75), "all": pytest.approx(10.75)}


def test_one_machine_needs_no_link() -> None:
    stand = Stand(peer("a", 1.0, 1.0, 5.0))
    stand.send("a", "a", 1e9, "all")
    assert stand.ran() == {"all": 0.0}
    assert not stand.network.sent_bytes


def test_transfers_of_one_connection_follow_each_other() -> None:
    stand = Stand(peer("a", 10.0, 10.0), peer("b", 10.0, 10.0))
    stand.send("a", "b", 10.0, "first")
    stand.send("a", "b", 20.0, "second")
    assert stand.ran() == {"first": pytest.approx(1.0), "second": pytest.approx(3.0)}
    assert stand.network.sent_bytes == {"a": 30.0}


def test_connections_share_an_uplink_evenly() -> None:
    stand = Stand(peer("a", 10.0, 10.0), peer("b", 1.0, 1e9), peer("c", 1.0, 1e9))
    stand.send("a", "b", 10.0, "small")
    stand.send("a", "c", 30.0, "large")
    # Half the uplink each until the small one is through, then the large one has it all: 4 s of work in 4 s.
    assert stand.ran() == {"small": pytest.approx(2.0), "large": pytest.approx(4.0)}


def test_a_downlink_is_shared_too() -> None:
    stand = Stand(peer("a", 1e9, 1.0), peer("b", 1e9, 1.0), peer("c", 1.0, 10.0))
    stand.send("a", "c", 10.0, "one")
    stand.send("b", "c", 10.0, "other")
    assert stand.ran() == {"one": pytest.approx(2.0), "other": pytest.approx(2.0)}


def test_an_exceptional_link_takes_neither_access_link() -> None:
    links = {"a>b": Link(bandwidth_bytes_per_s=5.0, latency_s=1.0)}
    stand = Stand(peer("a", 10.0, 10.0), peer("b", 10.0, 10.0), peer("c", 10.0, 10.0), links=links)
    stand.send("a", "b", 10.0, "own")
    stand.send("a", "c", 10.0, "access")
    assert stand.ran() == {"own": pytest.approx(3.0), "access": pytest.approx(1.0)}


def test_packet_loss_costs_speed_by_the_formula_of_mathis() -> None:
    weather = Weather(loss=0.01)
    stand = Stand(peer("a", 1e9, 1e9, 0.05), peer("b", 1e9, 1e9), weather=weather)
    stand.send("a", "b", 1e6, "all")
    round_trip_s = 0.1
    most = MATHIS * SEGMENT_BYTES / (round_trip_s * 0.1)
    assert most < 1e9
    assert stand.ran()["all"] == pytest.approx(0.05 + 1e6 / most)


def test_jitter_delays_and_never_reorders_and_depends_on_the_seed_alone() -> None:
    def arrivals() -> dict[str, float]:
        stand = Stand(peer("a", 1e9, 1e9, 0.1), peer("b", 1e9, 1e9), weather=Weather(jitter_s=0.05))
        for number in range(20):
            stand.send("a", "b", 0.0, str(number))
        return stand.ran()

    first = arrivals()
    times = list(first.values())
    assert list(first) == [str(number) for number in range(20)]
    assert times == sorted(times)
    assert min(times) > 0.1
    assert first == arrivals()
