"""API keys from a file. Compares SHA-256 digests in constant time; no key stays in memory.

Each line of the file is a key, or `sha256:` and the key's digest in hexadecimal, optionally with a name before it:
`name = key`. Empty lines and lines that begin with `#` are ignored. Neighbours: `guards` checks every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
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
            raise UsageError(f"{path}: the file of API keys can't be read: {problem}") from problem
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
            told = bytes.fromhex(digest[1]) if digest else hashlib.sha256(found["key"].encode()).digest()
            digests[told] = found["name"] or f"key {len(digests) + 1}"
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
