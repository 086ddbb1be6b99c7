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

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fusionai.backends.interface import Backend
from fusionai.coordination.round.interface import EndJob
from fusionai.execution.connections import Deployment
from fusionai.execution.host import ComputeThread, Host
from fusionai.ir.schema import Graph
from fusionai.peer.acceptor import JobAcceptor
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import Certificate, Plan, StagePlacement, Standby
from fusionai.storage.checkpoint import CheckpointHeader
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import CheckpointReader, latest, step_directory
from fusionai.training import progress
from fusionai.training.checkpoints import Checkpoints
from fusionai.training.deployment import Cut, StateSource, TrainingJob, cut, stage_options
from fusionai.training.driver import Driver
from fusionai.training.joint_exchange import JointSeat
from fusionai.transport.interface import Accept, Channel, Listener, Transport
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.signed import Seal, Ticket, sign_ticket
from fusionai.wire.codecs import Codec
from fusionai.wire.messages import Message, OptimizerSpec, StageOptions, Stream
from harness.memory_transport import MemoryNetwork
from harness.patience import CEILING_S

OWNER_KEY = Ed25519PrivateKey.from_private_bytes(b"the job owner's key in all tests")
OWNER = peer_of(public_bytes(OWNER_KEY.public_key()))
SEAL = Seal(OWNER_KEY, "open")
JOB = JobId("job-1")


def peer_id(number: int) -> PeerId:
    return PeerId("abcdefghij"[number] * 52)


def tensor(array: np.ndarray) -> HostTensor:
    contiguous = np.ascontiguousarray(array)
    return host_tensor(str(contiguous.dtype), array.shape, contiguous.tobytes())


def array(value: HostTensor) -> np.ndarray:
    return np.frombuffer(value.data, value.dtype).reshape(value.shape)


Observer = Callable[[PeerId, PeerId, Message], None]
"""(sender, receiver, message) -> called before the message leaves; may kill either."""


class MemoryPool:
    """`peers` providers and an owner. Use as an async context. `on_message` sees all that crosses the network.
    `beside`: other machines of the same pool, which work for another job; this part's are for `job`."""

    def __init__(
        self,
        peers: int,
        backend: Callable[[], Backend],
        *,
        share: float = 1.0,
        on_message: Observer = lambda sender, receiver, message: None,
        beside: MemoryPool | None = None,
        job: JobId = JOB,
    ) -> None:
        self.network = MemoryNetwork() if beside is None else beside.network
        self.key = Ed25519PrivateKey.generate() if beside is None else beside.key
        self.job = job
        self.first = 0 if beside is None else beside.first + len(beside.hosts)
        """Number of the first peer."""
        self.on_message = on_message
        self._backend = backend
        self._share = share
        self.owner = self._host(OWNER, 1.0)
        self.hosts = [self._host(peer_id(self.first + number), share) for number in range(peers)]
        self.doors: list[JobAcceptor] = []
        """One for each start of a peer."""
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.elsewhere: dict[str, tuple[str, ...]] = {}
        """Addresses of members that a test plays itself."""
        self.dead: set[PeerId] = set()
        self.changed = asyncio.Event()
        """Somebody came (back)."""
        self.broker_there = asyncio.Event()
        self.broker_there.set()
        self.newest_version = 0

    @property
    def authority_key(self) -> bytes:
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def _host(self, peer: PeerId, share: float) -> Host:
        transport = ObservedTransport(self.network.transport(peer), peer, lambda *message: self.on_message(*message))
        return Host(
            peer=peer,
            backend=self._backend(),
            compute=ComputeThread(share),
            transport=transport,
            fingerprint="test",
            clock=SystemClock(),
            seal=SEAL if peer == OWNER else None,
            authority_key=self.authority_key,
        )

    def ticket(
        self, peer: PeerId, *, job: str = "", version: int = 1, driver: bool = False, lifetime_s: float = 600.0
    ) -> bytes:
        content = Ticket(
            job=job or self.job,
            peer=peer,
            stage=-1 if driver else 0,
            plan_version=version,
            role="driver" if driver else "stage",
            expires_at_s=SystemClock().wall_s() + lifetime_s,
            addresses=() if driver else {**self.addresses, **self.elsewhere}.get(peer, ()),
        )
        return sign_ticket(content, self.key)

    def contact(self, peer: PeerId) -> bytes:
        """The ticket with which others may dial `peer`; empty for the owner."""
        return b"" if peer == OWNER else self.ticket(peer)

    def tickets(self, version: int = 1) -> dict[str, bytes]:
        peers = {host.peer: self.ticket(host.peer, version=version) for host in self.hosts}
        return {**peers, OWNER: self.ticket(OWNER, version=version, driver=True)}

    def deployment(self, plan: Plan) -> Deployment:
        """As the broker grants it."""
        self.newest_version = max(self.newest_version, plan.version)
        return Deployment(plan=plan, members=dict(self.addresses), tickets=self.tickets(plan.version))

    def kill(self, *peers: PeerId) -> None:
        """Their processes are gone, with all they had."""
        for peer in peers:
            self.dead.add(peer)
            self.network.disconnect(peer)

    async def bury(self, peer: PeerId) -> None:
        """What a dead process held is gone from this one too."""
        for door in [door for door in self.doors if door._host.peer == peer]:
            self.doors.remove(door)
            await door.close()
            self._computes.remove(door._host.compute)
            door._host.compute.close()

    async def revive(self, peer: PeerId) -> None:
        """A new process of the same machine, which knows nothing."""
        number = next(number for number, host in enumerate(self.hosts) if host.peer == peer)
        self.hosts[number] = self._host(peer, self._share)
        await self._open(self.hosts[number])
        self.dead.discard(peer)
        self.changed.set()

    async def _open(self, host: Host) -> None:
        door = JobAcceptor(host, self.authority_key)
        listener = await host.transport.listen(door.accept, host="pool", port=0)
        self.doors.append(door)
        self.addresses[host.peer] = listener.addresses
        self._computes.append(host.compute)

    async def __aenter__(self) -> MemoryPool:
        self._computes = [self.owner.compute]
        for host in self.hosts:
            await self._open(host)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for door in self.doors:
            await door.close()
        for compute in self._computes:
            compute.close()


class ObservedTransport:
    """A transport whose channels tell what they are about to send."""

    def __init__(self, inner: Transport, owner: PeerId, on_message: Observer) -> None:
        self._inner = inner
        self._owner = owner
        self._on_message = on_message

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> Listener:
        return await self._inner.listen(
            lambda channel: accept(self._observed(channel)), host=host, port=port, strangers=strangers
        )

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> Channel:
        return self._observed(await self._inner.dial(addresses, expect=expect, stream=stream, timeout_s=timeout_s))

    def _observed(self, channel: Channel) -> Channel:
        send, receiver = channel.send, channel.remote.peer or PeerId("")

        async def observed(message: Message, tensors: Sequence[HostTensor] = ()) -> None:
            self._on_message(self._owner, receiver, message)
            await send(message, tensors)

        channel.send = observed
        return channel


@dataclass
class HandReplanner:
    """Makes plans by hand as the broker's pool would: the standby, else whoever is idle, else those that remain with
    the cut `recut`, if that is given; else waits for somebody."""

    pool: MemoryPool
    journal: CommitJournal
    dead: asyncio.Event
    """The driver that asks is dead already."""
    recut: Sequence[tuple[int, int]] = ()
    faulty_peers: dict[str, str] = field(default_factory=dict[str, str])
    """Peer -> why nothing is for it any more."""

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        while True:
            await self.pool.broker_there.wait()
            if self.dead.is_set():
                await asyncio.Event().wait()
            plan = self._replaced(present.plan, lost)
            if plan is not None:
                break
            waiting(f"for a peer in the place of {', '.join(peer[:8] for peer in sorted(lost))}")
            self.pool.changed.clear()
            await self.pool.changed.wait()
        self.journal.adopt_plan(plan.version, msgspec.json.encode(plan))
        return self.pool.deployment(plan)

    def distrust(self, peer: str, reason: str) -> None:
        self.faulty_peers[peer] = reason

    def _replaced(self, plan: Plan, lost: frozenset[str]) -> Plan | None:
        gone = {*lost, *self.pool.dead, *self.faulty_peers}
        standbys = {standby.stage: standby.peer for standby in plan.standbys if standby.peer not in gone}
        placed = {stage.peer for stage in plan.stages} - lost
        living = [host.peer for host in self.pool.hosts if host.peer not in self.pool.dead | self.faulty_peers.keys()]
        stages: list[StagePlacement] = []
        for stage in plan.stages:
            if stage.peer in lost:
                idle = [
                    peer
                    for peer in living
                    if peer not in placed and peer not in set(standbys.values()) - {standbys.get(stage.stage)}
                ]
                peer = standbys.pop(stage.stage, None) or next(iter(idle), None)
                if peer is None:
                    return self._cut_anew(plan, [one for one in living if one not in lost]) if self.recut else None
                placed.add(PeerId(peer))
                stages.append(msgspec.structs.replace(stage, peer=peer))
            else:
                stages.append(stage)
        kept = tuple(Standby(stage=stage, peer=peer) for stage, peer in sorted(standbys.items()) if peer not in placed)
        return msgspec.structs.replace(
            plan,
            version=self.pool.newest_version + 1,
            stages=tuple(stages),
            standbys=kept,
            snapshot_every=plan.snapshot_every if kept else 0,
        )

    def _cut_anew(self, plan: Plan, living: Sequence[PeerId]) -> Plan:
        """The owner keeps what it has at the end."""
        peers = iter(living)
        last = len(self.recut) - 1
        stages = tuple(
            msgspec.structs.replace(
                plan.stages[-1 if number == last else 0],
                stage=number,
                peer=plan.stages[-1].peer if number == last else next(peers),
                blocks=blocks,
                in_flight=last - number + 1,
            )
            for number, blocks in enumerate(self.recut)
        )
        return msgspec.structs.replace(
            plan, version=self.pool.newest_version + 1, stages=stages, standbys=(), snapshot_every=0
        )


class NoReplanner:
    """A pool that has nobody else: the job ends with the reason it asked for."""

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        raise ExecutionError("nobody is there")

    def distrust(self, peer: str, reason: str) -> None:
        return


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
    """A training job on a `MemoryPool`. `ranges`: half-open block ranges per stage of one replica; `owned`: stages of
    the owner, in each replica."""

    pool: MemoryPool
    directory: Path
    graph: Graph
    ranges: Sequence[tuple[int, int]]
    owned: frozenset[int]
    data: Data
    steps: int
    microbatches: int
    """Of a step, over all replicas."""
    state: StateSource
    replicas: int = 1
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(weight_decay=0.1))
    learning_rate: Callable[[int], float] = lambda step: 1e-3 * (step + 1)
    clip_norm: float | None = 1.0
    precision: str = "fp32"
    codecs: tuple[Codec, ...] = ()
    seed: int = 7
    standbys: Mapping[int, int] = field(default_factory=dict[int, int])
    """Stage -> number of the peer that stands by for it."""
    snapshot_every: int = 2
    save_base: bool = True
    checkpoint_every: int = 0
    evaluate_every: int = 0
    evaluation_batches: int = 0
    in_flight: int | None = None
    room: bool = False
    """Whether the plan knows of memory to spare, so that weight gradients may be put off."""
    recompute: bool = False
    """Whether the stages make activations again in backward."""
    offload: bool = False
    """Whether the stages keep optimizer state in files."""
    offload_weights: bool = False
    """Whether their weights lie in files between uses; with `recompute`."""
    base_stays: bool = False
    """Only an adapter is trained: checkpoints are of it alone."""
    tolerant: bool = False
    """Whether stages may move among machines of unlike numerics."""
    replans: bool = False
    """Whether there is a broker to ask for another plan; otherwise the job ends."""
    exchange: JointSeat | None = None
    """With other jobs that train the same model."""
    sync_every: int = 0
    sync_lag: int = 0
    sync_early: tuple[int, int, int] = (0, 0, 0)
    sync_codec: Codec = "none"
    sync_rate: float = 1.0
    sync_momentum: float = 0.0
    sync_begun: int = 0
    secret: bytes = b""
    """Of spot checks; empty: there are none."""
    recut: Sequence[tuple[int, int]] = ()
    """The cut for those that remain when nobody can stand in."""
    version: int = 1
    patience_s: float = CEILING_S
    """After which a start of the driver counts as hanging."""

    def plan(self) -> Plan:
        peers = iter(self.pool.hosts)
        count = len(self.ranges)
        stages = tuple(
            StagePlacement(
                stage=replica * count + number,
                replica=replica,
                peer=OWNER if number in self.owned else next(peers).peer,
                blocks=blocks,
                in_flight=self.in_flight or count - number,
                roles=("loss",) if number in self.owned else ("stage",),
                memory_limit_bytes=2**30 if self.room else 0,
                in_flight_bytes=1 if self.room else 0,
                recompute=self.recompute,
                offload=self.offload,
                offload_weights=self.offload_weights,
                fingerprint=self.pool.owner.fingerprint,
            )
            for replica in range(self.replicas)
            for number, blocks in enumerate(self.ranges)
        )
        first = self.pool.first
        standbys = tuple(
            Standby(stage=stage, peer=peer_id(first + number)) for stage, number in sorted(self.standbys.items())
        )
        return Plan(
            version=self.version,
            graph_hash="",
            stages=stages,
            feed=OWNER,
            standbys=standbys,
            snapshot_every=self.snapshot_every if standbys else 0,
            microbatches=self.microbatches,
            step_time_s=1.0,
            tokens_per_s=1.0,
            codecs=self.codecs,
            certificate=Certificate(method="by hand", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
        )

    def training_job(self) -> TrainingJob:
        return TrainingJob(
            job=self.pool.job,
            owner=OWNER,
            graph=self.graph,
            options=StageOptions(
                seed=self.seed,
                microbatches=self.microbatches,
                optimizer=msgspec.structs.replace(
                    self.optimizer, anchored=self.sync_every > 0, overlapped=self.sync_lag > 0
                ),
                precision=self.precision,  # pyright: ignore[reportArgumentType]
                takeover="tolerant" if self.tolerant else "exact",
                sync_every=self.sync_every,
                sync_lag=self.sync_lag,
                sync_steps=self.steps,
                sync_early=self.sync_early,
                sync_codec=self.sync_codec,
                sync_rate=self.sync_rate,
                sync_momentum=self.sync_momentum,
                sync_begun=self.sync_begun,
                base_stays=self.base_stays,
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
            secret=self.secret,
        )

    def cut(self) -> Cut:
        return cut(self.training_job(), self.plan())

    def stage_options(self) -> list[StageOptions]:
        """What each stage is told, in stage order."""
        job = self.training_job()
        return [stage_options(job.options, self.plan(), stage) for stage in range(self.replicas * len(self.ranges))]

    def header(self) -> CheckpointHeader:
        params = self.graph.params.values()
        return CheckpointHeader(
            graph_hash="",
            aliases={alias: spec.key for spec in params for alias in spec.aliases},
            private_keys=frozenset(),
            adapter_keys=frozenset(spec.key for spec in params if spec.trainable) if self.base_stays else frozenset(),
        )

    async def run(
        self,
        *,
        kill_after: int | None = None,
        stop_after: int | None = None,
        epilogue: Callable[[Driver], object] | None = None,
        on_event: Callable[[progress.Progress], None] = lambda event: None,
        power_cut: bool = False,
    ) -> Run:
        """One start of the driver, from what its journal and the newest checkpoint say. `kill_after`: its process dies
        once that step is official (or when `die` is called); `stop_after`: it is asked to stop then. `epilogue` is
        awaited before the end. `power_cut`: before that, all peers were started anew."""
        if power_cut:
            for host in self.pool.hosts:
                self.pool.kill(host.peer)
                await self.pool.revive(host.peer)
        with CommitJournal(self.directory / "commits.sqlite") as journal:
            journal.start_incarnation()
            plan = self.plan() if journal.plan is None else msgspec.json.decode(journal.plan.plan, type=Plan)
            journal.adopt_plan(plan.version, msgspec.json.encode(plan))
            newest = latest(self.directory)
            saved = -1 if newest is None else CheckpointReader(newest).step
            events: list[progress.Progress] = []
            killed = self._dying = asyncio.Event()

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
                self.pool.deployment(plan),
                journal=journal,
                checkpoints=Checkpoints(self.directory, self.header(), files={}, keep=100),
                saved=saved,
                replanner=HandReplanner(self.pool, journal, killed, self.recut) if self.replans else NoReplanner(),
                on_progress=watch,
                exchange=self.exchange,
            )
            self.driver = driver
            running = asyncio.ensure_future(driver.run())
            dying = asyncio.ensure_future(killed.wait())
            try:
                async with asyncio.timeout(self.patience_s):
                    await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
                    if not running.done():
                        running.cancel()
                        self.pool.network.disconnect(OWNER)
                        with suppress(asyncio.CancelledError):
                            await running
                        return Run(self, None, events, max(saved, 0))
                    result = Run(self, await running, events, max(saved, 0))
                    if epilogue is not None:
                        result.extra = await epilogue(driver)  # pyright: ignore[reportGeneralTypeIssues]
                    return result
            except TimeoutError:
                raise AssertionError(f"the job hangs: {driver._machine.phase} {driver._machine.story}") from None
            finally:
                dying.cancel()
                await driver.close()

    def die(self) -> None:
        """The driver's process is killed: nothing it would say arrives any more."""
        self.pool.network.disconnect(OWNER)
        self._dying.set()


@dataclass(repr=False)  # asyncio writes down the result of what it ran before it looks at signals
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
