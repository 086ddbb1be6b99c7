"""Flags for serving a model, with their defaults, shared by `fusion serve`, `fusion chat` and `fusion plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, Literal, TypeVar, cast

import click

from fusionai.cli.options import number_option, options, privacy_option
from fusionai.primitives.errors import UsageError
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.serving.speculating import MOST_FIXED
from fusionai.wire.serving import MAX_SESSIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])

CONTEXT_TOKENS: Final = 4096
"""Default and, if the model allows more, upper limit of the default context, in tokens (chosen)."""
SESSIONS: Final = 16
MOST_SESSIONS: Final = MAX_SESSIONS - 1
"""Upper limit of `--sessions`. The probe takes one more session."""
CACHED_CONTEXTS: Final = 4
"""Number of full contexts that the KV cache must hold (chosen). Sessions are usually shorter than the context."""
PASS_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Values of the flags. `context_tokens` None: the model's, at most `CONTEXT_TOKENS`. `ends`: where embedding and
    head are; always `owner` if `privacy` keeps them there."""

    weights: Literal["fp32", "bf16", "fp16", "int8", "int4"]
    cache: Literal["fp32", "bf16", "fp16"]
    context_tokens: int | None
    sessions: int
    ends: Literal["owner", "pool"]
    privacy: PrivacyLevel = "split"
    confidential: bool = False
    asked: PrivacyLevel | None = None
    """The level given with `--privacy`, None if none was."""
    first_layers: int = 0
    last_layers: int = 0
    """Layers at either end that also stay with the job owner at level `split-k`."""

    def needs(self, model_tokens: int | None) -> ServingNeeds:
        """Return the planner's serving needs. `model_tokens`: the model's largest context, None if unlimited or
        unknown."""
        asked = self.context_tokens or min(model_tokens or CONTEXT_TOKENS, CONTEXT_TOKENS)
        context = min(asked, model_tokens or asked)
        return ServingNeeds(
            weights=self.weights,
            cache=self.cache,
            context_tokens=context,
            sessions=self.sessions,
            cache_tokens=context * min(self.sessions, CACHED_CONTEXTS),
            pass_tokens=PASS_TOKENS,
        )


class GuessCount(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """Parameter type: `auto`, `off`, or a number of guessed tokens."""

    name = "guesses"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        if value in ("auto", "off"):
            return str(value)
        if not str(value).isdecimal() or not 1 <= int(str(value)) <= MOST_FIXED:
            self.fail(f"expected auto, off or a number from 1 to {MOST_FIXED}, got {value}.", param, ctx)
        return int(str(value))


_FLAGS: Final = options(
    click.option(
        "--weights",
        type=click.Choice(["fp32", "bf16", "fp16", "int8", "int4"]),
        default="fp32",
        show_default=True,
        help="Store the model's matrices in this format; int8 and int4 are weight-only quantisation.",
    ),
    click.option(
        "--cache",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        default="fp32",
        show_default=True,
        help="Store the KV cache in this format.",
    ),
    click.option(
        "--context",
        "context_tokens",
        type=click.IntRange(min=2),
        metavar="TOKENS",
        help=f"Limit prompt plus answer to this many tokens.  [default: the model's limit, at most {CONTEXT_TOKENS}]",
    ),
    number_option("--sessions", "Serve up to this many sessions at the same time.", SESSIONS, 1, MOST_SESSIONS),
    click.option(
        "--ends",
        type=click.Choice(["owner", "pool"]),
        help="Place embedding and head on this machine (`owner`: tokens and logits never leave it) or on peers "
        "(`pool`).  [default: owner]",
    ),
    privacy_option("split; with --ends pool: encrypted"),
    click.option("--confidential", is_flag=True, help="Refuse to run at any privacy level other than `trusted`."),
    click.option(
        "--keep-first",
        "first_layers",
        type=click.IntRange(min=0),
        default=0,
        metavar="K",
        help="With --privacy split-k: keep the first K layers on this machine too.  [default: 0]",
    ),
    click.option(
        "--keep-last",
        "last_layers",
        type=click.IntRange(min=0),
        default=0,
        metavar="M",
        help="With --privacy split-k: keep the last M layers on this machine too.  [default: 0]",
    ),
)
_GIVEN: Final = ("weights", "cache", "context_tokens", "sessions", "confidential", "first_layers", "last_layers")
"""Flags whose values are passed on as they are."""


def serving_options(function: _Function) -> _Function:
    """Give a command the parameter `served: ServingOptions`."""

    @wraps(function)
    def with_options(*, ends: Literal["owner", "pool"] | None, privacy: PrivacyLevel | None, **given: Any) -> object:
        level, place = _resolved(privacy, ends)
        flags = {name: given.pop(name) for name in _GIVEN}
        return function(served=_checked(ServingOptions(**flags, ends=place, privacy=level, asked=privacy)), **given)

    return cast(_Function, _FLAGS(with_options))


def _checked(served: ServingOptions) -> ServingOptions:
    """Return `served`. Raises `UsageError` for flags that contradict its privacy level."""
    if served.confidential and served.privacy != "trusted":
        raise UsageError(
            f"--confidential needs --privacy trusted: at level {served.privacy!r} others could reconstruct the text.",
            hint="Add --privacy trusted, or leave --confidential out.",
        )
    if (served.privacy == "split-k") != bool(served.first_layers or served.last_layers):
        raise UsageError(
            "--keep-first and --keep-last need --privacy split-k, which needs at least one of them; got "
            f"--privacy {served.privacy}."
        )
    return served


def _resolved(
    privacy: PrivacyLevel | None, ends: Literal["owner", "pool"] | None
) -> tuple[PrivacyLevel, Literal["owner", "pool"]]:
    """Return the privacy level and the place of embedding and head, with their defaults. Raises `UsageError` if `ends`
    places them in the pool at a level that keeps them with the owner."""
    level = privacy or ("encrypted" if ends == "pool" else "split")
    if ends == "pool" and keeps_ends(level):
        raise UsageError(
            f"--ends pool sends token ids and logits to peers, but --privacy {level} keeps them on this machine.",
            hint="Leave one of the two out.",
        )
    return level, ends or "owner"
