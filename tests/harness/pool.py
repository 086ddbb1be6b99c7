"""A pool of real peers in one process: shipped doors, members, drivers and backends over the memory network.

Decides who is called what and signs the tickets; everything else is the product's. Neighbours: tests of whole jobs
(`tests/integration`) and of hostile peers (`tests/unit/execution`, `tests/unit/peer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fusionai.backends.interface import Backend
from fusionai.coordination.driver import EndJob
from fusionai.execution.compute import ComputeThread
from fusionai.execution.member import Host
from fusionai.ir.schema import Graph
from fusionai.peer.door import Door
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.types import Certificate, Plan, StagePlacement
from fusionai.storage.checkpoint import CheckpointHeader
from fusionai.storage.commits import CommitJournal
from fusionai.storage.manifest import step_directory
from fusionai.storage.reader import CheckpointReader, latest
from fusionai.training import progress
from fusionai.training.checkpoints import Checkpoints
from fusionai.training.driver import Driver
from fusionai.training.job import StateSource, TrainingJob
from fusionai.transport.memory import MemoryNetwork
from fusionai.transport.tickets import Ticket, sign_ticket
from fusionai.wire.messages import OptimizerSpec, StageOptions

OWNER = PeerId("z" * 52)
JOB = JobId("job-1")


def peer_id(number: int) -> PeerId:
    return PeerId("abcdefghij"[number] * 52)


def tensor(array: np.ndarray) -> HostTensor:
    contiguous = np.ascontiguousarray(array)
    return host_tensor(str(contiguous.dtype), array.shape, contiguous.tobytes())


def array(value: HostTensor) -> np.ndarray:
    return np.frombuffer(value.data, value.dtype).reshape(value.shape)


class MemoryPool:
    """`peers` providers and an owner. Use as an async context."""

    def __init__(self, peers: int, backend: Callable[[], Backend], *, share: float = 1.0) -> None:
        self.network = MemoryNetwork()
        self.key = Ed25519PrivateKey.generate()
        self.owner = self._host(OWNER, backend(), 1.0)
        self.hosts = [self._host(peer_id(number), backend(), share) for number in range(peers)]
        self.doors: list[Door] = []
        self.addresses: dict[str, tuple[str, ...]] = {}

    @property
    def authority_key(self) -> bytes:
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def _host(self, peer: PeerId, backend: Backend, share: float) -> Host:
        return Host(
            peer=peer,
            backend=backend,
            compute=ComputeThread(share),
            transport=self.network.transport(peer),
            fingerprint="test",
            clock=SystemClock(),
        )

    def ticket(
        self, peer: PeerId, *, job: str = JOB, version: int = 1, driver: bool = False, lifetime_s: float = 600.0
    ) -> bytes:
        content = Ticket(
            job=job,
            peer=peer,
            stage=-1 if driver else 0,
            plan_version=version,
            role="driver" if driver else "stage",
            expires_at_s=SystemClock().wall_s() + lifetime_s,
        )
        return sign_ticket(content, self.key)

    def tickets(self, version: int = 1) -> dict[str, bytes]:
        peers = {host.peer: self.ticket(host.peer, version=version) for host in self.hosts}
        return {**peers, OWNER: self.ticket(OWNER, version=version, driver=True)}

    async def __aenter__(self) -> MemoryPool:
        for host in self.hosts:
            door = Door(host, self.authority_key)
            listener = await host.transport.listen(door.accept, host="pool", port=0)
            self.doors.append(door)
            self.addresses[host.peer] = listener.addresses
        return self

    async def __aexit__(self, *exc: object) -> None:
        for door in self.doors:
            await door.close()
        for host in [self.owner, *self.hosts]:
            host.compute.close()


class Data:
    """Random access to made-up batches: `make(step, microbatch)`; evaluation reads microbatches of step 10**6."""

    def __init__(self, make: Callable[[int, int], Mapping[str, np.ndarray]]) -> None:
        self.make = make

    def microbatch(self, step: int, microbatch: int) -> dict[str, HostTensor]:
        return {name: tensor(values) for name, values in self.make(step, microbatch).items()}

    def evaluation(self, index: int) -> dict[str, HostTensor]:
        return self.microbatch(10**6, index)


def tokens(vocabulary: int, batch: int, sequence: int) -> Callable[[int, int], dict[str, np.ndarray]]:
    """Causal language modelling: labels are shifted here, as the feed does."""

    def make(step: int, microbatch: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng((step, microbatch)).integers(0, vocabulary, (batch, sequence))
        labels = np.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
        positions = np.broadcast_to(np.arange(sequence), ids.shape)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}

    return make


@dataclass(kw_only=True)
class Job:
    """A training job on a `MemoryPool`. `ranges`: half-open block ranges per stage; `owned`: stages of the owner."""

    pool: MemoryPool
    directory: Path
    graph: Graph
    ranges: Sequence[tuple[int, int]]
    owned: frozenset[int]
    data: Data
    steps: int
    microbatches: int
    state: StateSource
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(weight_decay=0.1))
    learning_rate: Callable[[int], float] = lambda step: 1e-3 * (step + 1)
    clip_norm: float | None = 1.0
    precision: str = "fp32"
    seed: int = 7
    retain: bool = False
    save_base: bool = True
    checkpoint_every: int = 0
    evaluate_every: int = 0
    evaluation_batches: int = 0
    in_flight: int | None = None
    room: bool = False
    """Whether the plan knows of memory to spare, so that weight gradients may be put off."""
    version: int = 1

    def plan(self) -> Plan:
        peers = iter(self.pool.hosts)
        count = len(self.ranges)
        stages = tuple(
            StagePlacement(
                stage=number,
                peer=OWNER if number in self.owned else next(peers).peer,
                blocks=blocks,
                in_flight=self.in_flight or count - number,
                roles=("loss",) if number in self.owned else ("stage",),
                memory_limit_bytes=2**30 if self.room else 0,
                in_flight_bytes=1 if self.room else 0,
            )
            for number, blocks in enumerate(self.ranges)
        )
        return Plan(
            version=self.version,
            graph_hash="",
            stages=stages,
            feed=OWNER,
            microbatches=self.microbatches,
            step_time_s=1.0,
            tokens_per_s=1.0,
            certificate=Certificate(method="by hand", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
        )

    def training_job(self) -> TrainingJob:
        return TrainingJob(
            job=JOB,
            owner=OWNER,
            plan=self.plan(),
            graph=self.graph,
            options=StageOptions(
                seed=self.seed,
                microbatches=self.microbatches,
                optimizer=self.optimizer,
                precision=self.precision,  # pyright: ignore[reportArgumentType]
                retain=self.retain,
            ),
            steps=self.steps,
            learning_rate=self.learning_rate,
            clip_norm=self.clip_norm,
            data=self.data,
            state=self.state,
            checkpoint_every=self.checkpoint_every,
            save_base=self.save_base,
            evaluate_every=self.evaluate_every,
            evaluation_batches=self.evaluation_batches,
            members=self.pool.addresses,
            tickets=self.pool.tickets(self.version),
        )

    def stage_options(self) -> list[StageOptions]:
        """What each stage is told, in stage order."""
        job = self.training_job()
        return [job.stage_options(number) for number in range(len(self.ranges))]

    def header(self) -> CheckpointHeader:
        params = self.graph.params.values()
        return CheckpointHeader(
            graph_hash="",
            aliases={alias: spec.key for spec in params for alias in spec.aliases},
            private_keys=frozenset(),
        )

    async def run(
        self,
        *,
        kill_after: int | None = None,
        stop_after: int | None = None,
        epilogue: Callable[[Driver], object] | None = None,
        on_event: Callable[[progress.Progress], None] = lambda event: None,
    ) -> Run:
        """One start of the driver, from the newest checkpoint if there is one. `kill_after`: its process dies once
        that step is official; `stop_after`: it is asked to stop then. `epilogue` is awaited before the end."""
        with CommitJournal(self.directory / "commits.sqlite") as journal:
            journal.start_incarnation()
            newest = latest(self.directory)
            base = 0 if newest is None else CheckpointReader(newest).step
            events: list[progress.Progress] = []
            killed = asyncio.Event()

            def watch(event: progress.Progress) -> None:
                events.append(event)
                on_event(event)
                if isinstance(event, progress.StepDone):
                    if event.record.step == kill_after:
                        killed.set()
                    if event.record.step == stop_after:
                        driver.stop("asked to")

            driver = Driver(
                self.training_job(),
                self.pool.owner,
                journal=journal,
                checkpoints=Checkpoints(self.directory, self.header(), files={}, keep=100),
                base=base,
                on_progress=watch,
            )
            running = asyncio.ensure_future(driver.run())
            dying = asyncio.ensure_future(killed.wait())
            try:
                async with asyncio.timeout(20):
                    await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
                    if not running.done():
                        running.cancel()
                        self.pool.network.disconnect(OWNER)
                        with suppress(asyncio.CancelledError):
                            await running
                        return Run(self, None, events, base)
                    result = Run(self, await running, events, base)
                    if epilogue is not None:
                        result.extra = await epilogue(driver)  # pyright: ignore[reportGeneralTypeIssues]
                    return result
            except TimeoutError:
                raise AssertionError(f"the job hangs: {driver._machine.story}") from None
            finally:
                dying.cancel()
                await driver.close()


@dataclass
class Run:
    """`end` is None for a driver that was killed."""

    job: Job
    end: EndJob | None
    events: list[progress.Progress]
    base: int
    extra: object = None

    def steps(self) -> list[progress.StepDone]:
        return [event for event in self.events if isinstance(event, progress.StepDone)]

    @property
    def losses(self) -> list[float]:
        return [done.record.loss for done in self.steps()]

    def weights(self, step: int) -> dict[str, np.ndarray]:
        """Model and optimizer entries of a checkpoint."""
        reader = CheckpointReader(step_directory(self.job.directory, step))
        return {name: array(reader.read(name)) for name in reader.names}
