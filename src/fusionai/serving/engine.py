"""The serving engine: generations in, tokens out, over the stages of a pool.

It puts a job's state machine, driver and open requests together, checks requests, and reports the status. The state
machine `coordination.serving.driver` schedules passes and reacts to faults.

Neighbours: `serving.driver` sends passes and collects results, `serving.answers` samples them and emits tokens;
`client.serving.serve` starts the engine, the gateway and the terminal chat submit generations.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from fusionai.coordination.round.interface import StopAsked
from fusionai.coordination.round.verification import Inspector
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.admission import BatchLimits, QueueFull, TooLong
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.checks import TextChecks
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.stage_times import StageTimes
from fusionai.coordination.serving.state import ServingPhase
from fusionai.execution.connections import Deployment, PlanSource
from fusionai.execution.host import Host
from fusionai.ir.serving import Purpose
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Plan
from fusionai.serving import job as progress
from fusionai.serving.answers import Answers, may_be_guessed
from fusionai.serving.driver import ServingDriver
from fusionai.serving.faults import ServingFaultLog
from fusionai.serving.generating import Generating, LastRow, TextToRead
from fusionai.serving.images import PlacedImage, seen_together
from fusionai.serving.interface import (
    GIFTS,
    EngineBusy,
    EngineStatus,
    Generation,
    Gift,
    PromptTooLong,
    StageStatus,
    TextPair,
)
from fusionai.serving.job import ServingJob, cut
from fusionai.serving.pooling import Collector
from fusionai.serving.speculating import NgramProposer, Proposer, Speculation
from fusionai.transport.routes.addresses import is_loopback, parse_address

LOADING_S: Final = 0.02
"""Seconds between two looks at whether all stages have loaded an adapter (chosen)."""
READING: Final = 64
"""Most texts of one request for vectors or scores that wait or are computed at a time (chosen): a quarter of the
queue."""
PROBE_TOKENS: Final = 8
"""Length of the probe text that must cross all stages before the engine is ready (chosen)."""
StageState = Literal["running", "loading", "rebuilding", "lost"]


class ServingEngine:
    """Implements `serving.interface.Engine`. Use as: `running = create_task(engine.run())`, `await engine.ready()`,
    serve, `engine.stop(reason)`, `await running`, `await engine.close(reason)`.

    `deployment`: the initial plan, granted by the broker. `names`: machine names by peer id; may grow while the engine
    runs. `proposer`: makes guesses if the job wants speculation, by default from repetitions in the text; closed with
    the engine. Create the engine inside a running event loop.
    """

    def __init__(
        self,
        job: ServingJob,
        host: Host,
        deployment: Deployment,
        *,
        replanner: PlanSource,
        names: Mapping[str, str],
        incarnation: int,
        on_progress: Callable[[progress.Progress], None],
        proposer: Proposer | None = None,
    ) -> None:
        self.purpose: Purpose = job.purpose
        self.vocabulary = job.vocabulary
        self.context_tokens = job.context_tokens
        self.stop_tokens = job.stop_tokens
        self._job = job
        self._host = host
        self._names = names
        self._speculation: Speculation | None = None
        if job.speculate != "off" and not job.carries_states:
            count = None if job.speculate == "auto" else job.speculate
            self._speculation = Speculation(proposer or NgramProposer(), count, host.clock.now_s)
        self._numbers = itertools.count(1)
        self.adapters = {name: number for number, name in enumerate(job.adapters, 1)}
        """Names of the adapters that generations may use, with their numbers."""
        self._loaded: Counter[int] = Counter()
        """How often an adapter was loaded in place of a number's former one."""
        self._faults = ServingFaultLog(names, host.clock, lambda note: on_progress(progress.Fault(note)))
        whole = cut(job, deployment.plan)
        self._batcher = Batcher(
            batch_limits(job, deployment), holds=bool(job.secret), times=StageTimes(job.balance_tokens)
        )
        self._machine = machine_of(job, self._batcher, whole.roles(deployment.plan, job.owner), incarnation)
        self._answers = Answers(
            job,
            self._machine,
            self._faults,
            self._speculation,
            now_s=host.clock.now_s,
            post=lambda event: self._driver.post(event),
        )
        self._driver = ServingDriver(
            job,
            host,
            deployment,
            whole,
            self._machine,
            replanner=replanner,
            faults=self._faults,
            answers=self._answers,
            on_progress=on_progress,
        )

    # ------------------------------------------------------------------------------------------------ lifecycle

    async def run(self) -> None:
        """Load, probe, serve until `stop`. Raises `ExecutionError` if the job can't continue."""
        ended = await self._driver.run()
        reason = self._faults.named(ended.failed or ended.stopped or "done")
        self._answers.state = "stopped"
        self._answers.end_all(reason)
        if ended.failed is not None:
            error = ExecutionError(f"serving {self._job.model} failed: {reason.rstrip('.')}.")
            if not self._answers.ready.done():
                self._answers.ready.set_exception(error)
            raise error
        if not self._answers.ready.done():
            self._answers.ready.set_exception(ExecutionError(f"serving {self._job.model} was stopped: {reason}."))

    async def ready(self) -> None:
        """Wait until a probe has crossed all stages and its result matched. Raises the errors of `run`."""
        await asyncio.shield(self._answers.ready)

    def stop(self, reason: str) -> None:
        """End every generation and make `run` return."""
        self._driver.post(StopAsked(reason))

    async def close(self, reason: str = "done") -> None:
        self._answers.state = "stopped"
        self._answers.end_all(reason)
        await self._driver.close(reason)
        self._answers.close()

    # -------------------------------------------------------------------------------------------------- requests

    def submit(self, generation: Generation) -> Generating:
        """Start a generation. Raises `EngineBusy`, `PromptTooLong`, `ExecutionError` (a token outside the vocabulary,
        an unknown adapter)."""
        self._require("tokens")
        number = next(self._numbers)
        deadline_s = generation.deadline_s
        adapter = self._adapter(generation.adapter)
        reads_states = self._speculation is not None and self._speculation.reads_states
        spec = SessionSpec(
            number=number,
            scope=generation.scope,
            prompt=generation.text,
            max_tokens=generation.max_tokens - len(generation.answered),
            deadline_s=None if deadline_s is None else self._host.clock.now_s() + deadline_s,
            all_rows=generation.prompt_logprobs,
            states=reads_states and may_be_guessed(generation),
            adapter=adapter,
            edition=self._loaded[adapter],
            together=seen_together(generation.prompt, generation.images),
        )
        self._admit(spec, generation.images)
        return self._answers.generate(number, generation)

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        """Vectors of the prompts, made of their last hidden states as the model's files say. Raises the errors of
        `submit`."""
        self._require("vectors")
        used, single = self._adapter(adapter), self._job.pooling.single
        # A prompt that is read in pieces, or found in the prefix cache, has no pass with its first row alone.
        first = single == "cls" and self._job.options.at_once
        every = not first and single != "lasttoken"

        def begun(prompt: Sequence[int]) -> TextToRead:
            spec = self._reading(
                prompt,
                scope,
                output="hidden",
                all_rows=every,
                first_row=first,
                adapter=used,
                edition=self._loaded[used],
            )
            return self._answers.read(spec.number, len(prompt) if every else 1, Collector(self._job.pooling))

        return await self._read([partial(begun, prompt) for prompt in prompts])

    async def score(self, pairs: Sequence[TextPair], scope: str) -> list[list[float]]:
        """Scores of pairs of texts, one per label of the model. Raises the errors of `submit`."""
        self._require("scores")

        def begun(pair: TextPair) -> TextToRead:
            spec = self._reading(pair.tokens, scope, second_from=pair.second_from if self._job.takes_types else 0)
            return self._answers.read(spec.number, 1, LastRow())

        return await self._read([partial(begun, pair) for pair in pairs])

    def _require(self, wanted: Gift) -> None:
        if wanted not in (gives := GIFTS[self.purpose]):
            raise ExecutionError(f"{self._job.model} gives {' and '.join(gives)} of texts, not {wanted}.")

    def _reading(self, prompt: Sequence[int], scope: str, **wanted: Any) -> SessionSpec:
        """Submit a text of which rows are wanted, not tokens."""
        spec = SessionSpec(number=next(self._numbers), scope=scope, prompt=tuple(prompt), max_tokens=0, **wanted)
        self._admit(spec)
        return spec

    async def _read(self, texts: Sequence[Callable[[], TextToRead]]) -> list[list[float]]:
        """Begin the texts, at most `READING` at a time so that one request does not fill the queue, and return what
        each gives."""
        asked: list[TextToRead] = []
        try:
            for begun in texts:
                if len(asked) >= READING:
                    self._driver.post(None)
                    await asked[len(asked) - READING].done
                asked.append(begun())
            self._driver.post(None)
            return [await text.done for text in asked]
        finally:
            for text in asked:
                self._answers.end_reading(text.number)
            self._driver.post(None)

    def _adapter(self, name: str | None) -> int:
        """Return the number of the adapter `name`, 0 for None. Raises `ExecutionError` for an unknown adapter."""
        if name is None:
            return 0
        if name not in self.adapters:
            served = ", ".join(self.adapters) or "none"
            raise ExecutionError(f"there is no adapter {name!r} for {self._job.model}; its adapters: {served}.")
        return self.adapters[name]

    @property
    def free_adapters(self) -> tuple[int, ...]:
        """Numbers of adapters that have no name and that no generation uses any more."""
        used = self._batcher.adapters.union(self.adapters.values())
        return tuple(number for number in range(1, len(self._job.options.adapter_ranks) + 1) if number not in used)

    async def load_adapter(self, name: str, number: int) -> None:
        """Have all stages load the weights that the manifest has now, then offer them as adapter `name`. Generations
        pause meanwhile. Raises `ExecutionError` if the engine ends before."""
        self._loaded[number] += 1
        self._driver.replace_weights(f"the adapter {name} is loaded")
        while self._answers.state != "ready":
            if self._answers.state == "stopped":
                raise ExecutionError(f"the engine ended before the adapter {name!r} was loaded.")
            await asyncio.sleep(LOADING_S)
        self.adapters[name] = number

    def _admit(self, spec: SessionSpec, images: Sequence[PlacedImage] = ()) -> None:
        if self._answers.state == "stopped":
            raise ExecutionError(f"the engine that serves {self._job.model} has stopped.")
        if not spec.prompt or spec.max_tokens < 0:
            raise ExecutionError(f"expected a prompt of at least one token, got {len(spec.prompt)}.")
        rows = frozenset(token for image in images for token in image.tokens)
        wrong = next((token for token in spec.prompt if not 0 <= token < self.vocabulary and token not in rows), None)
        if wrong is not None:
            raise ExecutionError(f"expected tokens from 0 to {self.vocabulary - 1}, got {wrong}.")
        positions = len(spec.prompt) + spec.max_tokens
        if positions > self.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(spec.prompt)} tokens and the request asks for {spec.max_tokens} more; "
                f"prompt and answer may have at most {self.context_tokens} tokens together.",
                hint="Send a shorter prompt or ask for fewer tokens.",
            )
        try:
            self._batcher.submit(spec, self._host.clock.now_s())
        except QueueFull as error:
            raise EngineBusy(error.message, error.retry_after_s) from None
        except TooLong as error:
            raise PromptTooLong(error.message, hint=error.hint) from None

    # ---------------------------------------------------------------------------------------------------- status

    @property
    def deployment(self) -> Deployment:
        """The plan in force with tickets and addresses; standbys that took over are in their new places."""
        return self._driver.deployment

    @property
    def plan(self) -> Plan:
        """The plan in force, without standbys that are lost."""
        return self._driver.deployment.plan

    @property
    def is_waiting(self) -> bool:
        """True if a stage has no machine to run it."""
        return self._machine.phase is ServingPhase.WAITING

    @property
    def warm_stages(self) -> frozenset[int]:
        """Stages whose spare could take over now."""
        return frozenset(standby.stage for standby in self.plan.standbys if self.is_warm(standby.stage))

    @property
    def checkable(self) -> frozenset[int]:
        """Stages whose work a standby can recompute for a spot check, because other machines know the stage's inputs
        and outputs."""
        return self._machine.roles.checkable

    def is_warm(self, stage: int) -> bool:
        """Return whether the stage's spare could take over now."""
        return self._machine.is_warm(stage)

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Treat a peer as lost. Does nothing if the peer has no connection."""
        self._driver.shut_out(peer, reason)

    def offer(self, deployment: Deployment, reason: str) -> None:
        """Switch to a newer plan (another spare, a machine that leaves) between two passes."""
        self._driver.offer(deployment, reason)

    def renew(self, deployment: Deployment) -> None:
        """Take new tickets or addresses for the plan in force."""
        self._driver.renew(deployment)

    def leaving(self, peer: str) -> None:
        """A peer asked to leave: its stages move to their standbys first."""
        self._driver.post(interface.MemberLeaving(peer))

    @property
    def status(self) -> EngineStatus:
        batcher, speculation = self._batcher, self._speculation
        return EngineStatus(
            state=self._answers.state,
            detail=self._answers.detail,
            model=self._job.model,
            stages=self._stages(),
            running=batcher.running,
            queued=batcher.queued,
            pages=batcher.pages.count,
            pages_free=batcher.pages.room,
            tokens_per_s=self._answers.tokens_per_s,
            emitted_tokens=self._answers.emitted_tokens,
            prompt_tokens=batcher.prompt_tokens,
            prefix_hit_tokens=batcher.prefix_tokens,
            faults=self._faults.notes,
            members=tuple(sorted(set(self._names.values()))),
            extra={
                "passes_under_way": float(batcher.under_way),
                "proposed_tokens": float(speculation.proposed if speculation else 0),
                "accepted_tokens": float(speculation.accepted if speculation else 0),
                **(speculation.figures if speculation else {}),
                **self._check_figures,
            },
        )

    @property
    def _check_figures(self) -> dict[str, float]:
        """Metrics of spot checks. A task is one pass of one text through a stage with a standby."""
        checks = self._machine.checks
        if checks is None:
            return {}
        inspector = checks.inspector
        return {
            "checkable_tasks": float(inspector.tasks),
            "checked_tasks": float(inspector.checked_tasks),
            "peers_found_lying": float(len(inspector.faulty_peers)),
        }

    def _stages(self) -> tuple[StageStatus, ...]:
        roles, driver = self._machine.roles, self._driver
        blocks = {placement.stage: placement.blocks for placement in driver.deployment.plan.stages}
        return tuple(
            StageStatus(
                stage=stage,
                peer=peer,
                name=self._faults.name(peer),
                blocks=blocks.get(stage, (0, 0)),
                state=self._stage_state(stage, peer),
                spare=self._faults.name(roles.standbys[stage]) if stage in roles.standbys else "",
                resident_bytes=driver.resident_bytes.get((stage, peer), 0),
                mean_compute_s=driver.compute_s.get(stage, 0.0),
            )
            for stage, peer in sorted(roles.places.items())
        )

    def _stage_state(self, stage: int, peer: str) -> StageState:
        if peer in self._machine.lost:
            return "lost"
        match self._machine.phase:
            case ServingPhase.ENLISTING | ServingPhase.LOADING:
                return "loading" if (stage, peer) not in self._driver.resident_bytes else "running"
            case ServingPhase.REBUILDING:
                return "rebuilding"
            case _:
                return "running"


def batch_limits(job: ServingJob, deployment: Deployment) -> BatchLimits:
    """Limits of the job's passes under its first plan."""
    options, peers = job.options, {PeerId(placement.peer) for placement in deployment.plan.stages}
    return BatchLimits(
        pages=options.pages,
        page_tokens=options.page_tokens,
        sessions=options.sessions - 1,
        pass_tokens=options.pass_tokens,
        in_flight=job.in_flight or len(peers),
        decoding_passes=stations(peers, job.owner, deployment.members, os.cpu_count() or 1),
        chunk_tokens=options.pass_tokens if options.at_once else min(job.chunk_tokens, options.pass_tokens),
        tile_tokens=job.tile_tokens and min(job.tile_tokens, job.chunk_tokens, options.pass_tokens),
        # The ring buffer of a layer with a window has room for the window and one pass, and states are those after two
        # passes.
        ahead_tokens=0 if job.carries_states else options.pass_tokens if job.has_windows else None,
        queue=job.queue,
        prefix=job.prefix_cache and not options.at_once,
        copies=job.has_windows or job.carries_states,
        probe_tokens=PROBE_TOKENS,
    )


def machine_of(job: ServingJob, batcher: Batcher, roles: ServingRoles, incarnation: int) -> ServingMachine:
    """The job's state machine at its beginning."""
    probe = tuple((17 * place + 3) % job.vocabulary for place in range(PROBE_TOKENS))
    # The inspector's unit of work is one pass of one text.
    checks = TextChecks(Inspector(job.secret, job.owner, 1)) if job.secret else None
    return ServingMachine(
        batcher, probe, roles=roles, incarnation=incarnation, retain=job.options.retain, checks=checks
    )


def stations(peers: Collection[PeerId], owner: PeerId, addresses: Mapping[str, Sequence[str]], cores: int) -> int:
    """Return the number of passes that can be computed at the same time, at least 1. `peers` run the stages, `owner` is
    this process, `cores` counts this computer's cores. Peers at loopback addresses run on this computer. Each other
    peer counts as a computer of its own, because one public address may hide many."""
    here = {peer for peer in peers if peer == owner or _is_here(addresses.get(peer, ()))}
    return max(1, len(set(peers) - here) + min(len(here), cores))


def _is_here(addresses: Sequence[str]) -> bool:
    parsed = [place for address in addresses if (place := parse_address(address)) is not None]
    return bool(parsed) and all(is_loopback(host) for host, _ in parsed)
