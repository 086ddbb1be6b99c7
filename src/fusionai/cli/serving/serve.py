"""`fusion serve MODEL`: OpenAI's, Anthropic's and Ollama's APIs over the pool, or over local processes (`--local`).

Prints the start and the end: at the first Ctrl-C, open streams may finish for some seconds, then the stages are
released. `client.serving.serve` runs the job, `gateway` answers requests, `cli.serving.view` prints the job's events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fusionai.cli import console
from fusionai.cli import options as flags
from fusionai.cli.options import ServingOptions, given_options
from fusionai.cli.running import lifeline_option, run_until_stopped
from fusionai.cli.serving.endpoint import ApiEndpoint, OpenEndpoint, opened
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import parse_seconds
from fusionai.serving.speculating import MOST_FIXED

if TYPE_CHECKING:
    from fusionai.client.serving.job import ServeRequest
    from fusionai.client.serving.serve import ServeEvent
    from fusionai.gateway.tracing import Tracer

PORT: Final = 8000

_ENDPOINT_OPTIONS: Final = flags.options(
    flags.host_option("127.0.0.1", "; others than loopback need API keys and TLS"),
    flags.port_option("Listen on this TCP port; 0: any free one.", default=PORT, shown=str(PORT)),
    flags.path_option(
        "--api-key-file",
        "FILE",
        "Accept the API keys of this file, one per line, as `name = key` or `key`. Without it, only this machine may "
        "send requests.",
        name="key_file",
        dir_okay=False,
    ),
    flags.path_option(
        "--tls-cert",
        "FILE",
        "Speak HTTPS with this certificate: a PEM file with the chain up to an authority that clients trust.",
        name="tls_certificate",
        dir_okay=False,
    ),
    flags.path_option("--tls-key", "FILE", "The PEM file of the certificate's private key.", dir_okay=False),
    click.option(
        "--clear-text",
        is_flag=True,
        help="Let other machines connect without TLS. API keys, prompts and answers then travel in clear: every "
        "machine on the way can read and change them.",
    ),
    click.option(
        "--strict",
        is_flag=True,
        help="Refuse requests with unknown fields. Without this flag such fields are ignored, and the answer's header "
        "x-fusion-ignored names them.",
    ),
    click.option(
        "--image-urls",
        is_flag=True,
        help="Fetch images that requests name by URLs, from the public internet. Without this flag, requests must "
        "contain the images themselves.",
    ),
    click.option("--name", metavar="NAME", help="What clients call the model.  [default: its directory or hub id]"),
)


def _idle_s(text: str) -> float:
    if not (seconds := parse_seconds(text)):
        raise UsageError(f"expected a time above 0, such as 10min, got {text!r}.")
    return seconds


class _ServeCommand(click.Command):
    """Keeps the arguments as written, for the processes of several models."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WRITTEN] = list(args)
        return super().parse_args(ctx, args)


_WRITTEN: Final = "fusionai.cli.serving.written"


@click.command(cls=_ServeCommand)
@click.argument("models", metavar="MODEL...", nargs=-1)
@flags.path_option(
    "--models",
    "FILE",
    "Serve the models of this TOML file: tables [[model]] with the key model, and flags of this command as further "
    "keys.",
    name="models_file",
    dir_okay=False,
)
@flags.quantity_option(
    "--unload-after",
    _idle_s,
    "TIME",
    "With several models: unload one that was not used for this long, e.g. 10min.  [default: when another needs its "
    "machines]",
    name="unload_after_s",
)
@flags.number_option("--local", "Start a pool of N peers on this machine and serve from it.", None, 1)
@flags.number_option(
    "--spares",
    "Keep this many peers free as spares; with --local, start this many further peers.  [default: 1 with --local]",
    None,
    0,
)
@flags.stages_option()
@flags.choice_option(
    "--goal",
    "What the pool's other machines are for. throughput: further pipelines, each with a copy of the model; balanced: "
    "first a spare for each stage, then further pipelines; latency: spares, and the rest stays free.  [default: "
    "balanced; latency with --local, --stages or several models]",
    ["throughput", "balanced", "latency"],
)
@flags.serving_options
@click.option(
    "--speculate",
    type=flags.WordOrCount(
        ["auto", "off"], f"expected auto, off or a number from 1 to {MOST_FIXED}, got {{}}.", MOST_FIXED
    ),
    default="auto",
    show_default=True,
    metavar="auto|off|K",
    help="Speculative decoding: guess tokens ahead and verify them in one pass. auto: as many guesses as pay off "
    "when measured; off: none; K: always K.",
)
@click.option(
    "--draft",
    metavar="SMALL",
    help="Guess tokens with this small model, which must have the same tokenizer, or with the EAGLE-3 head of MODEL in "
    "this directory.  [default: the MTP head in MODEL's own files, else repetitions in the text]",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    help="Also serve a LoRA adapter of MODEL, in PEFT layout or as the directory of a job that trained one. Requests "
    'choose it with "model": NAME. May be repeated.',
)
@flags.path_option(
    "--adapter-directory",
    "DIR",
    "Let requests load adapters from below DIR while the model is served, and unload them: POST /v1/load_lora_adapter "
    "and /v1/unload_lora_adapter.",
    exists=True,
    file_okay=False,
)
@flags.number_option(
    "--adapter-places", "With --adapter-directory: room for N adapters at a time.  [default: 2]", None, 1, 256
)
@flags.number_option("--adapter-rank", "With --adapter-directory: largest rank of them.  [default: 16]", None, 1, 1024)
@flags.choice_option(
    "--checks",
    "Spot-check peers: spares recompute part of the texts to find machines that compute wrongly.",
    ["spot", "off"],
    "spot",
)
@_ENDPOINT_OPTIONS
@flags.own_part_options("embedding and head")
@click.option("--behind-gateway", is_flag=True, hidden=True, help="Don't print the address, which clients don't use.")
@lifeline_option
@flags.home_option
@flags.json_option
@click.pass_context
def serve(
    context: click.Context,
    models: tuple[str, ...],
    models_file: Path | None,
    unload_after_s: float | None,
    served: ServingOptions,
    adapters: Sequence[str],
    home: Path,
    lifeline: bool,
    json_file: Path | None,
    **given: Any,
) -> None:
    """Serve models from the pool at http://HOST:PORT until Ctrl-C: OpenAI's API at /v1, Anthropic's and Ollama's at /.

    Each peer holds some of the model's layers; this machine holds embedding and head, unless --ends says otherwise, and
    answers the requests. The FILE of --json is written when the model is ready, and again at the end.

    With several models, each has a process and a job of its own: the first one is loaded at once, others when a request
    names them. If the pool has no room for another one, the one used longest ago makes room.

    MODEL: a directory in Hugging Face layout, a GGUF file, a hub id, owner/name:Q4_K_M for a GGUF file on the hub, or
    the directory of a job of `fusion train`.
    """
    local, spares = given["local"], given.pop("spares")
    flags.check_waiting(given, local is None and models_file is None and len(models) < 2)
    if local is not None and (given["invitation"] is not None or given["stages"] is not None):
        raise UsageError("--local starts its own pool: it can't be combined with --invite or --stages.")
    if given["draft"] is not None and given["speculate"] == "off":
        raise UsageError("--draft names a model that guesses: it can't be combined with --speculate off.")
    if models_file is not None or len(models) > 1:
        local_spares = 1 if spares is None else spares
        _serve_several(context, models, models_file, unload_after_s, home, given, local_spares, json_file, lifeline)
        return
    if not models:
        raise UsageError("expected MODEL: a directory, a GGUF file, a hub id, or --models FILE.")
    if unload_after_s is not None:
        raise UsageError("--unload-after needs several models: a single one stays until Ctrl-C.")
    (model,) = models
    from fusionai.client.serving.adapters import AdapterRoom
    from fusionai.client.serving.job import ServeRequest
    from fusionai.client.serving.names import parse_adapters

    directory, count, rank = (given.pop(f"adapter_{name}") for name in ("directory", "places", "rank"))
    if directory is None and (count, rank) != (None, None):
        raise UsageError("--adapter-places and --adapter-rank need --adapter-directory.")

    endpoint = ApiEndpoint(**{name: given.pop(name) for name in ApiEndpoint.__dataclass_fields__})
    single = local is not None or given["stages"] is not None or endpoint.behind_gateway
    goal = given.pop("goal") or ("latency" if single else "balanced")
    request = ServeRequest(
        model=model,
        goal=goal,
        needs=served.needs,
        home=home,
        local_spares=1 if spares is None else spares,
        spares=None if local is not None else spares,
        ends=served.ends,
        privacy=served.privacy,
        first_layers=served.first_layers,
        last_layers=served.last_layers,
        confidential=served.confidential,
        adapters=parse_adapters(adapters),
        adapter_room=None if directory is None else AdapterRoom(directory, count or 2, rank or 16),
        checks=given.pop("checks") == "spot",
        **given,
    )
    if any(endpoint.name == adapter for adapter, _ in request.adapters):
        raise UsageError(f"an adapter has the same name as the model, {endpoint.name!r}.", hint="Give it another name.")
    run_until_stopped(lambda stop: _run(request, endpoint, json_file, stop), lifeline=lifeline)


def _serve_several(
    context: click.Context,
    models: tuple[str, ...],
    models_file: Path | None,
    idle_s: float | None,
    home: Path,
    given: dict[str, Any],
    local_spares: int,
    json_file: Path | None,
    lifeline: bool,
) -> None:
    from fusionai.cli.serving.several import FrontRequest, programs, serve_several

    endpoint = ApiEndpoint(**{name: given[name] for name in ApiEndpoint.__dataclass_fields__})
    options = given_options(serve, context, context.meta[_WRITTEN])
    request = FrontRequest(
        programs=programs(serve, models, models_file, options, given["local"]),
        home=home,
        local=given["local"],
        spares=local_spares,
        invitation=given["invitation"],
        idle_s=idle_s,
    )
    door = opened(endpoint, json_file)

    async def run(stop: asyncio.Event) -> None:
        with closing(door.listener):
            await serve_several(request, door, stop)

    run_until_stopped(run, lifeline=lifeline)


async def _run(request: ServeRequest, endpoint: ApiEndpoint, json_file: Path | None, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, and again after giving way to a more urgent job, if the model may wait."""
    from fusionai.client.pool.job_process import GAVE_WAY

    while await _run_once(request, endpoint, json_file, stop) == GAVE_WAY and request.wait and not stop.is_set():
        console.line(f"The model is not served for now: {GAVE_WAY}. It waits in the queue.")


async def _run_once(request: ServeRequest, endpoint: ApiEndpoint, json_file: Path | None, stop: asyncio.Event) -> str:
    """Serve until `stop` is set, or until the broker stops the job; return its reason, else an empty text. If `stop` is
    set before the model is ready, the start is cancelled."""
    from fusionai.cli.serving.view import ServingView
    from fusionai.gateway.tracing import tracer_from_environment
    from fusionai.privacy.findings import sentence

    door = opened(endpoint, json_file)
    tracer = tracer_from_environment()
    console.line(f"privacy {request.privacy}: {sentence(request.privacy)}")
    ready = asyncio.Event()
    with closing(door.listener), ServingView() as view:
        working = asyncio.create_task(_serve(request, door, tracer, stop, ready, view))
        asked = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not ready.is_set():
                working.cancel()
            return await working
        except asyncio.CancelledError:
            if not asked.done() or ready.is_set():
                raise
            view.say("stopped before the model was ready")
            return ""
        finally:
            asked.cancel()
            working.cancel()
            await asyncio.wait({working})
            await asyncio.to_thread(tracer.close)


async def _serve(
    request: ServeRequest,
    door: OpenEndpoint,
    tracer: Tracer,
    stop: asyncio.Event,
    ready: asyncio.Event,
    on_event: Callable[[ServeEvent], None],
) -> str:
    from fusionai.cli.serving.view import ServingObservation
    from fusionai.client.serving.serve import serving
    from fusionai.gateway import server
    from fusionai.gateway.app import Gateway
    from fusionai.gateway.config import GatewayConfig

    async with serving(request, on_event=on_event) as served:
        ready.set()
        config = GatewayConfig(
            model=door.asked.name or served.model.files.name,
            keys=door.keys,
            is_strict=door.asked.strict,
            fetches_images=door.asked.image_urls,
            adapters=tuple(adapter.name for adapter in served.model.adapters),
            created_s=int(time.time()),
        )
        observation = ServingObservation(served.engine, served.engine.plan_of)
        app = Gateway(config, observation, served.model.texts, tracer=tracer, loader=served.adapters)
        closing_app = asyncio.Event()
        listening = asyncio.create_task(
            server.serve(app, door.listener, stop=closing_app, on_listening=lambda: door.announce(served), tls=door.tls)
        )
        asked = [asyncio.create_task(stop.wait()), asyncio.create_task(served.stopped.wait())]
        try:
            await asyncio.wait({listening, served.ended, *asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in asked:
                one.cancel()
            closing_app.set()
            await listening
        door.conclude(served, observation)
        return served.stop_reason()
