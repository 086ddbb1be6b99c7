"""What the queue costs a broker: processor time of a decision with many queued jobs, on the shipped decisions.

    python benchmarks/job_queue.py --jobs 100,1000 --members 100 --owners 50 --json FILE

The pool is full, and each owner has as many jobs in the queue as the others. Measured: the first question of one more
job, the same question again, and the end of a job, after which a turn is given. The broker's journal is left out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

from fusionai.coordination.broker import requests
from fusionai.coordination.broker.decisions import handle
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.job_queue import QueuePolicy
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.state import BrokerRules, BrokerState, recovered
from fusionai.primitives.ids import JobId, PeerId

BROKER = PeerId("y" * 52)
GB = 10**9
REPEATS = 20


class Desk:
    """A broker's state, with the processor time of the last decision in milliseconds."""

    def __init__(self) -> None:
        rules = BrokerRules(pool="home", broker=BROKER, queue=QueuePolicy(), lease_s=1e9, max_live_jobs=10_000)
        self.state: BrokerState = recovered(rules, Pool(), 0.0)
        self.now_s, self.took_ms = 0.0, 0.0

    def ask(self, request: requests.Request) -> None:
        begun_s = time.process_time()
        self.state = handle(self.state, request, now_s=self.now_s, wall_s=1e6 + self.now_s).desk
        self.took_ms = 1000 * (time.process_time() - begun_s)


def measured(jobs: int, members: int, owners: int) -> dict[str, float]:
    desk = Desk()
    people = [PeerId(f"o{number:051}") for number in range(owners)]
    machines = [PeerId(f"m{number:051}") for number in range(members)]
    for peer in (*people, *machines):
        desk.ask(requests.Invite(BROKER, peer, 1, 60.0))
        desk.ask(requests.Enrol(peer, peer, "provider"))
    for number, peer in enumerate(machines):
        desk.ask(requests.RegisterMember(peer, number, 1, b"", (), 8 * GB, 1e9))
        owner, part = people[number % owners], MemberPlacement(peer, (0,))
        desk.ask(requests.RequestJob(owner, 9999, JobId(f"run-{number}"), "t", 9, b"", 0, (part,)))

    def place(number: int) -> requests.AskPlace:
        need = 1 + number % 4
        return requests.AskPlace(people[number % owners], 9999, JobId(f"job-{number}"), "t", 9, need, need * GB)

    for number in range(jobs):
        desk.ask(place(number))
    asked, again, ended = list[float](), list[float](), list[float]()
    for number in range(REPEATS):
        desk.now_s += 2.0
        desk.ask(place(jobs + number))
        asked.append(desk.took_ms)
        desk.ask(place(jobs + number))
        again.append(desk.took_ms)
        desk.ask(requests.ReportJob(people[number % owners], 9999, JobId(f"run-{number}"), "done", 9, ""))
        ended.append(desk.took_ms)
    figures = {"asked": asked, "again": again, "ended": ended}
    medians = {f"{name}_ms": median(values) for name, values in figures.items()}
    longest = {f"{name}_longest_ms": max(values) for name, values in figures.items()}
    return {"jobs": jobs, "members": members, **medians, **longest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="100,1000", help="numbers of queued jobs, one run each (default 100,1000)")
    parser.add_argument("--members", type=int, default=100, help="members, each with a job (default 100)")
    parser.add_argument("--owners", type=int, default=50, help="owners of the jobs (default 50)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = [measured(int(jobs), arguments.members, arguments.owners) for jobs in arguments.jobs.split(",")]
    for row in rows:
        print(
            f"{row['jobs']:5.0f} queued jobs, {row['members']:.0f} members: new place {row['asked_ms']:.2f} ms "
            f"(longest {row['asked_longest_ms']:.2f}), same question {row['again_ms']:.2f} ms, end of a job and the "
            f"turn that follows {row['ended_ms']:.2f} ms (longest {row['ended_longest_ms']:.2f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "fusionai.benchmark.job_queue/1", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
