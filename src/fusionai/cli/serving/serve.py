"""`fusion serve MODEL`: an OpenAI-compatible API over the pool, or over a pool of local processes (`--local`).

Prints the start and the end: at the first Ctrl-C, open streams may finish for some seconds, then the stages are
released. `client.serving.serve` runs the job, `gateway` answers requests, `cli.serving.view` prints the job's events.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click

from fusionai.cli import console
from fusionai.cli.options import home_option, json_option, own_part_options, port_option, write_json
from fusionai.cli.planning.view import privacy_figures, privacy_lines
from fusionai.cli.running import lifeline_option, run_until_stopped
from fusionai.cli.serving.options import GuessCount, ServingOptions, serving_options
from fusionai.primitives.errors import UsageError

if TYPE_CHECKING:
    from fusionai.cli.serving.view import ServingObservation, ServingRow
    from fusionai.client.serving.job import ServeRequest
    from fusionai.client.serving.serve import Served, ServeEvent
    from fusionai.serving.speculating import Speculate

PORT: Final = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """Where the API listens and who may use it. `name`: the model's name for clients, None: its own name."""

    host: str
    port: int
    key_file: Path | None
    name: str | None


@click.command()
@click.argument("model")
@click.option(
    "--local",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start a pool of N peers on this machine and serve from it.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep this many peers free as spares; with --local, start this many further peers.  [default: 1 with --local]",
)
@click.option(
    "--stages",
    type=click.IntRange(min=1),
    metavar="N",
    help="Cut the model into exactly this many stages.  [default: the planner chooses]",
)
@serving_options
@click.option(
    "--speculate",
    type=GuessCount(),
    default="auto",
    show_default=True,
    metavar="auto|off|K",
    help="Speculative decoding: guess tokens ahead and verify them in one pass. auto: as many guesses as pay off "
    "when measured; off: none; K: always K.",
)
@click.option(
    "--draft",
    metavar="SMALL",
    help="Guess tokens with this small model, which must have the same tokenizer.  [default: guess from repetitions "
    "in the text]",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    help="Also serve a LoRA adapter of MODEL, in PEFT layout or as the directory of a job that trained one. Requests "
    'choose it with "model": NAME. May be repeated.',
)
@click.option(
    "--checks",
    type=click.Choice(["spot", "off"]),
    default="spot",
    show_default=True,
    help="Spot-check peers: spares recompute part of the texts to find machines that compute wrongly.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Listen on this address of the machine; others than loopback need API keys.",
)
@port_option("Listen on this TCP port; 0: any free one.", default=PORT, shown=str(PORT))
@click.option(
    "--api-key-file",
    "key_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Accept the API keys of this file, one per line, as `name = key` or `key`. Without it, only this machine may "
    "send requests.",
)
@click.option("--name", metavar="NAME", help="What clients call the model.  [default: its directory or hub id]")
@own_part_options("embedding and head")
@lifeline_option
@home_option
@json_option
def serve(
    model: str,
    local: int | None,
    spares: int | None,
    stages: int | None,
    served: ServingOptions,
    speculate: Speculate,
    draft: str | None,
    adapters: tuple[str, ...],
    checks: Literal["spot", "off"],
    host: str,
    port: int,
    key_file: Path | None,
    name: str | None,
    invitation: str | None,
    device: str,
    threads: int | None,
    lifeline: bool,
    home: Path,
    json_file: Path | None,
) -> None:
    """Serve MODEL from the pool behind an OpenAI-compatible API at http://HOST:PORT/v1, until Ctrl-C.

    Each peer holds some of the model's layers; this machine holds embedding and head, unless --ends says otherwise, and
    answers the requests. The FILE of --json is written when the model is ready, and again at the end.

    MODEL: a directory in Hugging Face layout, a hub id, or the directory of a job of `fusion train`.
    """
    if local is not None and (invitation is not None or stages is not None):
        raise UsageError("--local starts its own pool: it can't be combined with --invite or --stages.")
    if draft is not None and speculate == "off":
        raise UsageError("--draft names a model that guesses: it can't be combined with --speculate off.")
    from fusionai.cli.serving.view import show_serving
    from fusionai.client.serving.job import ServeRequest
    from fusionai.client.serving.model import parse_adapters

    request = ServeRequest(
        model=model,
        needs=served.needs,
        home=home,
        local=local,
        local_spares=1 if spares is None else spares,
        ends=served.ends,
        privacy=served.privacy,
        first_layers=served.first_layers,
        last_layers=served.last_layers,
        invitation=invitation,
        device=device,
        threads=threads,
        stages=stages,
        spares=None if local is not None else spares,
        speculate=speculate,
        draft=draft,
        confidential=served.confidential,
        adapters=parse_adapters(adapters),
        checks=checks == "spot",
    )
    if name is not None and any(name == adapter for adapter, _ in request.adapters):
        raise UsageError(f"an adapter has the same name as the model, {name!r}.", hint="Give it another name.")
    door = ApiEndpoint(host=host, port=port, key_file=key_file, name=name)

    written: dict[str, object] = {}

    def announced(url: str, ready: Served) -> None:
        written.update(figures(url, ready, door))
        write_json(json_file, "serve", written)
        _announce(url, ready, door)

    def ended(ready: Served, observation: ServingObservation) -> None:
        rows, shared = _observed(ready, observation)
        show_serving(rows, left_out=observation.left_out, guessed=_guessed(ready), shared=shared)
        if json_file is not None:
            observed = {"observed": rows, "left_out": observation.left_out, "shared_cores": shared or None}
            write_json(json_file, "serve", {**written, **observed})

    run_until_stopped(lambda stop: run(request, door, stop, announced, ended), lifeline=lifeline)


def _observed(ready: Served, observation: ServingObservation) -> tuple[tuple[ServingRow, ...], str]:
    """Return the rows of predicted and measured figures, and the sentence about shared cores
    (`cli.training.observation`)."""
    from fusionai.cli.training.observation import own_hosts, shared_cores

    deployment, problem = ready.engine.deployment, ready.problem()
    everyone = (*problem.peers, *([] if problem.owner is None else [problem.owner]))
    shared = shared_cores(
        {stage.peer for stage in deployment.plan.stages},
        deployment.members,
        {profile.peer: profile for profile in everyone},
        ready.names,
        here=own_hosts(),
        cores=os.cpu_count() or 1,
    )
    return observation.rows(problem, ready.chunk_tokens), shared


def _guessed(ready: Served) -> float:
    return ready.engine.status.extra.get("accepted_tokens", 0.0)


def figures(url: str, ready: Served, door: ApiEndpoint) -> dict[str, object]:
    """Return what `--json` writes once the model is ready."""
    plan = ready.engine.deployment.plan
    return {
        "url": url,
        "model": door.name or ready.model.files.name,
        "adapters": [adapter.name for adapter in ready.model.adapters],
        "job": ready.job,
        "privacy": privacy_figures(ready.privacy, plan),
        "plan": plan,
        "peers": {stage.peer: ready.names.get(stage.peer, stage.peer) for stage in plan.stages},
        "local_pids": {} if ready.pool is None else ready.pool.pids,
    }


async def run(
    request: ServeRequest,
    door: ApiEndpoint,
    stop: asyncio.Event,
    on_ready: Callable[[str, Served], None],
    on_end: Callable[[Served, ServingObservation], None],
) -> None:
    """Serve until `stop` is set. If it is set before the model is ready, the start is cancelled."""
    from fusionai.cli.serving.view import ServingView
    from fusionai.privacy.findings import sentence

    _check_door(door)
    console.line(f"privacy {request.privacy}: {sentence(request.privacy)}")
    ready = asyncio.Event()
    with ServingView() as view:
        working = asyncio.create_task(_serve(request, door, stop, ready, view, on_ready, on_end))
        asked = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not ready.is_set():
                working.cancel()
            await working
        except asyncio.CancelledError:
            if not asked.done() or ready.is_set():
                raise
            view.say("stopped before the model was ready")
        finally:
            asked.cancel()
            working.cancel()
            await asyncio.wait({working})


async def _serve(
    request: ServeRequest,
    door: ApiEndpoint,
    stop: asyncio.Event,
    ready: asyncio.Event,
    on_event: Callable[[ServeEvent], None],
    on_ready: Callable[[str, Served], None],
    on_end: Callable[[Served, ServingObservation], None],
) -> None:
    from fusionai.cli.serving.view import ServingObservation
    from fusionai.client.serving.serve import serving
    from fusionai.gateway import server
    from fusionai.gateway.app import make_app
    from fusionai.gateway.config import GatewayConfig, KeyRing

    keys = None if door.key_file is None else KeyRing.load(door.key_file)
    async with serving(request, on_event=on_event) as served:
        ready.set()
        config = GatewayConfig(
            model=door.name or served.model.files.name,
            keys=keys,
            adapters=tuple(adapter.name for adapter in served.model.adapters),
            created_s=int(time.time()),
        )
        observation = ServingObservation(served.engine, lambda: served.engine.deployment.plan)
        app = make_app(config, observation, served.model.texts)
        closing = asyncio.Event()
        listening = asyncio.create_task(
            server.serve(app, door.host, door.port, stop=closing, on_listening=lambda url: on_ready(url, served))
        )
        asked = [asyncio.create_task(stop.wait()), asyncio.create_task(served.stopped.wait())]
        try:
            await asyncio.wait({listening, served.ended, *asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in asked:
                one.cancel()
            closing.set()
            await listening
        on_end(served, observation)


def _announce(url: str, ready: Served, door: ApiEndpoint) -> None:
    name = door.name or ready.model.files.name
    if ready.model.texts.template.is_plain:
        console.line(f"{name} has no chat template: chats are passed to it as lines of `role: text`.")
    console.line(f"ready: a probe token has crossed all stages and matched; {name} at {url}/v1")
    for sentence in privacy_lines(ready.privacy, ready.engine.deployment.plan):
        console.line(sentence)
    console.line(f"page: {url}/")
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "stream": True})
    key = "" if door.key_file is None else " -H 'Authorization: Bearer YOUR-KEY'"
    quoted = body.replace("'", "'\\''")
    console.line(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'")


def _check_door(door: ApiEndpoint) -> None:
    """Check address, port and key file before the model is loaded, which takes minutes. Raises `UsageError`."""
    if door.key_file is not None and not door.key_file.is_file():
        raise UsageError(f"--api-key-file: there is no file {door.key_file}.")
    try:
        found = socket.getaddrinfo(door.host, door.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as problem:
        raise UsageError(
            f"can't listen on {door.host}:{door.port}, which is not a valid address: {problem}."
        ) from problem
    addresses = [str(address[0]).partition("%")[0] for *_, address in found]
    if door.key_file is None and not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise UsageError(
            f"without API keys the gateway listens on this machine only, not on {door.host}.",
            hint="Give a file of keys with --api-key-file, or use --host 127.0.0.1.",
        )
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
        except OSError as problem:
            raise UsageError(
                f"can't listen on {door.host}:{door.port}: {problem.strerror or problem}.",
                hint="Another program may be using it: choose another with --port, or --port 0 for any free one.",
            ) from problem
