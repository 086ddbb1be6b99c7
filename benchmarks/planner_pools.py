"""How far plans can be from the best, and what planning takes, by number and kind of machines: the table of
docs/planning.md.

    python benchmarks/planner_pools.py [--peers 12 30 64 300 5000] [--kinds KIND ...] [--json FILE]

Pools are those by which the planner's tests judge it (tests/harness/judged_pools.py): ten kinds, heavy-tailed where
machines differ. FILE is docs/planning.json unless said otherwise; a run replaces the rows that it measures and leaves
the others. `make docs` writes the table from it. Seconds are processor seconds of this process, one thread; a plan made
before each size has the compiled loops loaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any, Final

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness.judged_pools import KINDS, judged_pool  # noqa: E402

FILE: Final = ROOT / "docs" / "planning.json"
SCHEMA: Final = "fusionai.benchmark.planner-pools/1"
LAYERS: Final = {12: 10}
"""Of the model for so many machines; 32 for every other number."""
OTHER_LAYERS: Final = 32
POOLS: Final = {12: 6, 30: 2, 64: 4, 300: 2, 5000: 1}
"""Random pools of each kind for so many machines."""
WARM_UP_SEED: Final = 999


def main() -> None:
    arguments = _arguments()
    file: Path = arguments.json
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    for peers in arguments.peers:
        _made(KINDS[0], WARM_UP_SEED, peers)
        for kind in arguments.kinds:
            row = measured(kind, peers)
            rows = [one for one in rows if (one["peers"], one["kind"]) != (peers, kind)]
            rows = sorted([*rows, row], key=lambda one: (one["peers"], KINDS.index(one["kind"])))
            print(f"{peers:5} {kind:17} " + json.dumps(row["pools"]), flush=True)
            text = {"schema": SCHEMA, "processor": platform.processor() or platform.machine(), "rows": rows}
            file.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def measured(kind: str, peers: int) -> dict[str, Any]:
    """One row: every pool of this kind with so many machines."""
    pools = [_made(kind, seed, peers) for seed in range(POOLS.get(peers, 2))]
    return {"peers": peers, "kind": kind, "layers": LAYERS.get(peers, OTHER_LAYERS), "pools": pools}


def _made(kind: str, seed: int, peers: int) -> dict[str, Any]:
    """`gap`: fraction by which the bound exceeds the plan's speed; None where there is no plan. `exact`: the plan is
    proven best. `refused`: why there is none."""
    problem = judged_pool(kind, seed, peers, LAYERS.get(peers, OTHER_LAYERS))
    started_s = time.process_time()
    try:
        found = plan(problem)
    except PlanError as refused:
        gap, exact, why = None, False, str(refused)
    else:
        gap, exact, why = found.certificate.optimality_gap, found.certificate.exact, ""
    seconds = time.process_time() - started_s
    return {"seed": seed, "gap": gap, "exact": exact, "refused": why, "seconds": round(seconds, 3)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=list(POOLS), help="numbers of machines")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of pools")
    parser.add_argument("--json", type=Path, default=FILE, help="read and write the rows here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
