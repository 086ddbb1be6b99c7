"""A layout under thousands of events: what must hold after each, and that little is moved for what it brings."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fusionai.scheduling.coverage import solve
from fusionai.scheduling.coverage_kernels import Swarm, rate
from fusionai.scheduling.replanning import ALLOWANCE, Change, Keeper
from fusionai.scheduling.swarm import chosen


def swarm(seed: int, peers: int, length: int) -> Swarm:
    draw = Random(seed)
    room = np.array([draw.choice([1, 2, 3, 6]) for _ in range(peers)], dtype=np.int64)
    crossing = np.full(length + 1, 1e6)
    crossing[0] = crossing[length] = 0.0
    return Swarm(
        work=np.arange(length + 1) * 1e12,
        speed=np.array([draw.choice([1e12, 3e12, 1e13]) for _ in range(peers)]),
        up=np.array([draw.choice([1e6, 1e7]) for _ in range(peers)]),
        down=np.full(peers, 1e7),
        forward_bytes=crossing,
        gradient_bytes=crossing,
        reach=np.minimum(np.arange(length)[None, :] + room[:, None], length),
    )


def check(keeper: Keeper, present: set[int]) -> None:
    """Only who is there holds blocks, within memory, and the cover is the sum of their rates."""
    layout, model = keeper.layout, keeper.swarm
    cover = np.zeros(model.reach.shape[1])
    for peer in range(len(model.speed)):
        start, end = int(layout.start[peer]), int(layout.end[peer])
        if start == end:
            continue
        assert peer in present
        assert end <= model.reach[peer, start]
        first, last = keeper.home[peer]
        assert first <= start
        assert end <= last <= model.reach[peer, first]
        cover[start:end] += rate(model, peer, start, end)
    assert keeper.cover == pytest.approx(cover.min())


def moved_blocks(before: np.ndarray, change: Change, newcomer: int | None) -> int:
    """Of peers that were there, blocks in the new intervals that they had not loaded."""
    return sum(
        len(set(range(*interval)) - set(range(*before[peer])))
        for peer, interval in change.intervals.items()
        if peer != newcomer
    )


@pytest.mark.slow
def test_events_keep_the_layout_sound_and_the_account() -> None:
    model = swarm(1, peers=24, length=8)
    draw = Random(2)
    present = set(range(16))
    keeper = Keeper(model, present)
    moved = lost = 0
    for _ in range(60):
        if len(present) > 12 and draw.random() < 0.5:
            peer = draw.choice(sorted(present))
            present.discard(peer)
            before = keeper.home.copy()
            held = int(keeper.layout.end[peer] - keeper.layout.start[peer])
            change = keeper.leave(peer)
            assert change.lost == held
            assert change.moved == moved_blocks(before, change, None)
        else:
            absent = sorted(set(range(24)) - present)
            if not absent:
                continue
            peer = draw.choice(absent)
            present.add(peer)
            before = keeper.home.copy()
            change = keeper.join(peer)
            assert change.moved == moved_blocks(before, change, peer)
        moved, lost = moved + change.moved, lost + change.lost
        assert moved <= ALLOWANCE * lost
        check(keeper, present)
        assert keeper.cover <= keeper.prove(5) * (1 + 1e-9)


@pytest.mark.slow
def test_an_even_layout_stays_where_it_is() -> None:
    keeper = Keeper(swarm(3, peers=40, length=8), range(40))
    before = keeper.layout.start.copy()
    held = keeper.layout.end - keeper.layout.start
    weakest = int(np.argmin(np.where(held > 0, keeper.layout.rate, np.inf)))
    keeper.leave(weakest)
    change = keeper.join(weakest)
    assert change.moved <= ALLOWANCE * int(held[weakest])
    assert (keeper.layout.start != before).sum() <= 1 + ALLOWANCE * int(held[weakest])


@pytest.mark.slow
def test_not_far_from_planning_anew() -> None:
    model = swarm(4, peers=60, length=8)
    draw = Random(5)
    present = set(range(40))
    keeper = Keeper(model, present)
    for _ in range(40):
        peer = draw.choice(sorted(present))
        keeper.leave(peer)
        present.discard(peer)
        peer = draw.choice(sorted(set(range(60)) - present))
        keeper.join(peer)
        present.add(peer)
    anew = solve(chosen(model, np.array(sorted(present))), effort=20_000_000)
    assert keeper.cover >= 0.85 * anew.cover


@pytest.mark.slow
def test_who_slows_down_is_relieved() -> None:
    model = swarm(6, peers=20, length=8)
    keeper = Keeper(model, range(20))
    busiest = int(np.argmax(keeper.layout.rate))
    start, end = int(keeper.layout.start[busiest]), int(keeper.layout.end[busiest])
    keeper.slow(busiest, float(model.speed[busiest]) / 100)
    check(keeper, set(range(20)))
    rates = keeper.layout.rate.copy()
    rates[busiest] = rate(keeper.swarm, busiest, start, end)
    assert keeper.cover > 0
    assert keeper.cover <= keeper.prove(5) * (1 + 1e-9)


@pytest.mark.slow
def test_the_last_peer_of_a_block_leaves_a_hole_that_the_next_fills() -> None:
    model = swarm(7, peers=3, length=4)
    model.reach[:] = 4
    keeper = Keeper(model, [0])
    change = keeper.leave(0)
    assert keeper.cover == 0.0
    assert change.moved == 0
    change = keeper.join(1)
    assert change.brought == 4
    assert keeper.cover > 0


@pytest.mark.slow
def test_strangers_can_be_made_known() -> None:
    small, large = swarm(8, peers=4, length=4), swarm(8, peers=4, length=4)
    large = Swarm(
        small.work, np.append(small.speed, 1e13), np.append(small.up, 1e7), np.append(small.down, 1e7),
        small.forward_bytes, small.gradient_bytes, np.vstack([small.reach, [[4, 4, 4, 4]]]),
    )  # fmt: skip
    keeper = Keeper(small, range(4))
    before = keeper.cover
    keeper.know(large)
    change = keeper.join(4)
    assert change.brought > 0
    assert keeper.cover >= before
    with pytest.raises(ValueError, match="is there already"):
        keeper.join(4)
    with pytest.raises(ValueError, match="more behind them"):
        keeper.know(small)
