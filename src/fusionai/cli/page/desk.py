"""Reads the pool for the page and acts for its owner, through the broker that runs in this process.

Requests are the messages that `fusion pool`, `fusion invite`, `fusion evict` and `fusion stop` send, so that the broker
decides about them alike. Only what the broker does not keep is kept here: its last sentences, and when a machine's
present state was first seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar, assert_never

import segno

from fusionai.broker.server import BrokerServer
from fusionai.cli.page.actions import (
    Action,
    ActionDone,
    ApproveMachine,
    EndProgram,
    EvictMachine,
    MakeCode,
    MakeInvitation,
    PlanTraining,
    ServeModel,
    ServeTrained,
    StartTraining,
    StopPoolJob,
)
from fusionai.cli.page.overview import (
    ENDED,
    MOST_EVENTS,
    PageNotice,
    PageOverview,
    RecipeRow,
    RefusedMachine,
    job_rows,
    link_rows,
    machine_rows,
    planned_picture,
)
from fusionai.cli.page.programs import PagePrograms
from fusionai.cli.page.training import PageRecipe, TrainingForm, checked_served, recipes_in, verdict_of
from fusionai.cli.pool.trust import endorsed
from fusionai.client.pool.session import OWNER_DIRECTORY, PoolMember, known_owner, members_of
from fusionai.client.serving.names import CHECKPOINTS, model_name
from fusionai.primitives.errors import FusionError, RefusedError, UsageError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.primitives.units import format_seconds
from fusionai.transport.enrolment import MEMBERSHIP_FILE
from fusionai.wire import messages as wire

_M = TypeVar("_M", bound=wire.Message)
OWN: Final = "this machine"


class BrokerDesk:
    """The `PageDesk` of a running broker. `programs`: commands that the page starts; `approves`: the broker
    takes the endorsements of this machine's trust list; `wall_s`: seconds since 1970."""

    def __init__(
        self,
        server: BrokerServer,
        home: Path,
        programs: PagePrograms,
        *,
        approves: bool = False,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        self._programs = programs
        self._approves = approves
        self._planning = asyncio.Lock()
        self._home = home
        self._wall_s = wall_s
        self._notices: deque[PageNotice] = deque(maxlen=MOST_EVENTS)
        self._states: dict[str, tuple[str, float]] = {}
        """Each member's state and when it was first seen."""

    def notice(self, sentence: str) -> None:
        """Show a sentence of the broker on the page."""
        self._notices.append(PageNotice(at_s=self._wall_s(), text=sentence))
        self._since_s(self._members())  # the state of a machine may have changed while no browser looks

    def overview(self) -> PageOverview:
        service = self._server.service
        members = self._members()
        jobs = self._ask(wire.JobQuery(), wire.JobList).jobs
        live = [job for job in jobs if job.state not in ENDED]
        # The broker sends a job's history only when asked about that job.
        told = {view.job: view for job in live for view in self._job(job.job)}
        plans = {JobId(job.job): plan for job in live if (plan := service.plan_of(JobId(job.job))) is not None}
        # A job may wait for a machine that was sent away; it is a member no more.
        here = tuple(member for member in members if PeerId(member.view.peer) not in service.state.pool.evicted)
        names = {member.view.peer: member.named for member in members} | self._own_names()
        return PageOverview(
            pool=service.authority.pool,
            addresses=service.addresses,
            announces=service.announces,
            machines=machine_rows(here, self._since_s(members)),
            refused=tuple(RefusedMachine(peer=peer, name=name) for peer, name in service.admission.unendorsed.items()),
            approves=self._approves,
            links=link_rows(here),
            jobs=job_rows([told.get(job.job, job) for job in jobs], plans, names),
            programs=self._programs.rows(),
            recipes=tuple(self._recipe_row(one) for one in recipes_in(self._programs.directory)),
            notices=tuple(self._notices),
        )

    def log(self, job: str) -> tuple[str, ...]:
        found = self._job(job)
        if not found:
            raise UsageError(f"there is no job {job!r} in this pool.")
        return found[0].story

    def lines(self, number: int) -> tuple[str, ...]:
        return self._programs.lines(number)

    async def act(self, action: Action) -> ActionDone:
        match action:
            case PlanTraining(form=form):
                return await self._plan(form)
            case StartTraining() | ServeTrained() | ServeModel():
                return self._start(action)
            case EndProgram(number=number):
                return ActionDone(text=f"{self._programs.end(number).title} was asked to end.")
            case ApproveMachine(peer=peer):
                return self._approve(PeerId(peer))
            case MakeInvitation() | MakeCode() | EvictMachine() | StopPoolJob():
                return self._manage(action)
        assert_never(action)

    def _manage(self, action: MakeInvitation | MakeCode | EvictMachine | StopPoolJob) -> ActionDone:
        """Send the broker the owner's message."""
        match action:
            case MakeInvitation(uses=uses, lifetime_s=lifetime_s):
                return self._invite(uses, lifetime_s)
            case MakeCode():
                made = self._ask(wire.CodeRequest(), wire.CodeMade)
                within = f"Valid for {format_seconds(made.lifetime_s)}, for one machine in this network."
                beside = "" if made.announced else " This broker does not announce itself: no machine can find it."
                return ActionDone(text=within + beside, command="fusion join", code=made.code)
            case EvictMachine(peer=peer):
                gone = self._ask(wire.Evict(peer=peer), wire.Evicted).peers
                return ActionDone(text=f"Evicted: {', '.join(short(PeerId(one)) for one in gone)}.")
            case StopPoolJob(job=job):
                self._ask(wire.JobStop(job=job), wire.Done)
                return ActionDone(text=f"{job} was asked to stop; it writes a last checkpoint first.")
        assert_never(action)

    def _approve(self, peer: PeerId) -> ActionDone:
        refused = self._server.service.admission.unendorsed
        if not self._approves or peer not in refused:
            raise UsageError("no such machine waits for approval here.")
        name = refused.pop(peer)
        endorsed(self._home, peer, name)
        return ActionDone(text=f"Approved: {name or short(peer)}. Run `fusion join` on it again.")

    async def _plan(self, form: TrainingForm) -> ActionDone:
        """Keep the form as a recipe and plan it in a process of its own, one at a time."""
        recipe = PageRecipe(self._programs.directory, form.name)
        text = await asyncio.to_thread(recipe.keep, form)
        file = recipe.directory / "plan.json"
        async with self._planning:
            printed = await self._programs.once(recipe.plan_command(form, self._home, file))
        return ActionDone(
            text=f"Planned: {form.name}.",
            verdict=verdict_of(printed),
            plan=planned_picture(file.read_bytes()),
            recipe=text,
        )

    def _start(self, action: StartTraining | ServeTrained | ServeModel) -> ActionDone:
        match action:
            case StartTraining(name=name):
                recipe = PageRecipe(self._programs.directory, name)
                recipe.load()  # raises for a recipe that is not there or was changed by hand
                program = self._programs.start("train", name, recipe.train_command(self._home))
            case ServeTrained(name=name):
                recipe = PageRecipe(self._programs.directory, name)
                program = self._programs.start("serve", name, recipe.serve_command(self._home))
            case ServeModel(model=model):
                arguments = ("serve", checked_served(model), "--port", "0", "--home", str(self._home))
                program = self._programs.start("serve", model_name(model), arguments)
        return ActionDone(text=f"Started: {program.title}.")

    def _recipe_row(self, recipe: PageRecipe) -> RecipeRow:
        checkpoints = recipe.directory / "run" / CHECKPOINTS
        return RecipeRow(
            name=recipe.name,
            is_running=self._programs.running("train", recipe.name),
            has_checkpoint=checkpoints.is_dir() and any(checkpoints.iterdir()),
        )

    def _invite(self, uses: int, lifetime_s: float) -> ActionDone:
        text = self._ask(wire.InviteRequest(uses=uses, lifetime_s=lifetime_s), wire.Invited).invitation
        rows = tuple("".join("1" if dark else "0" for dark in row) for row in segno.make(text, error="l").matrix)
        machines = "one machine" if uses == 1 else f"{uses} machines"
        return ActionDone(
            text=f"For {machines}, valid for {format_seconds(lifetime_s)}. Keep it secret; it is shown once.",
            command=f"fusion join {text}",
            qr=rows,
        )

    def _job(self, job: str) -> tuple[wire.JobView, ...]:
        return self._ask(wire.JobQuery(job=job), wire.JobList).jobs

    def _members(self) -> tuple[PoolMember, ...]:
        return members_of(self._ask(wire.PoolQuery(), wire.PoolView))

    def _since_s(self, members: tuple[PoolMember, ...]) -> dict[str, float]:
        now_s = self._wall_s()
        for peer in self._states.keys() - {member.view.peer for member in members}:
            del self._states[peer]
        for member in members:
            view = member.view
            if self._states.get(view.peer, ("",))[0] != view.state:
                self._states[view.peer] = (view.state, now_s)
        return {peer: since_s for peer, (_, since_s) in self._states.items()}

    def _own_names(self) -> dict[str, str]:
        """Return the name of this machine as a job owner, if it has been one."""
        if not (self._home / OWNER_DIRECTORY / MEMBERSHIP_FILE).is_file():
            return {}
        owner = known_owner(self._home)
        return {} if owner is None else {owner.peer: OWN}

    def _ask(self, message: wire.Message, expected: type[_M]) -> _M:
        """Return the broker's answer. Raises `RefusedError`."""
        answer = self._server.ask(message)
        if isinstance(answer, wire.Refused):
            raise RefusedError(answer.reason, code=answer.code)
        if not isinstance(answer, expected):
            raise FusionError(f"the broker answered {type(answer).__name__} to {type(message).__name__}.")
        return answer
