"""Flags about how a model is served, shared by `fusion serve`, `fusion chat` and `fusion plan --task serve`.

Decides their spelling and their defaults; serves nothing. Neighbours: the commands beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, Literal, TypeVar, cast

import click

from fusionai.cli.options import privacy_option
from fusionai.primitives.errors import UsageError
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.scheduling.types import ServingNeeds
from fusionai.serving.speculating import MOST_FIXED
from fusionai.wire.serving import MAX_SESSIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])

CONTEXT_TOKENS: Final = 4096
"""Without a word from user or model."""
SESSIONS: Final = 16
MOST_SESSIONS: Final = MAX_SESSIONS - 1
"""The probe is one more."""
CACHED_CONTEXTS: Final = 4
"""There should be room for so many whole contexts; sessions are usually shorter."""
PASS_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """`context_tokens` None: what the model can, at most `CONTEXT_TOKENS`. `ends` are the owner's where `privacy` keeps
    them there."""

    weights: Literal["fp32", "bf16", "fp16", "int8", "int4"]
    cache: Literal["fp32", "bf16", "fp16"]
    context_tokens: int | None
    sessions: int
    ends: Literal["owner", "pool"]
    privacy: PrivacyLevel = "split"
    confidential: bool = False
    asked: PrivacyLevel | None = None
    """The level as somebody named it, if anybody did."""
    first_layers: int = 0
    last_layers: int = 0
    """That stay with the job owner besides, with `split-k`."""

    def needs(self, model_tokens: int | None) -> ServingNeeds:
        """`model_tokens`: positions the model has, None where it has no limit or nobody knows."""
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
    """`auto`, `off`, or a number of guesses."""

    name = "guesses"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        if value in ("auto", "off"):
            return str(value)
        if not str(value).isdecimal() or not 1 <= int(str(value)) <= MOST_FIXED:
            self.fail(f"expected auto, off or a number from 1 to {MOST_FIXED}, got {value}.", param, ctx)
        return int(str(value))


def serving_options(function: _Function) -> _Function:
    """Give a command the parameter `served: ServingOptions`."""

    @click.option(
        "--weights",
        type=click.Choice(["fp32", "bf16", "fp16", "int8", "int4"]),
        default="fp32",
        show_default=True,
        help="How machines keep the model's matrices; int8 and int4 are weight-only.",
    )
    @click.option(
        "--cache",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        default="fp32",
        show_default=True,
        help="How machines keep keys and values.",
    )
    @click.option(
        "--context",
        "context_tokens",
        type=click.IntRange(min=2),
        help=f"Longest prompt plus answer in tokens.  [default: the model's, at most {CONTEXT_TOKENS}]",
    )
    @click.option(
        "--sessions",
        type=click.IntRange(1, MOST_SESSIONS),
        default=SESSIONS,
        show_default=True,
        help="So many at a time.",
    )
    @click.option(
        "--ends",
        type=click.Choice(["owner", "pool"]),
        help="Who has embedding and head: this machine (tokens and logits never leave it) or the pool.  "
        "[default: owner]",
    )
    @privacy_option
    @click.option(
        "--confidential", is_flag=True, help="Only trusted peers will do: refused at any other level than `trusted`."
    )
    @click.option(
        "--keep-first",
        "first_layers",
        type=click.IntRange(min=0),
        default=0,
        metavar="K",
        help="With --privacy split-k: so many layers behind the embedding stay here.",
    )
    @click.option(
        "--keep-last",
        "last_layers",
        type=click.IntRange(min=0),
        default=0,
        metavar="M",
        help="With --privacy split-k: so many layers before the head stay here.",
    )
    @wraps(function)
    def with_options(
        *,
        weights: str,
        cache: str,
        context_tokens: int | None,
        sessions: int,
        ends: Literal["owner", "pool"] | None,
        privacy: PrivacyLevel | None,
        confidential: bool,
        first_layers: int,
        last_layers: int,
        **rest: object,
    ) -> object:
        level, place = _resolved(privacy, ends)
        if confidential and level != "trusted":
            raise UsageError(
                f"--confidential asks for trusted peers, and at level {level!r} others could reconstruct the text.",
                hint="Add --privacy trusted, or leave --confidential out.",
            )
        if (level == "split-k") != bool(first_layers or last_layers):
            raise UsageError(
                f"--keep-first and --keep-last go with --privacy split-k, and that with one of them; got {level}."
            )
        served = ServingOptions(
            weights=cast(Any, weights),
            cache=cast(Any, cache),
            context_tokens=context_tokens,
            sessions=sessions,
            ends=place,
            privacy=level,
            confidential=confidential,
            asked=privacy,
            first_layers=first_layers,
            last_layers=last_layers,
        )
        return function(served=served, **rest)

    return cast(_Function, with_options)


def _resolved(
    privacy: PrivacyLevel | None, ends: Literal["owner", "pool"] | None
) -> tuple[PrivacyLevel, Literal["owner", "pool"]]:
    """Ends with the pool are what no level that keeps them can mean. Raises `UsageError`."""
    level = privacy or ("encrypted" if ends == "pool" else "split")
    if ends == "pool" and keeps_ends(level):
        raise UsageError(
            f"--ends pool sends token ids and logits to peers, --privacy {level} keeps them here.",
            hint="Leave one of them out.",
        )
    return level, ends or "owner"
