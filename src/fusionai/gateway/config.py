"""The gateway's settings: names, limits, keys, with their defaults.

Also reads the API keys.

Neighbours: all modules of this package read them; the command line sets them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import UsageError

_NAMED: Final = re.compile(r"(?:(?P<name>[\w.\- ]+?)\s*=\s*)?(?P<key>\S+)")
_DIGEST: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
SHORTEST_KEY_CHARACTERS: Final = 16
"""Least length of a key (chosen)."""


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """`scope` separates this holder's prefix cache from others'; it reveals nothing about the key."""

    name: str
    scope: str


class KeyRing:
    """All valid keys."""

    def __init__(self, digests: dict[bytes, str]) -> None:
        """`digests`: SHA-256 of each key -> name of its holder."""
        self._digests = tuple(digests.items())

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Read a file of keys. Raises `UsageError` with the wrong line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(
                f"{path}: the file of API keys can't be read: {problem}.", hint="Write one key per line, as text."
            ) from problem
        digests: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _NAMED.fullmatch(line.strip())
            if found is None:
                raise UsageError(f"{path}:{number}: expected `key` or `name = key`.")
            digest = _DIGEST.fullmatch(found["key"])
            if digest is None and len(found["key"]) < SHORTEST_KEY_CHARACTERS:
                raise UsageError(
                    f"{path}:{number}: this key has {len(found['key'])} characters; at least "
                    f"{SHORTEST_KEY_CHARACTERS} are needed.",
                    hint='Make a key with: python -c "import secrets; print(secrets.token_urlsafe(24))".',
                )
            value = bytes.fromhex(digest[1]) if digest else hashlib.sha256(found["key"].encode()).digest()
            digests[value] = found["name"] or f"key {len(digests) + 1}"
        if not digests:
            raise UsageError(f"{path} contains no API key.", hint="Write one key per line.")
        return cls(digests)

    def holder(self, key: str) -> KeyHolder | None:
        """The holder of a key, None if it is not valid. Takes the same time for every key."""
        shown = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found: KeyHolder | None = None
        for digest, name in self._digests:
            if hmac.compare_digest(digest, shown):
                found = KeyHolder(name, hashlib.sha256(b"fusionai prefix scope" + digest).hexdigest())
        return found


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one client may use. Exceeding a limit gives an error answer, never a dropped connection, with one exception:
    beyond twice `connections`, a connection is closed at once."""

    body_bytes: int = 8 * 2**20
    image_body_bytes: int = 32 * 2**20
    """Instead of `body_bytes`, if the model reads images."""
    body_timeout_s: float = 30.0
    """Time to send a whole body; the head of a request has `head_timeout_s`."""
    head_timeout_s: float = 15.0
    connections: int = 1024
    """Open connections; a request on any further one is answered with 503."""
    requests: int = 512
    """Requests being answered at the same time; any further one is answered with 429."""
    choices: int = 32
    """Generations in one request: number of prompts times `n`."""
    texts: int = 4
    """Prompts that are rendered and tokenized at the same time; further ones wait."""
    text_s: float = 30.0
    """Time for one of these prompts, in seconds (chosen: eight times what the largest body takes on a slow core)."""
    template_depth: int = 32
    """Levels of JSON in tools and in variables of the template."""
    images: int = 32
    """Images in one request."""
    inputs: int = 2048
    """Texts in one request for vectors or scores; as many as OpenAI allows."""
    unread_bytes: int = 64 * 2**10
    """Bytes of events that may wait for a client that does not read; beyond it the generation ends. The operating
    systems' buffers are additional: `socket_bytes` here, and the receive buffer of the client's system, usually 64
    KB."""
    socket_bytes: int = 16 * 2**10
    """Size of a connection's send buffer in the operating system. Small, because the buffer hides that a client does
    not read: with 256 KB each, 16 such clients kept all sessions of a slow model for about ten minutes."""
    stalled_s: float = 20.0
    """A client that accepts no data for this time while data waits for it is disconnected."""
    keep_alive_s: float = 10.0
    """Time between comments on a stream with no other events."""
    stored_responses: int = 1024
    """Responses of one API key that are kept in memory; each further one displaces the oldest."""
    stored_bytes: int = 64 * 2**20
    """Size of these responses with their conversations, as JSON (chosen: 600 conversations of 25,000 tokens)."""
    deadline_s: float | None = None
    """Deadline of a generation, unless the request sets an earlier one; None: no deadline."""
    drain_s: float = 5.0
    """Time for which streams may continue after the gateway was asked to stop."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`model`: the name that clients use; `aliases`: other names for it; `adapters`: names of its adapters, used like
    model names, unless an `AdapterLoader` says which there are. `keys` None: no API key is required, and only programs
    on this machine may send requests."""

    model: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    keys: KeyRing | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
    is_strict: bool = False
    """Refuse requests with unknown fields; otherwise these fields are ignored, and the answer's header names them."""
    fetches_images: bool = False
    """Fetch the images that requests name by URLs, from the public internet."""
    created_s: int = 0
    """Creation time of the model in seconds since 1970, as reported by `/v1/models`."""
