"""A desk of the broker's page that shows what a test gives it and keeps what it was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusionai.cli.page.actions import Action, ActionDone, MakeCode, MakeInvitation, PlanTraining
from fusionai.cli.page.overview import (
    JobRow,
    LinkRow,
    MachineRow,
    PageNotice,
    PageOverview,
    PlanPicture,
    ProgramRow,
    RecipeRow,
    RefusedMachine,
    StageRow,
)
from fusionai.primitives.errors import UsageError

_NAMES = ("attic", "laptop", "tower", "office with a very long name")


def machine(name: str, **changes: object) -> MachineRow:
    given: dict[str, object] = {
        "peer": f"peer-{name}",
        "name": name,
        "device": "NVIDIA GeForce RTX 3080",
        "memory_bytes": 10 * 10**9,
        "share": 1.0,
        "flops_per_s": 2.9e13,
        "isolated": "yes",
        "state": "active",
        "words": "working",
        "since_s": 1_700_000_000.0,
        "job": "poems-a1",
        "part": "runs 1",
        **changes,
    }
    return MachineRow(**given)  # pyright: ignore[reportArgumentType]


def stage(number: int, name: str, **changes: object) -> StageRow:
    given: dict[str, object] = {
        "stage": number,
        "name": name,
        "blocks": (4 * number, 4 * number + 4),
        "roles": ("stage",),
        "replica": 0,
        "compute_s": 0.02 * (number + 1),
        "send_s": 0.031,
        "memory_bytes": 4 * 10**9,
        "memory_limit_bytes": 10 * 10**9,
        **changes,
    }
    return StageRow(**given)  # pyright: ignore[reportArgumentType]


PLAN = PlanPicture(
    sentence="Predicted: 1,234 tokens/s, 1.2 s per step.",
    stages=(
        stage(0, "attic"),
        stage(1, "laptop", standby="office with a very long name"),
        stage(2, "job owner", roles=("loss",), memory_limit_bytes=0, send_s=0.0, blocks=(8, 9)),
    ),
    spares=("office with a very long name",),
    bottleneck="compute of stage 1",
)
OVERVIEW = PageOverview(
    pool="friends",
    addresses=("tcp://192.168.1.7:4711",),
    announces=True,
    machines=(
        machine(_NAMES[0]),
        machine(_NAMES[1], share=0.5),
        machine(_NAMES[2], state="lost", words="lost", job="", part=""),
        machine(_NAMES[3], state="idle", words="standing by", job="", part=""),
    ),
    refused=(RefusedMachine(peer="q" * 52, name="newcomer"),),
    approves=True,
    links=(
        LinkRow(ends=("peer-attic", "peer-laptop"), route="lan", round_trip_s=4.1e-4, bytes_per_s=1.1e8),
        LinkRow(ends=("peer-attic", f"peer-{_NAMES[3]}"), route="relay", round_trip_s=0.043, bytes_per_s=0.0),
    ),
    jobs=(
        JobRow(
            job="poems-a1",
            title="poems",
            owner="this machine",
            state="running",
            is_live=True,
            steps_done=120,
            steps=400,
            started_at_s=1_700_000_000.0,
            plan=PLAN,
            events=("2023-11-14 22:13:20Z machine tower was lost; office took its place",),
        ),
        JobRow(
            job="old-b2",
            title="old-b2",
            owner="76pnutpy",
            state="done",
            is_live=False,
            steps_done=10,
            steps=10,
            started_at_s=1_600_000_000.0,
            plan=None,
            events=(),
        ),
    ),
    programs=(
        ProgramRow(
            number=2,
            kind="serve",
            title="owner/chatty",
            command="fusion serve owner/chatty --port 0",
            state="running",
            since_s=1_700_000_000.0,
            exit_code=None,
            url="http://127.0.0.1:8123",
            last="page: http://127.0.0.1:8123/",
        ),
        ProgramRow(
            number=1,
            kind="train",
            title="poems",
            command="fusion train /home/me/fusion/page/poems/recipe.toml",
            state="ended",
            since_s=1_700_000_000.0,
            exit_code=1,
            url="",
            last="error: no machine is here",
        ),
    ),
    recipes=(RecipeRow(name="poems", is_running=False, has_checkpoint=True),),
    notices=(PageNotice(at_s=1_700_000_050.0, text="tower is lost (silent); 3 machines are here."),),
)


@dataclass
class ScriptedDesk:
    """Answers every action; `refusal`: with this sentence instead."""

    shown: PageOverview = OVERVIEW
    refusal: str = ""
    asked: list[Action] = field(default_factory=list)

    def overview(self) -> PageOverview:
        return self.shown

    def log(self, job: str) -> tuple[str, ...]:
        if job != "poems-a1":
            raise UsageError(f"there is no job {job!r} in this pool.")
        return self.shown.jobs[0].events

    def lines(self, number: int) -> tuple[str, ...]:
        if number != 1:
            raise UsageError(f"there is no program {number}.")
        return ("step 1/4", "error: no machine is here")

    async def act(self, action: Action) -> ActionDone:
        self.asked.append(action)
        if self.refusal:
            raise UsageError(self.refusal, hint="Try another one.")
        match action:
            case MakeCode():
                return ActionDone(text="Valid for 10 min.", command="fusion join", code="012345")
            case MakeInvitation():
                return ActionDone(text="Keep it secret.", command="fusion join fusion1-abc", qr=("101", "010", "111"))
            case PlanTraining():
                verdict = ("Fits: 2 machines can train it.", "1,234 tokens/s, a step of 8 microbatches in 1.2 s.")
                return ActionDone(text="Planned.", verdict=verdict, plan=PLAN, recipe="[job]\nsteps = 7\n")
            case _:
                return ActionDone(text="Done.")
