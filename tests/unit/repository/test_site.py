"""The documentation builds as a site, and none of its links leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusionai.primitives.environment import inherited

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_page_is_in_the_site_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, env=inherited(), capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")]
    index = [page.with_name("index") if page.name == "README" else page for page in pages]
    missing = [page for page in index if not (tmp_path / "site" / page.with_suffix(".html")).is_file()]
    assert len(pages) > 60
    assert not missing
