"""`fusion join` of a machine that gives wrong results, a process of its own; by path: LIE PART, then the command.

The shipped program but for its backend (`harness.faulty_peers`). Neighbour:
`tests/integration/test_cli_faulty_peers.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args
from unittest.mock import patch


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from fusionai.cli.main import entry
    from harness.faulty_peers import Lie, LyingBackend

    lie, part = sys.argv[1], float(sys.argv[2])
    kind = next(one for one in get_args(Lie) if one == lie)
    sys.argv = ["fusion", *sys.argv[3:]]
    with patch("fusionai.peer.device.open_worker", lambda *_args, **_fields: LyingBackend(kind, part=part)):
        entry()


if __name__ == "__main__":
    main()
