"""A made-up job for the harness: which stages there are, what flows between them, what they share. Decides no order.

`reference` runs such a job in one loop, without machines, messages or time: what every simulated run must equal.
Values are strings that stand for tensors: a digest of all that went into them, so that anything lost, counted twice,
summed in another order or taken from another attempt changes whatever follows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from fusionai.coordination.training.interface import Roles
from fusionai.coordination.training.state import JobShape
from fusionai.coordination.training.step import StageShape
from fusionai.coordination.training.steps import norms_hash

FEED = -1


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def number(text: str) -> float:
    """A float that stands for a loss or a norm."""
    return int(text[:8], 16) / 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`edges`: (producer, consumer), producer < consumer; the last stage makes the loss. `tied`: stages that share one
    parameter, the first is its home; empty or at least two."""

    stages: int
    steps: int
    microbatches: int
    in_flight: tuple[int, ...]
    weight_lag: tuple[int, ...] = ()
    """Per stage; empty: none puts its weight gradients off."""
    edges: frozenset[tuple[int, int]]
    fed: frozenset[int]
    tied: tuple[int, ...] = ()
    stateless: frozenset[int] = frozenset()
    """Stages without parameters: their state never changes and they have no norms."""
    checkpoint_every: int = 0
    save_base: bool = False
    evaluate_every: int = 0
    evaluations: int = 0
    keep_best: bool = False
    patience: int | None = None

    @property
    def last(self) -> int:
        return self.stages - 1

    @property
    def feed_window(self) -> int:
        return max(self.in_flight) + 1

    def producers(self, stage: int) -> frozenset[int]:
        fed = {FEED} if stage in self.fed else set[int]()
        return frozenset({producer for producer, consumer in self.edges if consumer == stage} | fed)

    def consumers(self, stage: int) -> frozenset[int]:
        return frozenset(consumer for producer, consumer in self.edges if producer == stage)

    def stage_shape(self, stage: int) -> StageShape:
        producers = self.producers(stage)
        return StageShape(
            stage=stage,
            microbatches=self.microbatches,
            in_flight=self.in_flight[stage],
            weight_lag=self.weight_lag[stage] if self.weight_lag else 0,
            producers={"train": producers, "eval": producers, "infer": producers},
            consumers=self.consumers(stage),
            gradients_to=frozenset(
                producer for producer, consumer in self.edges if consumer == stage and producer >= 0
            ),
            sums_of=frozenset(self.tied[1:]) if stage in self.tied[:1] else frozenset(),
            totals_to=frozenset(self.tied[1:]) if stage in self.tied[:1] else frozenset(),
            summed_by=frozenset(self.tied[:1]) if stage in self.tied[1:] else frozenset(),
            parts_to=frozenset(self.tied[:1]) if stage in self.tied[1:] else frozenset(),
        )

    def job_shape(self) -> JobShape:
        return JobShape(
            steps=self.steps,
            microbatches=self.microbatches,
            canonical_order=tuple(f"p{stage}" for stage in range(self.stages)),
            checkpoint_every=self.checkpoint_every,
            save_base=self.save_base,
            evaluate_every=self.evaluate_every,
            keep_best=self.keep_best,
            patience=self.patience,
        )

    def neighbours(self, stage: int) -> frozenset[int]:
        around = {producer for producer, consumer in self.edges if consumer == stage} | self.consumers(stage)
        return frozenset(around | (set(self.tied) - {stage} if stage in self.tied else set[int]()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who does what: a plan, less all that only a planner needs. `cut` names the partition."""

    places: Mapping[int, str]
    standbys: Mapping[int, str] = field(default_factory=dict[int, str])
    snapshot_every: int = 0
    cut: str = "a"

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self.places.values()) | frozenset(self.standbys.values())

    def encoded(self) -> bytes:
        return json.dumps([dict(self.places), dict(self.standbys), self.snapshot_every, self.cut]).encode()

    def roles(self, topology: Topology, version: int, owner: str) -> Roles:
        return Roles(
            version=version,
            owner=owner,
            places=self.places,
            standbys=self.standbys,
            snapshot_every=self.snapshot_every,
            feed_window=topology.feed_window,
            neighbours={stage: topology.neighbours(stage) for stage in range(topology.stages)},
            fed=topology.fed,
            stateless=topology.stateless,
            partition=self.cut,
        )


def random_topology(choose: random.Random, most_steps: int = 5, most_microbatches: int = 6) -> Topology:
    """One to five stages in a chain, with skips over neighbours, tied ends, checkpoints and evaluations or not."""
    stages = choose.randint(1, 5)
    edges = {(stage, stage + 1) for stage in range(stages - 1)}
    for producer in range(stages):
        for consumer in range(producer + 2, stages):
            if choose.random() < 0.3:
                edges.add((producer, consumer))
    fed = {0, stages - 1} | {stage for stage in range(stages) if choose.random() < 0.2}
    tied: tuple[int, ...] = ()
    if stages > 1 and choose.random() < 0.4:
        tied = tuple(sorted(choose.sample(range(stages), choose.randint(2, min(3, stages)))))
    stateless: frozenset[int] = frozenset()
    if stages > 1 and stages - 1 not in tied and choose.random() < 0.6:
        stateless = frozenset({stages - 1})
    evaluating = choose.random() < 0.4
    topology = Topology(
        stages=stages,
        steps=choose.randint(1, most_steps),
        microbatches=choose.randint(1, most_microbatches),
        in_flight=tuple(choose.randint(1, 4) for _ in range(stages)),
        weight_lag=tuple(choose.choice((0, 0, 1, 2, 9)) for _ in range(stages)),
        edges=frozenset(edges),
        fed=frozenset(fed),
        tied=tied,
        stateless=stateless,
        checkpoint_every=choose.choice((0, 0, 1, 2, 3)),
        save_base=choose.random() < 0.3,
        evaluate_every=choose.randint(1, 3) if evaluating else 0,
        evaluations=choose.randint(1, 5) if evaluating else 0,
    )
    # Not drawn: seeds that once found a mistake would be other courses.
    return dataclasses.replace(
        topology,
        keep_best=topology.evaluations in (3, 5),
        patience=1 if topology.evaluations == 5 else None,
    )


def learning_rate(step: int) -> float:
    return 1 / (step + 2)


def clip(norms: tuple[float, ...]) -> tuple[float, float]:
    """(total norm, scale) of norms in canonical order: like the true one, it depends on the order."""
    total = 0.0
    for norm in norms:
        total = total / 2 + norm
    return total, 1 / (1 + total)


# -------------------------------------------------------------------------- what stages compute, here and in `world`


def first_state(stage: int) -> str:
    return f"new {stage}"


def fed_value(mode: str, step: int, microbatch: int) -> str:
    """Evaluation reads the same data every time."""
    return digest("data", mode, 0 if mode == "eval" else step, microbatch)


def run_forward(stage: int, state: str, inputs: dict[int, str]) -> str:
    return digest("context", stage, state, sorted(inputs.items()))


def output_for(context: str, consumer: int) -> str:
    return digest("activation", context, consumer)


def loss_of(context: str) -> float:
    return number(digest("loss", context))


def gradient_for(context: str, gradients: dict[int, str], producer: int) -> str:
    return digest("gradient", context, sorted(gradients.items()), producer)


def summed(total: str, context: str, gradients: dict[int, str]) -> str:
    return digest("sum", total, context, sorted(gradients.items()))


def shared_part(total: str) -> str:
    return digest("part", total)


def shared_total(parts: dict[int, str]) -> str:
    return digest("total", sorted(parts.items()))


def norm_of(topology: Topology, stage: int, total: str, shared: str) -> dict[str, float]:
    return {} if stage in topology.stateless else {f"p{stage}": number(digest("norm", total, shared))}


def applied(topology: Topology, stage: int, state: str, sums: tuple[str, str], scale: float, rate: float) -> str:
    """`sums`: the stage's own and the shared ones."""
    return state if stage in topology.stateless else digest("state", state, *sums, scale, rate)


@dataclass(frozen=True, slots=True)
class Step:
    """What is official of one step."""

    loss: float
    losses: tuple[float, ...]
    scale: float
    norms_hash: str


@dataclass(frozen=True, slots=True)
class Result:
    """`states[n]`: state of every stage after n steps. `evaluations[n]`: losses of the evaluation after n steps."""

    steps: tuple[Step, ...]
    states: tuple[tuple[str, ...], ...]
    evaluations: dict[int, tuple[float, ...]]
    ends: int
    """Steps after which the job ends: all, or where evaluations bring nothing any more."""


def reference(topology: Topology) -> Result:
    """The job in one loop."""
    states = [first_state(stage) for stage in range(topology.stages)]
    history = [tuple(states)]
    steps: list[Step] = []
    evaluations: dict[int, tuple[float, ...]] = {}
    for step in range(topology.steps):
        sums = ["" for _ in states]
        losses: list[float] = []
        for microbatch in range(topology.microbatches):
            contexts = _forward_all(topology, states, "train", step, microbatch)
            losses.append(loss_of(contexts[topology.last]))
            returned: dict[tuple[int, int], str] = {}
            for stage in reversed(range(topology.stages)):
                gradients = {consumer: returned[stage, consumer] for consumer in topology.consumers(stage)}
                sums[stage] = summed(sums[stage], contexts[stage], gradients)
                for producer in topology.producers(stage) - {FEED}:
                    returned[producer, stage] = gradient_for(contexts[stage], gradients, producer)
        total = shared_total({stage: shared_part(sums[stage]) for stage in topology.tied}) if topology.tied else ""
        shared = [total if stage in topology.tied else "" for stage in range(topology.stages)]
        norms: dict[str, float] = {}
        for stage in range(topology.stages):
            norms |= norm_of(topology, stage, sums[stage], shared[stage])
        _, scale = clip(tuple(norms.values()))
        states = [
            applied(topology, stage, states[stage], (sums[stage], shared[stage]), scale, learning_rate(step))
            for stage in range(topology.stages)
        ]
        history.append(tuple(states))
        steps.append(Step(sum(losses) / len(losses), tuple(losses), scale, norms_hash(norms)))
        if topology.evaluate_every and (step + 1) % topology.evaluate_every == 0:
            evaluations[step + 1] = tuple(
                loss_of(_forward_all(topology, states, "eval", step + 1, index)[topology.last])
                for index in range(topology.evaluations)
            )
    return Result(tuple(steps), tuple(history), evaluations, _ends(topology, evaluations))


def _ends(topology: Topology, evaluations: Mapping[int, tuple[float, ...]]) -> int:
    """Written out, not asked of what is tested."""
    if topology.patience is None:
        return topology.steps
    lowest, since = float("inf"), 0
    for step, losses in evaluations.items():
        loss = sum(losses) / len(losses)
        since = 0 if loss < lowest else since + 1
        lowest = min(loss, lowest)
        if since == topology.patience:
            return step
    return topology.steps


def _forward_all(topology: Topology, states: list[str], mode: str, step: int, microbatch: int) -> list[str]:
    contexts: list[str] = []
    for stage in range(topology.stages):
        inputs = {
            producer: fed_value(mode, step, microbatch) if producer == FEED else output_for(contexts[producer], stage)
            for producer in topology.producers(stage)
        }
        contexts.append(run_forward(stage, states[stage], inputs))
    return contexts
