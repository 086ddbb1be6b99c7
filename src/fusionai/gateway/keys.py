"""Who may ask: API keys from a file. Decides by comparing SHA-256 digests in constant time; keeps no key in memory.

A line of the file is a key, or `sha256:` and its digest in hexadecimal, with a name before it if wanted: `name = key`.
Empty lines and lines that begin with `#` say nothing. Neighbours: `guards` asks for every request.
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


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """`scope`: what separates this holder's prefix cache from others'; it tells nothing of the key."""

    name: str
    scope: str


class KeyRing:
    """All keys that are good."""

    def __init__(self, digests: dict[bytes, str]) -> None:
        """`digests`: SHA-256 of each key, with its holder's name."""
        self._digests = tuple(digests.items())

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Raises `UsageError` with the line that is wrong."""
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
                    f"{path}:{number}: this key has {len(found['key'])} characters, at least "
                    f"{SHORTEST_KEY_CHARACTERS} are needed.",
                    hint='Make one: python -c "import secrets; print(secrets.token_urlsafe(24))".',
                )
            told = bytes.fromhex(digest[1]) if digest else hashlib.sha256(found["key"].encode()).digest()
            digests[told] = found["name"] or f"key {len(digests) + 1}"
        if not digests:
            raise UsageError(f"{path}: no API key in it.", hint="Write one key per line.")
        return cls(digests)

    def holder(self, key: str) -> KeyHolder | None:
        """Whose key this is. Takes the same time whichever it is."""
        shown = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found: KeyHolder | None = None
        for digest, name in self._digests:
            if hmac.compare_digest(digest, shown):
                found = KeyHolder(name, hashlib.sha256(b"fusionai prefix scope" + digest).hexdigest())
        return found
