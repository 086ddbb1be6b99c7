"""Enumerates every plan of a small training problem, by the cost model of docs/planning.md written out again.

Imports the problem's types and the documented constants' values are repeated here; no cost code of the planner is used.
Every order of every choice of machines, every cut and every set of savings per stage is looked at, last stage first. A
beginning is given up only where its period, transit and update already exceed the best plan: each can only grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fusionai.scheduling.kernels.compiled import compiled
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem

_WAYS = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1))
"""Sets of techniques: recompute, optimizer state in a file, offloaded weights (only with recompute)."""
_DISK_BYTES_PER_S = 500e6
_ALLOWED = {"never": (0,), "always": (1,), "auto": (0, 1)}

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The optimum: seconds of a step (inf: nothing fits), machines first to last, cuts, number of savings per stage."""

    step_s: float
    order: tuple[str, ...]
    starts: tuple[int, ...]
    savings: tuple[tuple[int, int, int], ...]
    explored: int


def judged(problem: Problem) -> Verdict:
    """The best plan of one replica, without codecs. The owner's machine must not be one of the peers."""
    return _Case(problem).enumerated(range(len(problem.peers)), len(problem.peers))


def best_single(problem: Problem) -> float:
    """Seconds of a step of the best plan with one stage in the pool, whoever has the ends; inf where there is none."""
    case = _Case(problem)
    return min((case.enumerated([one], 1).step_s for one in range(len(problem.peers))), default=inf)


class _Case:
    def __init__(self, problem: Problem) -> None:
        assert problem.task == "train"
        assert problem.compression == "none"
        assert not problem.pinned
        places = {role.role: role.place for role in problem.roles}
        owner = problem.owner
        count = len(problem.blocks)
        last = max(1, problem.kept_last) if places["loss"] == "owner" else 0
        first = problem.kept_first if places["feed"] == "owner" else 0
        assert owner is None or all(peer.peer != owner.peer for peer in problem.peers)
        self.problem, self.first, self.cut = problem, first, count - last
        self.owner = owner
        blocks = problem.blocks
        slots = problem.optimizer_bytes_per_trainable_byte
        self.ways = [
            way
            for way in _WAYS
            if way[0] in _ALLOWED[problem.recompute]
            and way[1] in _ALLOWED[problem.offload]
            and way[2] in _ALLOWED[problem.offload_weights]
        ]
        machines = list(problem.peers)
        tail = np.zeros(6)
        busy = 0.0
        taken = 0.0
        if last:
            assert owner is not None
            mine = blocks[self.cut :]
            tail[0] = _sum(mine, "forward_flops") + _sum(mine, "backward_flops")
            tail[0] /= owner.flops_per_s * owner.share
            fixed = sum(b.parameter_bytes + (1 + slots) * b.trainable_bytes for b in mine)
            fixed += max(b.workspace_bytes for b in mine)
            before = blocks[self.cut - 1]
            # What enters the owner's part, and what leaves it; nothing lies behind the last block but its own result.
            each = _sum(mine, "activation_bytes") + before.output_bytes + before.gradient_bytes
            each += mine[-1].output_bytes + mine[-1].gradient_bytes
            room = owner.memory_bytes - fixed
            held = problem.microbatches if each * problem.microbatches <= room else int(room // each)
            if first:
                held = min(held, 3)
                busy = tail[0]
                taken = fixed + min(held, problem.microbatches) * each
            tail[1] = 1.0
        if first:
            assert owner is not None
            machines.append(owner)
        self.machines, self.tail, self.busy, self.taken = machines, tail, busy, taken

    def enumerated(self, chosen: Sequence[int], most: int) -> Verdict:
        problem, owner = self.problem, self.owner
        blocks = problem.blocks[: self.cut]
        machines = [self.machines[i] for i in chosen]
        front = -1
        if self.first:
            front = len(machines)
            machines.append(self.machines[-1])
        links = np.zeros((len(machines) + 1, len(machines) + 1, 3))
        everyone = [*machines, owner or machines[0]]
        for i, one in enumerate(everyone):
            for j, other in enumerate(everyone):
                links[i, j] = _hop(problem, one, other)
        commit = [0.0 if owner is None else _hop(problem, m, owner)[1] + _hop(problem, owner, m)[1] for m in machines]
        slots = problem.optimizer_bytes_per_trainable_byte

        def column(name: str) -> Floats:
            return np.array([float(getattr(b, name)) for b in blocks])

        memory = np.array([float(m.memory_bytes) for m in machines])
        up = np.array([m.uplink.bandwidth_bytes_per_s for m in everyone])
        down = np.array([m.downlink.bandwidth_bytes_per_s for m in everyone])
        busy = np.zeros(len(machines))
        if front >= 0:
            memory[front] -= self.taken
            busy[front] = self.busy
        able = np.array([[all(n in m.savings for n in _names(w)) for w in self.ways] for m in machines])
        order, starts, savings = np.zeros((3, len(machines)), dtype=np.int64)
        given = _Given(
            column("forward_flops"),
            column("backward_flops"),
            column("parameter_bytes"),
            column("trainable_bytes"),
            column("activation_bytes"),
            column("workspace_bytes"),
            column("output_bytes"),
            column("gradient_bytes"),
            slots,
            np.array(self.ways),
            able,
            np.array([m.flops_per_s * m.share for m in machines]),
            np.array([m.device == "cpu" for m in machines]),
            memory,
            busy,
            np.array(commit),
            np.array([m.scratch_bytes_per_s if m.scratch_bytes_per_s > 0 else _DISK_BYTES_PER_S for m in machines]),
            links,
            up,
            down,
            self.tail[0],
            int(self.tail[1]),
            problem.microbatches,
            front,
            self.first,
            problem.stages or 0,
            min(most, len(machines)) + (front >= 0),
        )
        step_s, count, explored = compiled(_enumerate)(given, order, starts, savings)
        return Verdict(
            step_s,
            tuple(machines[i].peer for i in order[:count]),
            tuple(int(s) for s in starts[:count]),
            tuple(self.ways[i] for i in savings[:count]),
            explored,
        )


def _names(way: tuple[int, int, int]) -> list[str]:
    names = ("recompute", "offload", "offload_weights")
    return [name for name, done in zip(names, way, strict=True) if done]


def _sum(blocks: tuple[BlockCost, ...], name: str) -> float:
    return float(sum(getattr(b, name) for b in blocks))


def _hop(problem: Problem, one: PeerProfile, other: PeerProfile) -> tuple[float, float, float]:
    """Bandwidth, latency, and whether both access links are occupied."""
    if one.peer == other.peer:
        return inf, 0.0, 0.0
    own = problem.links.get(f"{one.peer}>{other.peer}")
    if own is not None:
        return own.bandwidth_bytes_per_s, own.latency_s, 0.0
    width = min(one.uplink.bandwidth_bytes_per_s, other.downlink.bandwidth_bytes_per_s)
    return width, one.uplink.latency_s + other.downlink.latency_s, 1.0


class _Given(NamedTuple):
    """By block: the first eight. By machine: from `speed` to `scratch`."""

    forward: Floats
    backward: Floats
    parameters: Floats
    trainable: Floats
    activations: Floats
    workspace: Floats
    output: Floats
    gradient: Floats
    slots: float
    ways: Integers
    able: npt.NDArray[np.bool_]
    speed: Floats
    cpu: npt.NDArray[np.bool_]
    memory: Floats
    busy: Floats
    commit: Floats
    scratch: Floats
    links: Floats
    up: Floats
    down: Floats
    tail_s: float
    tails: int
    rounds: int
    front: int
    first: int
    asked: int
    most: int


def _enumerate(
    given: _Given, best_order: Integers, best_starts: Integers, best_ways: Integers
) -> tuple[float, int, int]:
    """Least seconds of a step, the stages of that plan, and how many stages were priced."""
    forward, backward, parameters, trainable = given.forward, given.backward, given.parameters, given.trainable
    activations, workspace, output, gradient = given.activations, given.workspace, given.output, given.gradient
    slots, ways, able, speed, cpu, memory = given.slots, given.ways, given.able, given.speed, given.cpu, given.memory
    busy, commit, scratch, links, up, down = given.busy, given.commit, given.scratch, given.links, given.up, given.down
    tail_s, tails, rounds, front, first = given.tail_s, given.tails, given.rounds, given.front, given.first
    asked, most = given.asked, given.most
    machines, length, choices = speed.shape[0], forward.shape[0], ways.shape[0]
    owner = machines
    # By depth: what the suffix has so far, and where its loops stand.
    times = np.zeros((5, machines + 1))
    period, transit, ups, downs, update = times[0], times[1], times[2], times[3], times[4]
    places = np.zeros((5, machines + 1), np.int64)
    start, head, at_machine, at_start, at_way = places[0], places[1], places[2], places[3], places[4]
    used = np.zeros(machines, np.bool_)
    start[0] = length
    head[0] = owner if tails else -1
    period[0] = transit[0] = tail_s
    best, best_count, explored = np.inf, 0, 0
    wanted = asked + (1 if front >= 0 else 0) if asked else 0
    depth = 0
    at_machine[0], at_start[0], at_way[0] = 0, length - 1, -1
    while depth >= 0:
        # The next (machine, start, way) at this depth.
        at_way[depth] += 1
        if at_way[depth] == choices:
            at_way[depth] = 0
            at_start[depth] -= 1
            if at_start[depth] < 0:
                at_start[depth] = start[depth] - 1
                at_machine[depth] += 1
        m = at_machine[depth]
        if m == machines:
            depth -= 1
            if depth >= 0:
                used[at_machine[depth]] = False
            continue
        if used[m] or not able[m, at_way[depth]]:
            continue
        a, b, way = at_start[depth], start[depth], at_way[depth]
        if front >= 0 and ((m == front) != (a == 0) or (m == front and b != first)):
            continue
        count = depth + 1
        if a > 0 and (count == most or (wanted and count == wanted)):
            continue
        if a == 0 and wanted and count != wanted:
            continue
        again, away, elsewhere = ways[way, 0], ways[way, 1], ways[way, 2]
        flops = 0.0
        weights = 0.0
        slot_bytes = 0.0
        state = 0.0
        kept = 0.0
        entering = 0.0
        widest = largest = biggest = piece = 0.0
        trained = 0.0
        for k in range(a, b):
            flops += forward[k] * (1 + again) + backward[k]
            weights += parameters[k]
            slot_bytes += slots * trainable[k]
            state += parameters[k] + (1 + slots) * trainable[k]
            kept += activations[k]
            if k > 0:
                entering += output[k - 1]
            trained += trainable[k]
            widest = max(widest, workspace[k])
            largest = max(largest, activations[k])
            biggest = max(biggest, parameters[k])
            piece = max(piece, min(6.0 * trainable[k], 3.0 * 2**20))
        fixed = state + widest
        if again:
            fixed += largest
        if elsewhere:
            fixed += biggest - weights
        if away:
            fixed -= slot_bytes
        if away or elsewhere:
            fixed += piece
        each = (entering if again else kept) + output[b - 1] + gradient[b - 1]
        if a > 0:
            each += output[a - 1] + gradient[a - 1]
        room = memory[m] - fixed
        explored += 1
        if room < 0:
            continue
        held = rounds if each * rounds <= room else int(np.floor(room / each))
        if held < min(rounds, tails + count):
            continue
        spared = 1.2 if cpu[m] and (again or away or elsewhere) else 1.0
        seconds = flops * spared / speed[m]
        elsewhere_speed = scratch[m] if cpu[m] else 6e9
        later = 0.0
        if elsewhere:
            seconds += 2 * weights / elsewhere_speed
            later += 2 * trained / elsewhere_speed
        if away:
            later += 2 * slot_bytes / scratch[m]
        new_period = max(period[depth], seconds + busy[m])
        new_transit = transit[depth] + seconds
        new_up = new_down = 0.0
        h = head[depth]
        if h >= 0:
            there = output[b - 1] / links[m, h, 0]
            back = gradient[b - 1] / links[h, m, 0]
            new_transit += there + back + links[m, h, 1] + links[h, m, 1]
            head_up, head_down = ups[depth], downs[depth]
            if links[m, h, 2]:
                new_up = output[b - 1] / up[m]
                head_down += output[b - 1] / down[h]
            if links[h, m, 2]:
                new_down = gradient[b - 1] / down[m]
                head_up += gradient[b - 1] / up[h]
            new_period = max(new_period, there, back, new_up, new_down, head_up, head_down)
            if m == front and tails:
                # Both ends share the owner's line, where the first one's transfers take it.
                if links[m, h, 2]:
                    new_period = max(new_period, new_up + gradient[length - 1] / up[m])
                if links[h, m, 2]:
                    new_period = max(new_period, new_down + output[length - 1] / down[m])
        if held < rounds:
            new_period = max(new_period, new_transit / held)
        new_update = max(update[depth], later)
        total = (rounds - 1) * new_period + new_transit + new_update
        if total >= best:
            continue
        if a == 0:
            total += commit[m]
            if total < best:
                best, best_count = total, count
                for k in range(count):
                    best_order[count - 1 - k] = at_machine[k]
                    best_starts[count - 1 - k] = at_start[k]
                    best_ways[count - 1 - k] = at_way[k]
            continue
        used[m] = True
        depth += 1
        period[depth], transit[depth], ups[depth], downs[depth] = new_period, new_transit, new_up, new_down
        update[depth], start[depth], head[depth] = new_update, a, m
        at_machine[depth], at_start[depth], at_way[depth] = 0, a - 1, -1
    return best, best_count, explored
