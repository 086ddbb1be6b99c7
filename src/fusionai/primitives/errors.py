"""The exception tree. Decides what is the user's mistake (exit 2) and what is a failure (exit 1).

FusionError                  exit 1, something failed
├── UsageError               exit 2, wrong flag, file, recipe, address, invitation
│   ├── RecipeError          a recipe or configuration file
│   ├── ModelError           a model that can't be loaded or captured
│   └── DataError            a data set that can't be read
├── GraphError               a graph outside the closed grammar or its caps
├── PlanError                no plan satisfies the constraints
├── WireError                a frame or message that breaks the protocol
├── TransportError           a connection could not be made or was lost
│   └── ChannelClosed        the other side closed, orderly or not
├── TrustError               an identity, invitation, ticket or signature that is not valid
├── RefusedError             the other side answered with a refusal
├── ExecutionError           a backend could not run what it was given
│   └── OutOfMemoryError     its memory does not suffice
└── StorageError             disk full, torn file, wrong hash

Neighbours: everything raises these; `cli` turns them into one sentence and an exit code. `nearest` words what they say
of an unknown name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

LISTED: Final = 40
"""Known names that a message lists at most (chosen)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` or, if no known name is similar, the list of known names."""
    names = sorted(known)
    if close := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {close[0]!r}?"
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED]) or 'none'}{rest}."


class FusionError(Exception):
    """Base class. `message` says what was expected, what came and for which entity; `hint` says what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} {self.hint}"


class UsageError(FusionError):
    """A mistake that the user can correct: exit code 2."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe or configuration file with invalid content."""


class ModelError(UsageError):
    """A model that can't be loaded or captured."""


class DataError(UsageError):
    """A data set that can't be read."""


class GraphError(FusionError):
    """A graph outside the closed grammar, the operator allow-list or its caps."""


class PlanError(FusionError):
    """No plan satisfies the constraints; the message names the tightest one."""


class WireError(FusionError):
    """A frame or message that breaks the protocol."""


class TransportError(FusionError):
    """A connection could not be made or was lost."""


class ChannelClosed(TransportError):
    """The other side closed the channel, orderly or not."""


class TrustError(FusionError):
    """An identity, invitation, ticket or signature that is not valid."""


class RefusedError(FusionError):
    """The other side answered with a refusal; `code` is one of `wire.messages.RefusalCode`."""

    def __init__(self, message: str, *, code: str = "refused", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        if code == "bad_invitation":
            self.exit_code = UsageError.exit_code  # the user can correct an old or mistyped invitation


class ExecutionError(FusionError):
    """A backend could not run what it was given."""


class OutOfMemoryError(ExecutionError):
    """A backend's memory does not suffice."""


class StorageError(FusionError):
    """Disk full, torn file, wrong hash."""
