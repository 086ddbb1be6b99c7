"""`python -m fusionai`: the same as the `fusion` command, for places where scripts are not on the path."""

from __future__ import annotations

from fusionai.cli import entry

if __name__ == "__main__":
    entry()
