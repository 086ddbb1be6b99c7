"""A driver among members that lie, break and vanish: the job ends with the reason, and never hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fusionai.execution import connections
from fusionai.execution.training.member import JobMember
from fusionai.primitives.errors import DataError, ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.training import progress
from fusionai.training.driver import Driver
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence
from harness.null_backend import NullBackend
from harness.pool import OWNER, Data, Job, MemoryPool, Run, peer_id, tensor
from harness.stand import RANGES, layers, rows

LIAR = peer_id(1)
"""Holds stage 1; where the loss is in the pool, peer 2 holds it."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between peers within this process nobody is late."""
    monkeypatch.setattr("fusionai.execution.connections.LINK_GRACE_S", 0.02)


def zeros(step: int, microbatch: int) -> dict[str, np.ndarray]:
    return {name: np.zeros((2, 4), np.float32) for name in ("x", "labels")}


def run(
    directory: Path,
    *,
    owned: frozenset[int] = frozenset({2}),
    then: Callable[[MemoryPool, progress.Progress], None] = lambda pool, event: None,
    start: dict[str, Any] | None = None,
    **changes: Any,
) -> Run:
    async def body() -> Run:
        async with MemoryPool(3 - len(owned), NullBackend) as pool:
            fields: dict[str, Any] = {"data": Data(zeros), "steps": 3, "microbatches": 2, "save_base": False, **changes}
            job = Job(
                pool=pool,
                directory=directory,
                graph=layers(),
                state=lambda keys: iter(()),
                ranges=RANGES,
                owned=owned,
                **fields,
            )
            return await job.run(on_event=lambda event: then(pool, event), **(start or {}))

    return asyncio.run(body())


def failure(done: Run) -> str:
    assert done.end is not None
    assert done.end.failed is not None, done.end
    return done.end.failed


def test_among_honest_members_the_same_job_succeeds(tmp_path: Path):
    done = run(tmp_path, evaluate_every=1, evaluation_batches=2)
    assert done.end is not None
    assert (done.end.failed, done.end.steps) == (None, 3)


# ------------------------------------------------------------------------------------------------------------- lies

Lie = Callable[[wire.Message], wire.Message]


def telling(monkeypatch: pytest.MonkeyPatch, kind: type, lie: Lie) -> None:
    """What the faulty peer tells the driver on its control connection."""
    true = JobMember.to_driver

    def to_driver(self: JobMember, message: wire.Message) -> None:
        lies = self._host.peer == LIAR and isinstance(message, kind)
        true(self, lie(message) if lies else message)

    monkeypatch.setattr(JobMember, "to_driver", to_driver)


def changed(**changes: Any) -> Lie:
    return lambda message: msgspec.structs.replace(message, **changes)


LIES: dict[str, tuple[type, Lie, str]] = {
    "votes for another stage": (wire.Prepared, changed(stage=0), "a Prepared of stage 0, which is not its own"),
    "votes for the owner": (wire.Prepared, changed(stage=2), "a Prepared of stage 2, which is not its own"),
    "answers for a stage that is none": (wire.Status, changed(stage=99), "a Status of stage 99"),
    "answers for a stage beyond number": (wire.Status, changed(stage=2**60), "which is not its own"),
    "is ready for another": (wire.Ready, changed(stage=0), "a Ready of stage 0"),
    "is ready elsewhere": (wire.Ready, changed(applied=7), "at step 7 instead of 0"),
    "fails another": (
        wire.Prepared,
        lambda m: wire.StageFailed(fence=m.fence, stage=0, code="failed", reason=""),  # pyright: ignore
        "not its own",
    ),
    "has norms of unknown parameters": (wire.Prepared, changed(norms={"zz": 1.0}), "zz"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIES)
def test_a_member_that_speaks_for_others_ends_the_job(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind, lie, text = LIES[name]
    telling(monkeypatch, kind, lie)
    assert text in failure(run(tmp_path))


def test_a_vote_of_another_attempt_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    votes: list[wire.Message] = []
    telling(monkeypatch, wire.Prepared, lambda message: votes.append(message) or message)
    true = JobMember.to_driver

    def first_a_stale_one(self: JobMember, message: wire.Message) -> None:
        if self._host.peer == LIAR and isinstance(message, wire.Prepared):
            stale = msgspec.structs.replace(message, fence=Fence(1, 0, 0), norms={"zz": 1.0})
            true(self, stale)
        true(self, message)

    monkeypatch.setattr(JobMember, "to_driver", first_a_stale_one)
    done = run(tmp_path)
    assert done.end is not None
    assert done.end.failed is None
    assert len(votes) == 6


OUTPUTS: dict[str, tuple[dict[str, Any], dict[str, HostTensor] | None, str]] = {
    "a loss in doubles": ({}, {"loss": tensor(np.float64(1.0))}, "expected a loss as a float32 scalar"),
    "several losses": ({}, {"loss": rows()}, "expected a loss as a float32 scalar"),
    "an empty loss": ({}, {"loss": host_tensor("float32", (0,), b"")}, "expected a loss as a float32 scalar"),
    "another output": ({}, {"logits": rows()}, "expected outputs ['loss']"),
    "no output": ({}, {}, "expected outputs ['loss']"),
    "of a microbatch never fed": ({"microbatch": 7}, None, "was not fed"),
    "of a step never fed": ({"step": 2**40}, None, "was not fed"),
    "as another stage": ({"stage": 0}, None, "not its own"),
    "as a stage that is none": ({"stage": 2**40}, None, "has no stage"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_is_none_ends_the_job(name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In training, and already in the probe that crosses all stages before it."""
    changes, values, text = OUTPUTS[name]
    true = JobMember.output

    def output(self: JobMember, message: wire.Output, tensors: Sequence[HostTensor]) -> None:
        if message.mode != mode:
            true(self, message, tensors)
            return
        carried = dict(zip((h.name for h in message.tensors), tensors, strict=True)) if values is None else values
        true(
            self,
            msgspec.structs.replace(message, tensors=headers(carried), **changes),
            tuple(carried.values()),
        )

    monkeypatch.setattr(JobMember, "output", output)
    assert text in failure(run(tmp_path, owned=frozenset()))


STATES: dict[str, tuple[Callable[[wire.StateChunk, dict[str, HostTensor]], dict[str, Any]], str]] = {
    "an unknown entry": (lambda m, t: {"tensors": {**t, "model/zz": rows()}}, "unknown state entry 'model/zz'"),
    "an entry of another stage": (lambda m, t: {"tensors": {"model/layer0.weight": rows()}}, "unknown state entry"),
    "an entry of another shape": (lambda m, t: {"tensors": {"model/layer1.weight": rows()}}, "model/layer1.weight as"),
    "nothing": (lambda m, t: {"tensors": {}}, "lacks"),
    "another step": (lambda m, t: {"step": m.step + 1}, "expected the state of step 1"),
    "another stage": (lambda m, t: {"stage": 0}, "expected the state of step 1"),
    "a round to come": (lambda m, t: {"fence": Fence(2, 0, 0)}, "the fence of a later round"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_not_the_stages_own_becomes_no_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lie, text = STATES[name]
    true = JobMember.state

    async def state(self: JobMember, message: wire.StateChunk, tensors: Sequence[HostTensor]) -> None:
        carried = dict(zip((header.name for header in message.tensors), tensors, strict=True))
        if self._host.peer == LIAR:
            changes = lie(message, carried)
            carried = changes.pop("tensors", carried)
            message = msgspec.structs.replace(message, tensors=headers(carried), **changes)
        await true(self, message, tuple(carried.values()))

    monkeypatch.setattr(JobMember, "state", state)
    assert text in failure(run(tmp_path, checkpoint_every=1))
    assert not list(tmp_path.glob("step-*")), "nothing that looks like a checkpoint is left"


# --------------------------------------------------------------------------------------------------------- who breaks


def lose(peer: object) -> Callable[[MemoryPool, progress.Progress], None]:
    def after_the_first_step(pool: MemoryPool, event: progress.Progress) -> None:
        if isinstance(event, progress.StepDone) and event.record.step == 0:
            pool.network.disconnect(peer)  # pyright: ignore[reportArgumentType]

    return after_the_first_step


@pytest.mark.parametrize("stage", [0, 1])
def test_a_peer_lost_in_a_step_ends_the_job_with_its_name(stage: int, tmp_path: Path):
    done = run(tmp_path, steps=50, then=lose(peer_id(stage)))
    assert "was lost" in failure(done)
    assert peer_id(stage)[:8] in failure(done)
    assert done.end is not None
    assert done.end.steps >= 1


@pytest.mark.slow
def test_the_owners_own_link_lost_begins_a_new_round(tmp_path: Path):
    """The owner holds no stage: nobody but its own links knows."""

    def cut(pool: MemoryPool, event: progress.Progress) -> None:
        if isinstance(event, progress.StepDone) and event.record.step == 0:
            for channel in list(pool.network._channels):
                if channel.owner.peer == OWNER and channel.stream == "tensors":
                    channel.cut()

    done = run(tmp_path, steps=50, owned=frozenset(), then=cut)
    assert done.end is not None
    assert (done.end.failed, done.end.steps) == (None, 50)
    seen = [event for event in done.events if isinstance(event, progress.FaultSeen)]
    assert {event.kind for event in seen} == {"link"}


def test_a_member_that_never_opens_the_job_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "OPENING_S", 0.05)

    async def body() -> Run:
        async with MemoryPool(2, NullBackend) as pool:
            silent = pool.network.transport(LIAR)
            over = asyncio.Event()

            async def accept(channel: object) -> None:
                await over.wait()

            listener = await silent.listen(accept, host="silent", port=0)
            pool.addresses[LIAR] = listener.addresses
            job = Job(
                pool=pool,
                directory=tmp_path,
                graph=layers(),
                state=lambda keys: iter(()),
                ranges=RANGES,
                owned=frozenset({2}),
                data=Data(zeros),
                steps=1,
                microbatches=1,
            )
            done = await job.run()
            over.set()
            await listener.close()
            return done

    assert "it did not open the job within 0.05 s" in failure(asyncio.run(body()))


def test_a_refused_job_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    true = MemoryPool.tickets
    expired = lambda self, version: {**true(self, version), OWNER: self.ticket(OWNER, driver=True, lifetime_s=-5)}  # noqa: E731
    monkeypatch.setattr(MemoryPool, "tickets", expired)
    assert "ticket has expired" in failure(run(tmp_path))


# --------------------------------------------------------------------------------------------------------- own faults


def test_data_that_can_not_be_read_ends_the_job_with_the_reason(tmp_path: Path):
    def unreadable(step: int, microbatch: int) -> dict[str, np.ndarray]:
        if step == 1:
            raise DataError("the file is gone.")
        return zeros(step, microbatch)

    assert "the file is gone" in failure(run(tmp_path, data=Data(unreadable)))


def test_data_without_an_input_ends_the_job_with_its_name(tmp_path: Path):
    done = run(tmp_path, data=Data(lambda step, microbatch: {"x": np.zeros((2, 4), np.float32)}))
    assert "the model needs inputs labels" in failure(done)


def test_a_bug_in_a_task_of_the_driver_ends_the_job(tmp_path: Path):
    def broken(step: int, microbatch: int) -> dict[str, np.ndarray]:
        if step == 10**6:
            raise ZeroDivisionError("a bug in the evaluation data")
        return zeros(step, microbatch)

    done = run(tmp_path, data=Data(broken), evaluate_every=1, evaluation_batches=1)
    assert "ZeroDivisionError: a bug in the evaluation data" in failure(done)


def test_after_a_failure_nobody_waits_for_an_inference(tmp_path: Path):
    async def ask(driver: Driver) -> None:
        with pytest.raises(ExecutionError, match=LIAR[:8]):
            await driver.infer({"x": rows()})

    failure(run(tmp_path, steps=50, then=lose(LIAR), start={"epilogue": ask}))
