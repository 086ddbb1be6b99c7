"""Two owners on a pool with machines for one: the second waits in the queue, across a restart of the broker, and starts
when the first ends; a place is given up with Ctrl-C and with `fusion stop`. Processes of their own, on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionai.cli.main import EXIT_DONE, EXIT_INTERRUPTED
from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text
from harness.saved_model import asked, greedy, saved_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LivePool]:
    with LivePool(tmp_path / "pool", peers=("one", "two")) as opened:
        entered = fusion("join", opened.invite(), "--owner", "--home", tmp_path / "pool" / "bert")
        assert entered.code == 0, entered.err
        yield opened


def recipe(directory: Path, name: str, **changes: object) -> Path:
    directory.mkdir()
    write_text(directory / "text.txt")
    return write_recipe(directory / "r.toml", job__name=name, placement={"stages": 2}, **changes)


def listed(home: Path, to: Path) -> dict[str, dict[str, Any]]:
    assert fusion("jobs", "--home", home, "--json", to).code == 0
    return {job["title"]: job for job in json.loads(to.read_text())["jobs"]}


def train(path: Path, home: Path, *more: object) -> Process:
    return Process("train", path, "--home", home, "--threads", 1, *more)


def test_a_second_owners_job_waits_and_starts_when_the_first_ends(pool: LivePool, tmp_path: Path):
    bert, figures = pool.directory / "bert", tmp_path / "jobs.json"
    first = train(recipe(tmp_path / "first", "first", job__steps=100_000), pool.owner)
    first.wait_for("step 1/")

    waiting = train(recipe(tmp_path / "second", "second"), bert, "--wait")
    assert "place 1 of 1; it needs at least 2 machines" in waiting.wait_for("queue: place")
    job = listed(pool.owner, figures)["second"]
    assert (job["state"], job["place"]) == ("queued", 1)
    assert "queued, place 1" in fusion("jobs", "--home", pool.owner).out
    pool.broker.end()
    waiting.wait_for("can't be reached")
    pool.open_broker()
    assert "Restored: " in pool.broker.text
    assert listed(bert, figures)["second"]["state"] == "queued"

    first.interrupt()
    assert first.ended() == EXIT_INTERRUPTED
    waiting.wait_for("queue: it is this job's turn")
    assert waiting.ended() == EXIT_DONE, waiting.text
    assert listed(bert, figures)["second"]["state"] == "done"


def losses(process: Process, figures: Path) -> list[float]:
    """Interrupt the job and return its losses."""
    process.interrupt()
    assert process.ended() == EXIT_INTERRUPTED, process.text
    return json.loads(figures.read_text())["losses"]


@pytest.mark.long
def test_an_idle_job_gives_way_and_goes_on_with_the_same_bits(pool: LivePool, tmp_path: Path):
    """The bits are those of the same recipe that nothing disturbs."""
    bert = pool.directory / "bert"
    patient = recipe(tmp_path / "patient", "patient", job__steps=100_000)
    idle = train(patient, pool.owner, "--wait", "--priority", "idle", "--json", tmp_path / "idle.json")
    idle.wait_for("step 1/")
    urgent = train(recipe(tmp_path / "urgent", "urgent", job__steps=3), bert, "--wait")
    assert "which is more urgent" in idle.wait_for("asks this job to give way to")
    done = int(idle.wait_for("it waits in the queue and goes on from there").split("stopped after ")[1].split()[0])
    assert urgent.ended() == EXIT_DONE, urgent.text
    idle.wait_for(f"step {done + 2}/")
    found = losses(idle, tmp_path / "idle.json")

    undisturbed = recipe(tmp_path / "undisturbed", "undisturbed", job__steps=100_000)
    alone = train(undisturbed, pool.owner, "--json", tmp_path / "alone.json")
    alone.wait_for(f"step {done + 2}/")
    expected = losses(alone, tmp_path / "alone.json")
    assert found[: done + 2] == expected[: done + 2]


@pytest.mark.long
def test_a_place_is_given_up_with_an_interrupt_and_with_stop(pool: LivePool, tmp_path: Path):
    bert, figures = pool.directory / "bert", tmp_path / "jobs.json"
    first = train(recipe(tmp_path / "first", "first", job__steps=100_000), pool.owner)
    first.wait_for("step 1/")
    second = recipe(tmp_path / "second", "second")
    refused = fusion("train", second, "--home", bert, "--threads", 1)
    assert refused.code == 1
    assert "no peer is free" in refused.err
    assert "--wait" in refused.err

    waiting = train(second, bert, "--wait")
    waiting.wait_for("queue: place 1 of 1")
    waiting.interrupt()
    assert waiting.ended() == EXIT_INTERRUPTED
    job = listed(bert, figures)["second"]
    assert (job["state"], job["place"]) == ("stopped", None)

    waiting = train(second, bert, "--wait")
    waiting.wait_for("queue: place 1 of 1")
    assert "is taken out of the queue" in fusion("stop", "second", "--home", bert).out
    assert waiting.ended() == EXIT_DONE
    assert "taken out of the queue" in waiting.text


@pytest.mark.long
def test_a_model_that_waits_is_served_when_its_turn_comes(pool: LivePool, tmp_path: Path):
    bert, model = pool.directory / "bert", saved_model(tmp_path / "tiny")
    first = train(recipe(tmp_path / "first", "first", job__steps=100_000), pool.owner)
    first.wait_for("step 1/")
    server = Process(
        *("serve", model, "--context", 128, "--sessions", 2, "--port", 0, "--home", bert, "--threads", 1, "--wait"),
        *("--json", tmp_path / "serve.json"),
    )
    server.wait_for("queue: place 1 of 1")
    assert listed(bert, tmp_path / "jobs.json")["serve tiny"]["place"] == 1
    first.interrupt()
    assert first.ended() == EXIT_INTERRUPTED
    server.wait_for("queue: it is this job's turn")
    server.wait_for("curl ")
    expected = greedy(model, "a pool of")
    ready = json.loads((tmp_path / "serve.json").read_text())
    assert asked(ready["url"], "a pool of")["choices"][0]["text"] == expected
    server.interrupt()
    assert server.ended() == EXIT_DONE


@pytest.mark.long
def test_an_idle_model_gives_way_and_is_served_again(pool: LivePool, tmp_path: Path):
    bert, model = pool.directory / "bert", saved_model(tmp_path / "tiny")
    server = Process(
        *("serve", model, "--context", 128, "--sessions", 2, "--port", 0, "--home", bert, "--threads", 1, "--wait"),
        *("--priority", "idle", "--goal", "latency", "--json", tmp_path / "serve.json"),
    )
    server.wait_for("curl ")
    urgent = train(recipe(tmp_path / "urgent", "urgent", job__steps=3), pool.owner, "--wait")
    server.wait_for("asks this job to give way to")
    server.wait_for("The model is not served for now")
    assert urgent.ended() == EXIT_DONE, urgent.text
    assert server.wait_until(lambda: sum("curl " in line for line in server.lines) == 2 or None), server.text
    ready = json.loads((tmp_path / "serve.json").read_text())
    assert asked(ready["url"], "a pool of")["choices"][0]["text"] == greedy(model, "a pool of")
    server.interrupt()
    assert server.ended() == EXIT_DONE
