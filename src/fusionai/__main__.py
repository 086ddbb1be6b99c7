"""`python -m fusionai`: the same as the `fusion` command, for places where scripts are not on the path."""

from __future__ import annotations

import sys

from fusionai.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
