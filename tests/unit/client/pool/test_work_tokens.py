"""Tokens of a served model by member: who held the stages, what is disputed, who was found faulty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from fusionai.client.pool.work import CountingEngine, TokenWork
from fusionai.ir.cost import BlockCost
from fusionai.scheduling.problem.types import Certificate, Plan, StagePlacement
from fusionai.serving import job as progress
from fusionai.wire.messages import WorkShare

OWNER, A, B, C = "o" * 52, "a" * 52, "b" * 52, "c" * 52
BLOCKS = tuple(
    BlockCost(
        block=number,
        forward_flops=10.0**number,
        backward_flops=0.0,
        parameter_bytes=0,
        trainable_bytes=0,
        activation_bytes=0,
        output_bytes=0,
        gradient_bytes=0,
    )
    for number in range(3)
)


@dataclass(frozen=True)
class Counters:
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    state: str = "ready"


class Engine:
    def __init__(self) -> None:
        self.status = Counters()
        self.holds(A, B)

    def holds(self, *peers: str) -> None:
        stages = [StagePlacement(stage=0, peer=OWNER, blocks=(0, 1))]
        stages += [StagePlacement(stage=1 + at, peer=peer, blocks=(1 + at, 2 + at)) for at, peer in enumerate(peers)]
        certificate = Certificate(method="", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0)
        self.plan = Plan(
            task="serve",
            graph_hash="",
            stages=tuple(stages),
            feed=OWNER,
            microbatches=1,
            step_time_s=1.0,
            tokens_per_s=1.0,
            certificate=certificate,
        )

    def count(self, **more: int) -> None:
        self.status = replace(self.status, **{name: getattr(self.status, name) + by for name, by in more.items()})


def opened(engine: Engine, faulty: set[str] | None = None) -> TokenWork:
    work = TokenWork(cast(CountingEngine, engine), OWNER, BLOCKS, set() if faulty is None else faulty)
    work.look()
    return work


def test_tokens_read_and_emitted_count_without_those_of_caches():
    engine = Engine()
    work = opened(engine)
    engine.count(emitted_tokens=24, prompt_tokens=10, prefix_hit_tokens=4)
    assert work.state() == ("ready", 24)
    done = work.work()
    assert (done.steps, done.tokens) == (0, 30)
    assert done.shares == (WorkShare(A, 0, 30, 300.0), WorkShare(B, 0, 30, 3000.0))


def test_tokens_count_for_those_that_held_the_stages():
    engine = Engine()
    work = opened(engine)
    engine.count(emitted_tokens=5)
    engine.holds(A, C)
    work.see(progress.ServingPlanChanged(engine.plan, "B is lost"))
    engine.count(emitted_tokens=2)
    assert work.work().shares == (WorkShare(A, 0, 7, 70.0), WorkShare(B, 0, 5, 500.0), WorkShare(C, 0, 2, 200.0))


def test_a_disputed_text_counts_for_neither_side_and_a_faulty_peer_gets_nothing():
    engine, faulty = Engine(), set[str]()
    work = opened(engine, faulty)
    engine.count(emitted_tokens=50)
    checked = progress.TextRechecked(
        stage=1, peer=A, verifier=C, outcome="valid", reason="", tasks=1, checked_tasks=1, text_tokens=20
    )
    work.see(checked)
    assert [one.tokens for one in work.work().shares] == [50, 50]
    for outcome, partners in (("disputed", (B,)), ("disputed", ())):
        work.see(
            progress.TextRechecked(
                stage=1,
                peer=A,
                verifier=C,
                outcome=outcome,
                reason="",
                tasks=1,
                checked_tasks=1,
                partners=partners,
                text_tokens=20,
            )
        )
    assert work.work().shares == (WorkShare(A, 0, 10, 100.0), WorkShare(B, 0, 30, 3000.0))
    faulty.add(B)
    assert work.work().shares == (WorkShare(A, 0, 10, 100.0),)
    assert work.work().tokens == 50
