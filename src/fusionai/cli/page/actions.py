"""What the page can ask for, and what it gets: the bodies of its requests, checked against their schemas.

A body can't contain a flag or a command line. `desk` performs the actions, `app` decodes them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from fusionai.cli.page.overview import PlanPicture
from fusionai.cli.page.training import TrainingForm
from fusionai.corpus.tables import Filled

Id = Annotated[str, Meta(min_length=1, max_length=256)]


class _Action(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do"):
    """Base of all actions."""


class MakeInvitation(_Action, frozen=True, kw_only=True, tag="invite"):
    """Make an invitation for `uses` machines."""

    uses: Annotated[int, Meta(ge=1, le=1000)] = 1
    lifetime_s: Annotated[float, Meta(ge=60, le=30 * 86_400)] = 86_400.0


class MakeCode(_Action, frozen=True, kw_only=True, tag="code"):
    """Make a six-digit code for a machine nearby."""


class EvictMachine(_Action, frozen=True, kw_only=True, tag="evict"):
    """Send a member away for good."""

    peer: Id


class ApproveMachine(_Action, frozen=True, kw_only=True, tag="approve"):
    """Endorse a machine that was refused, with this machine's signing key."""

    peer: Id


class StopPoolJob(_Action, frozen=True, kw_only=True, tag="stop"):
    """Stop a job cleanly."""

    job: Id


class PlanTraining(_Action, frozen=True, kw_only=True, tag="plan"):
    """Write a recipe and plan it on the pool."""

    form: TrainingForm


class StartTraining(_Action, frozen=True, kw_only=True, tag="train"):
    """Start the job of a recipe of the page, or resume it."""

    name: Id


class ServeTrained(_Action, frozen=True, kw_only=True, tag="serve_trained"):
    """Serve what the job of a recipe of the page has trained."""

    name: Id


class ServeModel(_Action, frozen=True, kw_only=True, tag="serve"):
    """Serve a model: a directory, a GGUF file, or a name on the hub."""

    model: Filled


class EndProgram(_Action, frozen=True, kw_only=True, tag="end"):
    """End a command that was started from the page."""

    number: int


Action = (
    MakeInvitation
    | MakeCode
    | EvictMachine
    | ApproveMachine
    | StopPoolJob
    | PlanTraining
    | StartTraining
    | ServeTrained
    | ServeModel
    | EndProgram
)


class ActionDone(msgspec.Struct, frozen=True, kw_only=True):
    """The action was done. `text`: a sentence for the page. The secrets are shown once: `invitation` with the command
    that uses it and its QR code, a row of 0 and 1 per line of the picture; or `code`. Of a plan: the lines of its
    verdict, its picture and the recipe."""

    text: str
    command: str = ""
    code: str = ""
    qr: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    plan: PlanPicture | None = None
    recipe: str = ""
