"""Certified keys of a pool's members: an authority of its own, each machine's key in a directory beside it."""

from __future__ import annotations

import time
from pathlib import Path

from fusionai.primitives.ids import PeerId
from fusionai.transport.security.certificates import Authority, CertifiedRole, MemberCredentials, load_authority
from fusionai.transport.security.identity import load_identity


def credentials(
    authority: Authority, directory: Path, role: CertifiedRole = "member", *, issued_at_s: float | None = None
) -> MemberCredentials:
    """Of the machine whose key lies in `directory`; the key is made at the first call."""
    identity = load_identity(directory)
    now_s = time.time() if issued_at_s is None else issued_at_s
    certificate = authority.issue(identity.public_key, role, now_wall_s=now_s)
    return MemberCredentials(identity, certificate, authority.certificate)


class CertifiedPool:
    def __init__(self, home: Path, name: str = "pool") -> None:
        self.home = home
        self.authority: Authority = load_authority(home / "authority", name, now_wall_s=time.time())

    def credentials(
        self, name: str, role: CertifiedRole = "member", *, issued_at_s: float | None = None
    ) -> MemberCredentials:
        return credentials(self.authority, self.home / name, role, issued_at_s=issued_at_s)

    def peer(self, name: str) -> PeerId:
        return load_identity(self.home / name).peer

    def issue(self, public_key: bytes) -> bytes:
        return self.authority.issue(public_key, "member", now_wall_s=time.time())
