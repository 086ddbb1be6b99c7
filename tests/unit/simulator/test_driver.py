"""The simulated driver runs the shipped machine: rounds take as long as links and loaded states require."""

from __future__ import annotations

import msgspec

from fusionai.coordination.training.driver import DriverMachine
from fusionai.coordination.training.state import DriverPhase
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.broker import SimulatedBroker
from fusionai.simulator.driver import SimulatedDriver
from fusionai.simulator.machines import Machines
from fusionai.simulator.network import CALM
from fusionai.simulator.scenario import Event, Scenario
from fusionai.simulator.world import World

STATE_BYTES = 3_000_000


def peer(name: str) -> PeerProfile:
    link = Link(bandwidth_bytes_per_s=1e6, latency_s=0.05)
    return PeerProfile(peer=name, flops_per_s=1e10, memory_bytes=10**9, fingerprint="cpu", uplink=link, downlink=link)


def started(machines: str, until_s: float, *events: Event) -> SimulatedDriver:
    block = BlockCost(
        block=0,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000_000,
        trainable_bytes=1_000_000,
        activation_bytes=500_000,
        output_bytes=1000,
        gradient_bytes=1000,
    )
    blocks = [msgspec.structs.replace(block, block=number) for number in range(3)]
    loss = msgspec.structs.replace(block, block=3, parameter_bytes=0, trainable_bytes=0)
    problem = Problem(
        graph_hash="g",
        blocks=(*blocks, loss),
        peers=tuple(peer(name) for name in machines),
        owner=peer("owner"),
        stages=3,
        microbatches=4,
        microbatch_tokens=100,
    )
    agenda, scenario = Agenda(), Scenario(checkpoint_every=10)
    broker = SimulatedBroker(agenda, "owner", every_beat=False)
    pool = Machines(agenda, broker, tuple(machines), scenario)
    driver = SimulatedDriver(World(agenda, StageCosts(problem), "owner", CALM, 1), broker, pool, problem, scenario)
    for event in (*(Event(0.0, name, "come") for name in machines), *events):
        agenda.at(event.at_s, lambda event=event: pool.happen(event))
    agenda.at(0.0, driver.start)
    agenda.run(until_s=until_s)
    return driver


def test_the_shipped_machine_begins_after_two_round_trips() -> None:
    assert isinstance(started("abc", 0.39).machine, DriverMachine)
    assert started("abc", 0.39).machine.phase is not DriverPhase.PROBING
    assert started("abc", 0.41).machine.phase is DriverPhase.PROBING


def test_without_a_snapshot_all_states_come_from_the_checkpoint_over_the_owners_uplink() -> None:
    calm = started("abc", 300.0)
    victim = calm.current.stages[1].peer
    driver = started("abc", 300.0, Event(120.0, victim, "crash"), Event(125.0, victim, "come"))
    (incident,) = driver.history.incidents
    assert incident.rollback
    assert incident.replayed_steps > 0
    assert incident.planned_s is not None
    assert driver.history.lost_steps == 0
    running_s = incident.planned_s + 3 * STATE_BYTES / 1e6
    resumed = [at_s for at_s in driver.history.commits_s if at_s > incident.planned_s]
    assert resumed[0] > running_s


def test_two_lost_stages_replay_from_their_snapshots() -> None:
    plan = started("abcdefg", 1.0).current
    first, second = plan.stages[0].peer, plan.stages[1].peer
    driver = started("abcdefg", 300.0, Event(200.0, first, "crash"), Event(200.0, second, "crash"))
    (incident,) = driver.history.incidents
    assert incident.restored == (0, 1)
    assert (incident.rollback, driver.history.lost_steps) == (False, 0)
    assert driver.replanner.takeovers == {"exact": 1}
