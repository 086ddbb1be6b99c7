"""`fusion jobs`, `fusion logs` and `fusion stop`: list a pool's jobs, show one's history, stop one.

`cli.pool.session` sends the requests to the broker.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from fusionai.cli import console
from fusionai.cli.options import home_option, json_option, write_json
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.wire.messages import JobView


@click.command()
@home_option
@json_option
def jobs(home: Path, json_file: Path | None) -> None:
    """List the jobs of the pool and their progress."""
    from fusionai.cli.pool.session import in_pool

    found = in_pool(home, lambda session: session.jobs())
    write_json(json_file, "jobs", {"jobs": [_figures(job) for job in found]})
    if not found:
        console.line("No jobs yet. `fusion train RECIPE.toml` starts one.")
        return
    console.table(
        ("job", "title", "owner", "state", "step", "plan", "started"), [_row(job) for job in found], right=(4, 5)
    )


@click.command()
@click.argument("job")
@home_option
@json_option
def logs(job: str, home: Path, json_file: Path | None) -> None:
    """Show the event history of JOB (a name from `fusion jobs`) as the broker knows it. Losses and speeds are in the
    run's directory on the job owner's machine."""
    from fusionai.cli.pool.session import in_pool

    found = _one(in_pool(home, lambda session: session.jobs(job)), job)
    write_json(json_file, "logs", {**_figures(found), "story": list(found.story)})
    console.line(f"{found.job}: {_state(found)}, {_steps(found)}, plan version {found.plan_version}")
    for entry in found.story:
        console.line(console.printable(entry))


@click.command()
@click.argument("job")
@home_option
def stop(job: str, home: Path) -> None:
    """Stop JOB (a name from `fusion jobs`) cleanly: it writes a last checkpoint and can be resumed. Only the
    machines of the job's owner and of the broker may stop a job."""
    from fusionai.cli.pool.session import in_pool
    from fusionai.client.pool.session import OWNER_DIRECTORY
    from fusionai.transport.enrolment import MEMBERSHIP_FILE, load_membership

    found = _one(in_pool(home, lambda session: session.jobs(job)), job)
    if found.state in ("done", "failed"):
        console.line(f"{job} has already ended ({_state(found)}, {_steps(found)} steps).")
        return
    # Jobs belong to the machine's owner key, which differs from the key that it lends itself under.
    own_home = home / OWNER_DIRECTORY
    own = load_membership(own_home) if (own_home / MEMBERSHIP_FILE).is_file() else None
    mine = own is not None and own.peer == found.owner
    in_pool(home, lambda session: session.stop(job), membership=own if mine else None)
    console.line(f"{job} was asked to stop; `fusion jobs` shows when it has stopped.")


def _one(found: tuple[JobView, ...], job: str) -> JobView:
    if not found:
        raise UsageError(f"there is no job {job!r} in this pool.", hint="`fusion jobs` lists them.")
    return found[0]


def _row(job: JobView) -> tuple[str, ...]:
    return (
        job.job,
        job.title,
        short(PeerId(job.owner)),
        _state(job),
        _steps(job),
        str(job.plan_version),
        datetime.fromtimestamp(job.started_at_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
        if job.started_at_s
        else "",
    )


def _state(job: JobView) -> str:
    """Return the job's state. The broker reports a stopped job as done; fewer steps than planned tell them apart."""
    return "stopped" if job.state == "done" and job.steps and job.step + 1 < job.steps else job.state


def _steps(job: JobView) -> str:
    done = job.step + 1
    return f"{done} of {job.steps}" if job.steps else str(done)


def _figures(job: JobView) -> dict[str, object]:
    return {
        "job": job.job,
        "title": job.title,
        "owner": job.owner,
        "state": _state(job),
        "steps_done": job.step + 1,
        "steps": job.steps,
        "plan_version": job.plan_version,
        "started_at_s": job.started_at_s,
    }
