"""How far divisions of a pool among serving pipelines can be from the best, and what they take to compute.

    python benchmarks/serving_divisions.py [--peers 8 16 64 500 5000] [--seeds 3] [--json FILE]

Pools have heavy-tailed speeds, memories, uplinks and latencies (`heavy_tailed` in tests/harness/problems.py). A session
may be up to eight times slower than a single one on the fastest pipeline. `gap` is the fraction by which the proven
bound exceeds the division; it is null if no pipeline holds the model or if one pipeline is as good. Seconds are
processor seconds of one thread: of the division with its bound, and of the bound alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.serving.bound import bound_tokens_per_s
from fusionai.scheduling.serving.parallel import MUCH_SLOWER, serving_pipelines

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from harness.problems import heavy_tailed

SESSIONS: Final = 16


def measured(peers: int, seed: int) -> dict[str, Any]:
    """Divide one pool."""
    problem = heavy_tailed(peers, seed)
    try:
        chain = plan(problem)
    except PlanError:
        return {"peers": peers, "seed": seed, "gap": None}
    most_s = MUCH_SLOWER * chain.step_time_s
    started_s = time.process_time()
    found = serving_pipelines(problem, chain, SESSIONS, 1 / most_s)
    divided_s = time.process_time() - started_s
    started_s = time.process_time()
    bound_tokens_per_s(problem, chain, SESSIONS, most_s)
    bound_s = time.process_time() - started_s
    return {
        "peers": peers,
        "seed": seed,
        "gap": None if found is None else round(found.optimality_gap, 4),
        "pipelines": 1 if found is None else len(found.pipelines),
        "idle": None if found is None else len(found.idle),
        "seconds": round(divided_s, 3),
        "bound_seconds": round(bound_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 16, 64, 500, 5000], help="numbers of machines")
    parser.add_argument("--seeds", type=int, default=3, help="pools of each number of machines")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for peers in arguments.peers:
        for seed in range(arguments.seeds):
            rows.append(measured(peers, seed))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
