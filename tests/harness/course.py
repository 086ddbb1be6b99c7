"""Courses of events: from a seed to a job with its faults, each at some moment of some phase. One seed, one course.

`python -m harness.course SEED` (in `tests`) runs one and tells its story. Neighbour: `harness.world` runs it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Final

from fusionai.coordination.training.state import DriverPhase
from harness.network import Process
from harness.topology import Layout, Topology, random_topology
from harness.virtual_broker import OWNER
from harness.world import Trigger, World

MOMENTS: Final = {
    DriverPhase.ATTACHING: 12,
    DriverPhase.LOADING: 8,
    DriverPhase.REPLAYING: 25,
    DriverPhase.PROBING: 12,
    DriverPhase.RUNNING: 60,
    DriverPhase.SAVING: 12,
    DriverPhase.WAITING: 6,
}
"""Within how many events of a phase a fault strikes. The first one strikes a running job or any other moment of a
driver's life, the next ones may strike its recovery."""


def random_layout(topology: Topology, choose: random.Random) -> tuple[Layout, tuple[str, ...]]:
    """A plan and the spares beside it: some peers run two stages, the last stage is often in the owner's process."""
    peers = [f"p{number}" for number in range(topology.stages)]
    places: dict[int, str] = {}
    for stage in range(topology.stages):
        shares = stage > 0 and places[stage - 1] != OWNER and choose.random() < 0.2
        places[stage] = places[stage - 1] if shares else peers[stage]
    if choose.random() < 0.6:
        places[topology.last] = OWNER
    spares = tuple(f"q{number}" for number in range(choose.choice((0, 1, 1, 2, 2, 3))))
    standbys = {
        stage: choose.choice(spares)
        for stage in range(topology.stages)
        if spares and stage not in topology.stateless and places[stage] != OWNER and choose.random() < 0.9
    }
    return Layout(places=places, standbys=standbys, snapshot_every=choose.choice((1, 2, 2, 3))), spares


def undisturbed(seed: int, *, any_order: bool = False) -> World:
    choose = random.Random(f"course {seed}")
    topology = random_topology(choose, most_steps=9, most_microbatches=3)
    layout, spares = random_layout(topology, choose)
    return World(topology, layout, choose.randrange(2**32), spares=spares, any_order=any_order)


def disturbed(seed: int, *, any_order: bool = False) -> World:
    """One to four faults; most of them while others are recovered from."""
    world = undisturbed(seed, any_order=any_order)
    choose = random.Random(f"faults {seed}")
    faults = Faults(world, choose)
    last: Trigger | None = None
    for _ in range(choose.choice((1, 1, 2, 2, 3, 4))):
        chained = last is not None and choose.random() < 0.7
        recovering = (DriverPhase.ATTACHING, DriverPhase.LOADING, DriverPhase.REPLAYING, DriverPhase.WAITING)
        usual = (*[DriverPhase.RUNNING] * 9, DriverPhase.SAVING, DriverPhase.PROBING, DriverPhase.ATTACHING)
        phase = choose.choice((*recovering, DriverPhase.RUNNING) if chained else usual)
        late = chained or phase is not DriverPhase.RUNNING
        last = Trigger(
            phase=phase,
            step=0 if late else choose.randrange(world.topology.steps),
            countdown=1 + int(MOMENTS[phase] * choose.random() ** 2),
            action=faults.one(choose.choice(EVERY_FAULT)),
            after=last if chained else None,
        )
        world.triggers.append(last)
    return world


class Faults:
    """Each takes what it strikes from the seed, at the moment it strikes."""

    def __init__(self, world: World, choose: random.Random) -> None:
        self.world = world
        self.choose = choose

    def one(self, fault: Fault) -> Callable[[], None]:
        def strike() -> None:
            phase = self.world.driver.phase
            moments = [phase.value, *self._under_way()]
            if not self.world.driver.ended and fault(self):
                self.world.struck.update((fault.__name__, moment) for moment in moments)

        return strike

    # -------------------------------------------------------------------------------------------------- processes

    def a_stage_s_peer_dies(self) -> bool:
        return self._kill(self._one_of(self._workers()))

    def a_guard_dies(self) -> bool:
        return self._kill(self._one_of(set(self._layout.standbys.values())))

    def two_peers_die_at_once(self) -> bool:
        members = sorted(self._layout.members - {OWNER})
        for peer in self.choose.sample(members, min(2, len(members))):
            self._kill(peer)
        return len(members) > 1

    def a_peer_dies_with_its_guard(self) -> bool:
        guarded = {
            stage: standby for stage, standby in self._layout.standbys.items() if self._layout.places[stage] != OWNER
        }
        if not guarded:
            return False
        stage = self.choose.choice(sorted(guarded))
        self._kill(self._layout.places[stage])
        return self._kill(guarded[stage])

    def the_owner_s_process_dies(self) -> bool:
        self.world.restart_driver()
        return True

    def the_owner_s_process_freezes(self) -> bool:
        return self._freeze(self.world.driver.process)

    def the_broker_dies(self) -> bool:
        self.world.restart_broker(self.choose.choice((0.0, 0.5, 5.0, 20.0)))
        return True

    def the_broker_freezes(self) -> bool:
        return self._freeze(self.world.broker.process)

    def a_peer_freezes(self) -> bool:
        peer = self._one_of(self._layout.members - {OWNER})
        return peer is not None and self._freeze(self.world.members[peer].process)

    def a_peer_flaps(self) -> bool:
        peer = self._one_of(self._layout.members - {OWNER})
        if peer is None:
            return False
        for time in range(4):
            self.world.network.after(0.6 * time, lambda: self.world.kill(peer, back_after_s=0.2))
        return True

    def many_come_and_go(self) -> bool:
        world = self.world
        for number in range(8):
            peer = f"new{len(world.members)}-{number}"

            def come(peer: str = peer) -> None:
                if world.broker.process.alive:
                    world.broker.enrol(peer)
                    world.boot(peer)

            world.network.after(0.1 * number, come)
            if number % 3:
                gone_s = self.choose.uniform(0.5, 4.0)
                world.network.after(gone_s + 0.8, lambda peer=peer: world.kill(peer) if peer in world.members else None)
        return True

    # ------------------------------------------------------------------------------------------------------- links

    def a_link_breaks(self) -> bool:
        pair = self._pair()
        if pair is not None:
            self.world.network.cut(*pair, members=True)
        return pair is not None

    def a_link_breaks_twice(self) -> bool:
        pair = self._pair()
        if pair is not None:
            self.world.network.cut(*pair, members=True)
            self.world.network.after(0.3, lambda: self.world.network.cut(*pair, members=True))
        return pair is not None

    def a_control_connection_breaks(self) -> bool:
        peer = self._one_of(self._layout.members - {OWNER})
        if peer is not None:
            self.world.network.cut(self.world.driver.process, self.world.members[peer].process, members=False)
        return peer is not None

    def one_direction_is_blocked(self) -> bool:
        pair = self._pair()
        if pair is None:
            return False
        one, other = (process.name for process in pair)
        self.world.network.block(one, other)
        self.world.network.after(self.choose.uniform(0.5, 9.0), lambda: self.world.network.heal(one, other))
        return True

    # -------------------------------------------------------------------------------------------- work, plans, people

    def tensors_come_twice(self) -> bool:
        self.world.twice = self.choose.choice((1, 5, 50))
        return True

    def work_fails(self) -> bool:
        stages = [stage for member in self.world.members.values() for stage in member.stages.values()]
        if not stages:
            return False
        stage = self.choose.choice(stages)
        stage.failing = self.world.made_to_fail = True
        return True

    def a_peer_drains(self) -> bool:
        peer = self._one_of(self._layout.members - {OWNER})
        if peer is None or not self.world.broker.process.alive:
            return False
        self.world.broker.leave(self.world.members[peer].process)
        self.world.network.after(10.0, lambda: self._back(peer))
        return True

    def a_stage_is_to_move(self) -> bool:
        def move(layout: Layout) -> Layout | None:
            spares = sorted(set(layout.standbys.values()))
            stages = [stage for stage, peer in layout.places.items() if peer != OWNER]
            if not spares or not stages:
                return None
            stage, spare = self.choose.choice(stages), self.choose.choice(spares)
            places = {**layout.places, stage: spare}
            standbys = {at: standby for at, standby in layout.standbys.items() if standby not in places.values()}
            if layout.standbys.get(stage) == spare and layout.places[stage] not in places.values():
                standbys[stage] = layout.places[stage]  # they change places
            return Layout(places=places, standbys=standbys, snapshot_every=layout.snapshot_every, cut=layout.cut)

        self.world.driver.propose(move)
        return True

    def another_cut_is_wanted(self) -> bool:
        def cut(layout: Layout) -> Layout:
            return Layout(
                places=layout.places,
                standbys=layout.standbys,
                snapshot_every=layout.snapshot_every,
                cut="b" if layout.cut == "a" else "a",
            )

        self.world.driver.propose(cut)
        return True

    def guards_change(self) -> bool:
        def change(layout: Layout) -> Layout:
            spares = sorted(set(layout.standbys.values()))
            standbys = {stage: self.choose.choice(spares) for stage in layout.standbys if self.choose.random() < 0.7}
            return Layout(places=layout.places, standbys=standbys, snapshot_every=layout.snapshot_every, cut=layout.cut)

        self.world.driver.propose(change)
        return True

    def the_job_is_stopped(self) -> bool:
        self.world.stop("asked to")
        return True

    # ------------------------------------------------------------------------------------------------------ details

    def _under_way(self) -> list[str]:
        """What else goes on in a running job."""
        machine = self.world.driver.machine
        if machine.phase is not DriverPhase.RUNNING:
            return []
        going_on = {
            "evaluating": machine.saves.evaluating is not None,
            "writing a checkpoint": machine.saves.saving is not None,
            "journalling": machine.votes.journalling is not None,
            "about to change plans": machine.pending is not None,
            "rolled back": machine.step < machine.official,
        }
        return [name for name, holds in going_on.items() if holds]

    @property
    def _layout(self) -> Layout:
        return self.world.driver.layout

    def _workers(self) -> set[str]:
        return set(self._layout.places.values()) - {OWNER}

    def _one_of(self, names: set[str] | frozenset[str]) -> str | None:
        return self.choose.choice(sorted(names)) if names else None

    def _pair(self) -> tuple[Process, Process] | None:
        names = sorted(self._layout.members | {OWNER})
        if len(names) < 2:
            return None
        one, other = self.choose.sample(names, 2)
        return self.world.members[one].process, self.world.members[other].process

    def _kill(self, peer: str | None) -> bool:
        """Sooner or later its machine is there again, or a job without a spare would wait for ever."""
        if peer is None:
            return False
        back_s = self.choose.choice((0.05, 1.0, 4.0, 15.0))
        self.world.kill(peer, silently=self.choose.random() < 0.3, back_after_s=back_s)
        return True

    def _freeze(self, process: Process) -> bool:
        self.world.freeze(process, self.choose.choice((0.1, 1.0, 5.0, 15.0)))
        return True

    def _back(self, peer: str) -> None:
        if not self.world.members[peer].process.alive:
            self.world.boot(peer)


Fault = Callable[[Faults], bool]
"""Whether it could strike."""
EVERY_FAULT: Final[tuple[Fault, ...]] = (
    Faults.a_stage_s_peer_dies,
    Faults.a_stage_s_peer_dies,
    Faults.a_guard_dies,
    Faults.two_peers_die_at_once,
    Faults.a_peer_dies_with_its_guard,
    Faults.the_owner_s_process_dies,
    Faults.the_owner_s_process_dies,
    Faults.the_owner_s_process_freezes,
    Faults.the_broker_dies,
    Faults.the_broker_freezes,
    Faults.a_peer_freezes,
    Faults.a_link_breaks,
    Faults.a_link_breaks_twice,
    Faults.a_control_connection_breaks,
    Faults.one_direction_is_blocked,
    Faults.tensors_come_twice,
    Faults.work_fails,
    Faults.a_peer_flaps,
    Faults.many_come_and_go,
    Faults.a_peer_drains,
    Faults.a_stage_is_to_move,
    Faults.another_cut_is_wanted,
    Faults.guards_change,
    Faults.the_job_is_stopped,
)
"""The commonest twice."""


def main() -> None:
    world = disturbed(int(sys.argv[1]), any_order="any" in sys.argv)
    sys.stdout.write(f"{world.topology}\n{world.plan[1]}\n")
    try:
        world.run()
    finally:
        sys.stdout.write(f"{world.stories()}\n{dict(world.struck)}\n{dict(world.told)}\n")


if __name__ == "__main__":
    main()
