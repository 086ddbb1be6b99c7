"""Plans a training job with any number of replicas: groups of machines that each train one as a pipeline.

All replicas take steps of equal size and wait for each other, so the slowest one sets the speed. Groups are balanced
first in memory and then in speed. Then peers of the slowest group are exchanged for peers of others while that makes
its plan faster. If not all requested replicas fit, there are as many as fit.

`plan` joins the groups' pipelines to one plan with one journal and one commit: a step's microbatches are dealt to the
replicas, and a stage of any replica has a standby and is taken over like any other. What the replicas share (the job
owner's process and line, the sums) is predicted for the whole plan, and the homes of the sums are chosen where they
take the least time. The bound of such a plan assumes that all machines compute all the time.

`planner` plans one chain; `client.training.replicas` runs groups that synchronise after rounds of local steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes, format_speed
from fusionai.scheduling.planner import plan as one_chain
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.standby.assignment import with_standbys
from fusionai.scheduling.training.cut_bits import dependence
from fusionai.scheduling.training.prediction import held_per_byte, predict, reduction_s
from fusionai.wire.codecs import FOR_PLANS, LADDER, Codec, Exchanged, bytes_on_link

MOST_TRIES: Final = 60
"""Limit on plans made while improving groups; each takes milliseconds to tenths of a second."""
ALIKE: Final = 1.02
"""Groups are not improved if the slowest step is at most this factor above the fastest."""
COUNTS: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of groups that are tried if the number is not given."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group and its plan. `peers`: ids, including peers that the plan does not use."""

    peers: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Exchanging:
    """How often replicas synchronise and how they pack what they send. `lag`: steps they compute during an
    exchange."""

    every: int
    codec: Exchanged
    lag: int = 0

    @property
    def beside(self) -> float:
        """Average part of a step that hides an exchange without making the step longer."""
        return self.lag / self.every


def divide(problem: Problem, most: int) -> tuple[Group, ...]:
    """Return at most `most` groups of the problem's peers; raise the planner's `PlanError` if not even one fits."""
    kept_out = set(problem.excluded)
    peers = [one for one in problem.peers if one.peer not in kept_out]
    peers.sort(key=lambda one: (one.effective_flops_per_s, one.memory_bytes, one.peer), reverse=True)
    for count in range(min(most, len(peers)), 1, -1):
        groups = _planned_groups(problem, _dealt(peers, count, _replica_bytes(problem)))
        if groups is not None:
            return tuple(_improved(problem, groups))
    return (_group(problem, peers),)


def fastest(problem: Problem, most: int, exchange: Exchanging | None = None) -> tuple[Group, ...]:
    """Return the smallest number of groups that gives the most steps per second in total. Raises like `divide`."""
    best = divide(problem, 1)
    best_per_s = steps_per_s(problem, best, exchange)
    for count in COUNTS:
        if count > min(most, len(problem.peers)):
            break
        groups = divide(problem, count)
        if len(groups) < count:  # larger numbers don't fit either
            break
        if (found_per_s := steps_per_s(problem, groups, exchange)) > best_per_s:
            best, best_per_s = groups, found_per_s
    return best


def steps_per_s(problem: Problem, groups: Sequence[Group], exchange: Exchanging | None = None) -> float:
    """Return the predicted steps per second of all groups together. A part of each exchange is hidden by the steps
    beside which it travels; a single group has none."""
    step_s = max(group.plan.step_time_s for group in groups)
    if exchange is None:
        return len(groups) / step_s
    exchanging_s = exchange_s(problem, groups, exchange) / exchange.every
    return len(groups) / (step_s + max(0.0, exchanging_s - exchange.beside * step_s))


def exchange_s(problem: Problem, groups: Sequence[Group], exchange: Exchanging) -> float:
    """Return the seconds of one exchange of these groups, without what packing and summing take; 0 for a single one.

    Each group sums a share w of every parameter, in proportion to its slowest uplink. A stage with P packed bytes
    sends (1 - w) P of its differences and the means of its share to N - 1 groups, and receives as much of theirs, so
    it takes (1 + (N - 2) w) P bytes each way, and two latencies. The owner's stages of all replicas are on one machine
    and use no line."""
    if len(groups) == 1:
        return 0.0
    owner = None if problem.owner is None else problem.owner.peer
    machines = {one.peer: one for one in problem.peers if one.peer != owner}
    stages = [[stage for stage in group.plan.stages if stage.peer in machines] for group in groups]
    uplinks = [min((machines[one.peer].uplink.bandwidth_bytes_per_s for one in some), default=1.0) for some in stages]
    longest_s = 0.0
    for some, uplink in zip(stages, uplinks, strict=True):
        times = 1 + (len(groups) - 2) * uplink / sum(uplinks)
        for stage in some:
            machine = machines[stage.peer]
            trained_bytes = sum(problem.blocks[block].trainable_bytes for block in range(*stage.blocks))
            width = min(machine.uplink.bandwidth_bytes_per_s, machine.downlink.bandwidth_bytes_per_s)
            latency_s = machine.uplink.latency_s + machine.downlink.latency_s
            longest_s = max(longest_s, times * bytes_on_link(exchange.codec, trained_bytes) / width + 2 * latency_s)
    return longest_s


def anchored(problem: Problem) -> Problem:
    """Return the problem with the additional memory of exchanging replicas. Stages keep the last synchronised
    parameters, the outer momentum and the packing error, each as large as the trainable parameters."""
    kept = problem.optimizer_bytes_per_trainable_byte + 3.0
    return msgspec.structs.replace(problem, optimizer_bytes_per_trainable_byte=kept)


def _replica_bytes(problem: Problem) -> float:
    """Return the bytes of one replica without activations: a first estimate of a group's memory; the plan is exact."""
    trained = 1 + problem.optimizer_bytes_per_trainable_byte  # gradients and optimizer state
    return sum(block.parameter_bytes + trained * block.trainable_bytes for block in problem.blocks)


def _dealt(peers: Sequence[PeerProfile], count: int, needed_bytes: float) -> list[list[PeerProfile]]:
    """Deal the peers, strongest first, each to the weakest group; groups that lack memory come first."""
    hands: list[list[PeerProfile]] = [[] for _ in range(count)]

    def wealth(hand: list[PeerProfile]) -> tuple[bool, float]:
        enough = sum(one.memory_bytes for one in hand) >= needed_bytes
        return enough, sum(one.effective_flops_per_s for one in hand)

    for peer in peers:
        min(hands, key=wealth).append(peer)
    return hands


def among(problem: Problem, peers: Sequence[PeerProfile]) -> Problem:
    """Return the problem with these peers alone; requirements and pins of other peers are dropped."""
    there = {one.peer for one in peers}
    absent = {one.peer for one in problem.peers} - there
    links = {pair: link for pair, link in problem.links.items() if absent.isdisjoint(pair.split(">"))}
    return msgspec.structs.replace(
        problem,
        peers=tuple(peers),
        links=links,
        excluded=(),
        required=tuple(peer for peer in problem.required if peer in there),
        pinned={block: peer for block, peer in problem.pinned.items() if peer in there},
    )


def _group(problem: Problem, peers: Iterable[PeerProfile]) -> Group:
    those = tuple(peers)
    return Group(tuple(one.peer for one in those), planned(among(problem, those)))


def _planned_groups(problem: Problem, hands: Iterable[Sequence[PeerProfile]]) -> list[Group] | None:
    """Return the planned groups, or None if one of them has no plan."""
    try:
        return [_group(problem, hand) for hand in hands]
    except PlanError:
        return None


def _improved(problem: Problem, groups: list[Group]) -> list[Group]:
    profiles = {one.peer: one for one in problem.peers}
    tries = 0
    better = True
    while better:
        better = False
        steps_s = [group.plan.step_time_s for group in groups]
        slow = max(range(len(groups)), key=lambda place: steps_s[place])
        if steps_s[slow] < ALIKE * min(steps_s):
            return groups
        for other, mine, theirs in _exchanges(groups, slow):
            if tries >= MOST_TRIES:
                return groups
            tries += 2
            pair = _planned_groups(problem, [[profiles[peer] for peer in hand] for hand in (mine, theirs)])
            if pair is None:
                continue
            if max(one.plan.step_time_s for one in pair) < groups[slow].plan.step_time_s:
                groups[slow], groups[other] = pair
                better = True
                break
    return groups


def _exchanges(groups: Sequence[Group], slow: int) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield another group's index and both groups' new members: one peer exchanged, or moved to the slow group."""
    mine = groups[slow].peers
    for other, group in enumerate(groups):
        if other == slow:
            continue
        for given in (*mine, None):
            for taken in group.peers:
                hands = [peer for peer in mine if peer != given], [peer for peer in group.peers if peer != taken]
                if given is not None:
                    hands[1].append(given)
                hands[0].append(taken)
                if hands[1]:
                    yield other, *hands


WORTH: Final = 1.25
"""Least speedup over the next larger codec of the result for a codec to be listed, chosen."""


def plan(problem: Problem) -> Plan:
    """Return the plan; pure and deterministic. Raises `PlanError` if no plan with the requested number of replicas
    exists; with `auto`, if not even one replica fits."""
    problem = paced(problem)
    match problem.replicas:
        case 1:
            return one_chain(problem)
        case "auto":
            return _fastest(problem)
        case count:
            return _of(problem, count, _chained(problem))


def with_replicas(problem: Problem, count: int) -> Problem:
    """Return the problem with `count` replicas and the memory a stage then needs for the others' gradients."""
    return msgspec.structs.replace(problem, replicas=count, reduction_bytes_per_trainable_byte=held_per_byte(count))


def _fastest(problem: Problem) -> Plan:
    """Return the fastest plan over `COUNTS`; of equal ones that with the fewest replicas."""
    best = chained = one_chain(with_replicas(problem, 1))
    for count in COUNTS:
        if count > min(len(problem.peers), problem.microbatches):
            break
        try:
            found = _of(problem, count, chained)
        except PlanError:
            break  # larger numbers don't fit either
        if found.tokens_per_s > best.tokens_per_s:
            best = found
    return best


def _chained(problem: Problem) -> Plan | None:
    """Return the plan of a single chain, or None if it does not fit."""
    try:
        return one_chain(with_replicas(problem, 1))
    except PlanError:
        return None


def _of(problem: Problem, count: int, chained: Plan | None) -> Plan:
    """Return the plan with `count` replicas. `chained`: the plan of one replica, for comparison."""
    if problem.task != "train":
        raise PlanError(f"expected one chain of stages for serving, got {count} replicas.")
    if problem.microbatches < count:
        raise PlanError(
            f"{count} replicas need a microbatch each in every step, got {problem.microbatches}.",
            hint="Raise microbatches, or ask for fewer replicas.",
        )
    whole = with_replicas(problem, count)
    groups = divide(
        msgspec.structs.replace(whole, replicas=1, microbatches=-(-problem.microbatches // count), incumbent=None),
        count,
    )
    if len(groups) < count:
        there = f"{len(groups)} {'is' if len(groups) == 1 else 'are'}"
        raise PlanError(
            f"the pool has no machines for {count} replicas: {there} all that fits.",
            hint="Ask for fewer replicas, or let more machines join.",
        )
    found = _joined(whole, groups)
    _check_owner(whole, found)
    found = msgspec.structs.replace(found, warnings=dependence(found, whole))
    return with_standbys(_against(found, chained), whole)


def _joined(problem: Problem, groups: Sequence[Group]) -> Plan:
    """Join the groups' plans into one, with the homes where the sums take the least time."""
    orders = [(groups[place], *groups[:place], *groups[place + 1 :]) for place in range(len(groups))]
    pure = StageCosts(problem)
    order = min(orders, key=lambda order: reduction_s(_numbered(order), pure))
    first = order[0].plan
    stages, codecs = _numbered(order), _codecs(order)
    bare = msgspec.structs.replace(first, stages=stages, codecs=codecs, microbatches=problem.microbatches)
    prediction = predict(stages, StageCosts(problem, bare))
    tokens = problem.microbatches * problem.microbatch_tokens
    speed = tokens / prediction.step_s
    used = {stage.peer for stage in stages if "stage" in stage.roles}
    refused = tuple(chain.from_iterable(group.plan.excluded for group in order))
    kept_out = {*problem.excluded, *(one.peer for one in refused)}
    return msgspec.structs.replace(
        bare,
        spares=tuple(sorted(one.peer for one in problem.peers if one.peer not in used | kept_out)),
        standbys=(),
        snapshot_every=0,
        step_time_s=prediction.step_s,
        tokens_per_s=speed,
        single_peer_tokens_per_s=None,
        warnings=(),
        bottleneck=prediction.bottleneck,
        reduction_s=prediction.reduction_s,
        commit_s=prediction.commit_s,
        excluded=refused,
        certificate=Certificate.of(
            f"machines divided into {len(groups)} groups, each planned; bound of all computing all the time",
            speed,
            _bound_tokens_per_s(problem),
            explored=sum(group.plan.certificate.explored for group in groups),
        ),
    )


def _numbered(groups: Iterable[Group]) -> tuple[StagePlacement, ...]:
    stages: list[StagePlacement] = []
    for replica, group in enumerate(groups):
        first = len(stages)
        stages += [
            msgspec.structs.replace(stage, stage=first + stage.stage, replica=replica) for stage in group.plan.stages
        ]
    return tuple(stages)


def _codecs(groups: Sequence[Group]) -> tuple[Codec, ...]:
    if not any(group.plan.codecs for group in groups):
        return ()
    codecs: list[Codec] = []
    for group in groups:
        codecs += group.plan.codecs or ("none",) * (len(group.plan.stages) - 1)
        codecs.append("none")
    return tuple(codecs[:-1])


def _bound_tokens_per_s(problem: Problem) -> float:
    """Return the tokens per second if every machine computed all the time and links took no time."""
    flops = sum(block.forward_flops + block.backward_flops for block in problem.blocks)
    flops_per_s = fsum(one.effective_flops_per_s for one in problem.everyone)
    return problem.microbatch_tokens * flops_per_s / flops if flops > 0 else 0.0


def _check_owner(problem: Problem, found: Plan) -> None:
    """Raise `PlanError` if the model ends of all replicas don't fit the job owner's memory."""
    if problem.owner is None:
        return
    needed = sum(stage.memory_bytes for stage in found.stages if stage.peer == found.feed)
    if needed > problem.owner.memory_bytes:
        raise PlanError(
            f"what stays with the job owner of {found.replicas} replicas takes {format_bytes(needed)} of a machine "
            f"that has {format_bytes(problem.owner.memory_bytes)}.",
            hint="Ask for fewer replicas or smaller microbatches, or let less stay with the owner.",
        )


def _against(found: Plan, chained: Plan | None) -> Plan:
    """Return `found` with the fastest machine's speed, and a warning if one machine or one chain is faster."""
    if chained is None:
        return found
    speed, alone = found.tokens_per_s, chained.single_peer_tokens_per_s
    warnings: list[str] = []
    if alone is not None and alone > speed:
        warnings.append(
            f"One machine alone would be faster: {format_speed(alone)} tokens/s, this plan {format_speed(speed)}."
        )
    if chained.tokens_per_s > speed:
        warnings.append(
            f"One chain of stages would be faster than {found.replicas} replicas: "
            f"{format_speed(chained.tokens_per_s)} tokens/s instead of {format_speed(speed)}."
        )
    return msgspec.structs.replace(found, single_peer_tokens_per_s=alone, warnings=(*warnings, *found.warnings))


@dataclass(frozen=True, slots=True)
class Lighter:
    """A smaller codec and a lower limit of the speed with it."""

    compression: Codec
    tokens_per_s: float


def lighter(problem: Problem, found: Plan) -> tuple[Lighter, ...]:
    """Return the codecs smaller than that of `problem` which each speed the job up by `WORTH`. `found`: the plan
    without them. Codecs are planned among its machines only; other machines, of which there may be thousands, could
    make the gain larger."""
    if problem.task != "train" or problem.compression not in LADDER:
        return ()
    compute_s = found.microbatches * max(stage.compute_s for stage in found.stages)
    if found.step_time_s < WORTH * compute_s:
        return ()  # Computing limits the step, so a smaller codec can't reach WORTH.
    used = {stage.peer for stage in found.stages}
    posed = msgspec.structs.replace(
        problem,
        peers=tuple(peer for peer in problem.peers if peer.peer in used),
        links=problem.links_among(used),
        excluded=(),
        spares_wanted=None,
    )
    worth: list[Lighter] = []
    best = found.tokens_per_s
    for codec in FOR_PLANS[LADDER.index(problem.compression) + 1 :]:
        speed = plan(msgspec.structs.replace(posed, compression=codec)).tokens_per_s
        if speed >= WORTH * best:
            worth.append(Lighter(codec, speed))
            best = speed
    return tuple(worth)
