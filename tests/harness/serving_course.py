"""Courses of events for serving jobs: from a seed to streams and faults, each at some moment of some phase.

`python -m harness.serving_course SEED` (in `tests`) runs one and tells its story. Neighbour: `harness.virtual_serving`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Final

from fusionai.coordination.serving import interface
from fusionai.coordination.serving.admission import BatchLimits
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.state import ServingPhase
from harness.network import Process
from harness.virtual_serving import OWNER, PROBE, Trigger, World

MOMENTS: Final = {
    ServingPhase.ENLISTING: 10,
    ServingPhase.LOADING: 8,
    ServingPhase.REBUILDING: 15,
    ServingPhase.PROBING: 8,
    ServingPhase.RUNNING: 250,
    ServingPhase.WAITING: 6,
}


def random_world(choose: random.Random, *, any_order: bool) -> World:
    count = choose.choice((1, 2, 3, 3, 4))
    peers = [f"p{number}" for number in range(count)]
    places = dict(enumerate(peers, 1))
    if choose.random() < 0.7:
        places = {0: OWNER, **places, count + 1: OWNER}
        caching = frozenset(range(1, count + 1))
    else:
        places = dict(enumerate(peers))
        caching = frozenset(places)
    spares = tuple(f"q{number}" for number in range(choose.choice((0, 1, 1, 2, 3))))
    standbys = {
        stage: choose.choice(spares)
        for stage, peer in places.items()
        if spares and peer != OWNER and choose.random() < 0.8
    }
    checkable = frozenset(range(len(places) - 1))
    roles = ServingRoles(version=1, owner=OWNER, places=places, standbys=standbys, caching=caching, checkable=checkable)
    page_tokens = choose.choice((2, 4))
    chunk = choose.choice((4, 8))
    limits = BatchLimits(
        pages=choose.choice((28, 40, 80)),
        page_tokens=page_tokens,
        sessions=choose.choice((2, 4, 8)),
        pass_tokens=max(len(PROBE), chunk * choose.choice((1, 2, 3))),
        in_flight=choose.choice((1, 2, 4)),
        chunk_tokens=chunk,
        queue=choose.choice((2, 4, 16)),
        prefix=choose.random() < 0.8,
        reserve_tokens=choose.choice((0, 4, 16)),
        probe_tokens=len(PROBE),
    )
    seed = choose.randrange(2**32)
    return World(roles, limits, seed, spares=spares, retain=choose.random() < 0.85, any_order=any_order)


def submit_some(world: World, choose: random.Random) -> None:
    """Sessions that come at different times; many begin alike, some are cancelled or have a deadline."""
    longest = (world.limits.pages - 3) * world.limits.page_tokens
    beginnings = [tuple(choose.randrange(50) for _ in range(20)) for _ in range(2)]
    for number in range(1, choose.choice((4, 8, 12)) + 1):
        start = choose.choice(beginnings)[: choose.randrange(21)]
        prompt = (*start, *(choose.randrange(50) for _ in range(choose.randrange(1, 8))))
        rows = choose.random()
        max_tokens = 0 if rows < 0.1 else choose.randrange(1, 25)
        spec = SessionSpec(
            number=number,
            scope=choose.choice("ab"),
            prompt=prompt,
            max_tokens=min(max_tokens, longest - len(prompt)),
            deadline_s=choose.uniform(1.0, 20.0) if choose.random() < 0.1 else None,
            all_rows=rows < 0.2,
            output="hidden" if rows < 0.1 else "logits",
        )
        come_s = choose.uniform(0.0, 4.0)
        world.answers_to_come += 1
        world.network.after(come_s, lambda spec=spec: world.submit(spec))
        if choose.random() < 0.1:
            world.network.after(come_s + choose.uniform(0.1, 6.0), lambda number=number: world.cancel(number))


def undisturbed(seed: int, *, any_order: bool = False) -> World:
    choose = random.Random(f"serving {seed}")
    world = random_world(choose, any_order=any_order)
    submit_some(world, choose)
    return world


def disturbed(seed: int, *, any_order: bool = False) -> World:
    """One to four faults; most of the later ones while others are recovered from."""
    world = undisturbed(seed, any_order=any_order)
    choose = random.Random(f"serving faults {seed}")
    if seed % 3 == 0 and len({*world.members} - {OWNER, *world.roles.places.values()}) > 1:
        world.accuses = 0.2
    faults = Faults(world, choose)
    last: Trigger | None = None
    for _ in range(choose.choice((1, 1, 2, 2, 3, 4))):
        chained = last is not None and choose.random() < 0.7
        recovering = (ServingPhase.ENLISTING, ServingPhase.LOADING, ServingPhase.REBUILDING, ServingPhase.PROBING)
        usual = (*[ServingPhase.RUNNING] * 9, ServingPhase.LOADING, ServingPhase.PROBING, ServingPhase.ENLISTING)
        waiting = ServingPhase.WAITING
        phase = choose.choice((*recovering, waiting, ServingPhase.RUNNING, ServingPhase.RUNNING) if chained else usual)
        last = Trigger(
            phase=phase,
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
            if fault(self):
                self.world.told[fault.__name__] += 1

        return strike

    def a_stage_s_peer_dies(self) -> bool:
        return self._kill(self._one_of(set(self._roles.places.values())))

    def a_guard_dies(self) -> bool:
        return self._kill(self._one_of(set(self._roles.standbys.values())))

    def two_die_at_once(self) -> bool:
        members = sorted(self._roles.members - {OWNER})
        for peer in self.choose.sample(members, min(2, len(members))):
            self._kill(peer)
        return len(members) > 1

    def all_die(self) -> bool:
        for peer in sorted(self._roles.members - {OWNER}):
            self._kill(peer)
        return True

    def a_peer_dies_with_its_guard(self) -> bool:
        standbys = self._roles.standbys
        stage = self.choose.choice(sorted(standbys)) if standbys else -1
        return stage >= 0 and self._kill(self._roles.places[stage]) and self._kill(standbys[stage])

    def a_peer_freezes(self) -> bool:
        peer = self._one_of(self._roles.members)
        return peer is not None and self._freeze(self.world.members[peer].process)

    def the_owner_freezes(self) -> bool:
        return self._freeze(self.world.members[OWNER].process)

    def a_peer_flaps(self) -> bool:
        peer = self._one_of(self._roles.members)
        if peer is None:
            return False
        for time in range(4):
            self.world.network.after(0.6 * time, lambda: self.world.kill(peer, back_after_s=0.2))
        return True

    def many_join_and_some_leave(self) -> bool:
        world = self.world
        for number in range(5):
            peer = f"n{len(world.members)}-{number}"
            world.network.after(0.3 * number, lambda peer=peer: world.boot(peer))
            if number % 2:
                world.network.after(
                    0.3 * number + self.choose.uniform(0.5, 6.0), lambda peer=peer: self._kill(peer, back=False)
                )
        return True

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
        peer = self._one_of(self._roles.members)
        if peer is not None:
            owner = self.world.members[OWNER].process
            self.world.network.cut(owner, self.world.members[peer].process, members=False)
        return peer is not None

    def one_direction_is_blocked(self) -> bool:
        pair = self._pair()
        if pair is None:
            return False
        one, other = (process.name for process in pair)
        self.world.network.block(one, other)
        self.world.network.after(self.choose.uniform(0.5, 12.0), lambda: self.world.network.heal(one, other))
        return True

    def messages_come_twice(self) -> bool:
        self.world.twice = self.choose.choice((1, 5, 50))
        return True

    def work_fails(self) -> bool:
        peer = self._one_of(self._roles.members, owner=True)
        if peer is not None:
            self.world.members[peer].fails = self.choose.choice((1, 1, 2 if peer == OWNER else 3))
        return peer is not None

    def a_peer_leaves(self) -> bool:
        peer = self._one_of(self._roles.members)
        if peer is None:
            return False
        self.world.draining.add(peer)
        self.world.driver.handle(interface.MemberLeaving(peer))
        self.world.network.after(15.0, lambda: self.world.draining.discard(peer))
        return True

    def a_stage_is_to_move(self) -> bool:
        return self._take_in(self._roles.partition)

    def another_cut_is_wanted(self) -> bool:
        return self._give(dict(self._roles.places), self._roles.partition + "'")

    def another_cut_takes_a_machine_in(self) -> bool:
        """As where `scheduling.standby.continuation` found a faster plan."""
        return self._take_in(self._roles.partition + "'")

    def requests_are_cancelled(self) -> bool:
        for number in list(self.world.answers):
            if self.choose.random() < 0.4:
                self.world.cancel(number)
        return True

    # ------------------------------------------------------------------------------------------------------ details

    def _take_in(self, partition: str) -> bool:
        """A machine that runs no stage gets one."""
        world, roles = self.world, self._roles
        idle = [p for p in sorted(world.members) if p != OWNER and world.present(p) and p not in roles.places.values()]
        stages = [stage for stage, peer in roles.places.items() if peer != OWNER]
        if not idle or not stages:
            return False
        places = {**roles.places, self.choose.choice(stages): self.choose.choice(idle)}
        return self._give(places, partition)

    def _give(self, places: dict[int, str], partition: str) -> bool:
        standbys = {stage: peer for stage, peer in self._roles.standbys.items() if peer not in places.values()}
        roles = ServingRoles(
            version=0,
            owner=OWNER,
            places=places,
            standbys=standbys,
            caching=self._roles.caching,
            checkable=self._roles.checkable,
            partition=partition,
        )
        self.world.driver.handle(interface.PlanGiven(self.world.minted(roles), self.world.machine.lost))
        return True

    @property
    def _roles(self) -> ServingRoles:
        return self.world.roles

    def _one_of(self, names: set[str] | frozenset[str], *, owner: bool = False) -> str | None:
        known = sorted(names if owner else names - {OWNER})
        return self.choose.choice(known) if known else None

    def _pair(self) -> tuple[Process, Process] | None:
        names = sorted(self._roles.members | {OWNER})
        if len(names) < 2:
            return None
        one, other = self.choose.sample(names, 2)
        return self.world.members[one].process, self.world.members[other].process

    def _kill(self, peer: str | None, *, back: bool = True) -> bool:
        """Sooner or later its machine is there again, or a job without a spare would wait for ever."""
        if peer is None or peer == OWNER:
            return False
        back_s = self.choose.choice((0.05, 1.0, 4.0, 15.0))
        self.world.kill(peer, silently=self.choose.random() < 0.3, back_after_s=back_s if back else None)
        return True

    def _freeze(self, process: Process) -> bool:
        self.world.freeze(process, self.choose.choice((0.1, 1.0, 5.0, 15.0)))
        return True


Fault = Callable[[Faults], bool]
"""Whether it could strike."""
EVERY_FAULT: Final[tuple[Fault, ...]] = (
    Faults.a_stage_s_peer_dies,
    Faults.a_stage_s_peer_dies,
    Faults.a_stage_s_peer_dies,
    Faults.a_guard_dies,
    Faults.two_die_at_once,
    Faults.all_die,
    Faults.a_peer_dies_with_its_guard,
    Faults.a_peer_freezes,
    Faults.the_owner_freezes,
    Faults.a_peer_flaps,
    Faults.many_join_and_some_leave,
    Faults.a_link_breaks,
    Faults.a_link_breaks_twice,
    Faults.a_control_connection_breaks,
    Faults.one_direction_is_blocked,
    Faults.messages_come_twice,
    Faults.work_fails,
    Faults.a_peer_leaves,
    Faults.a_stage_is_to_move,
    Faults.another_cut_is_wanted,
    Faults.another_cut_takes_a_machine_in,
    Faults.requests_are_cancelled,
)


def main() -> None:
    world = disturbed(int(sys.argv[1]), any_order="any" in sys.argv)
    sys.stdout.write(f"{world.limits}\n{world.roles}\n")
    try:
        world.run()
    finally:
        sys.stdout.write(f"{world.stories()}\n{dict(world.told)}\n")


if __name__ == "__main__":
    main()
