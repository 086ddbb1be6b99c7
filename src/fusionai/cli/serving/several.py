"""`fusion serve` with more than one model: one address, and a process for each model that is loaded.

Flags of the command line hold for all models. A TOML file (`--models`) may give each model its own:

    [[model]]
    model = "Qwen/Qwen3-8B"     # as on the command line
    name = "big"                # further keys are the flags of `fusion serve`
    weights = "int4"
    adapter = ["law=adapters/law"]

`client.serving.hosts` runs the processes, `gateway.front` forwards requests to them. Loads no framework.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from fusionai.cli import console
from fusionai.cli.options import flag_of, write_json, written_option
from fusionai.cli.serving.endpoint import OpenEndpoint
from fusionai.client.pool.local_pool import local_threads, serving_pool
from fusionai.client.pool.session import OWNER_DIRECTORY, owner_membership
from fusionai.client.serving.hosts import ModelHosts, ModelProgram
from fusionai.client.serving.names import model_name, parse_adapters
from fusionai.gateway import server
from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.front import Front
from fusionai.primitives.errors import UsageError, nearest

_FOR_ALL: Final = frozenset(
    {
        "host",
        "port",
        "tls_certificate",
        "tls_key",
        "clear_text",
        "home",
        "json_file",
        "lifeline",
        "behind_gateway",
        "local",
        "invitation",
        "models_file",
        "unload_after_s",
    }
)
"""Parameters that concern the address or the pool, not a model."""
_FOR_ONE: Final = frozenset({"name", "adapters", "draft", "first_layers", "last_layers"})
"""Parameters that can't hold for several models."""
_NOT_HERE: Final = frozenset({"adapter_directory", "adapter_places", "adapter_rank"})
"""Parameters that need a single model: a request to load an adapter names no model."""
_SAME: Final = frozenset({"key_file", "strict", "image_urls"})
"""Parameters that every model gets from the command line: what clients may do must not depend on the model."""


@dataclass(frozen=True, slots=True)
class FrontRequest:
    """Where several models are served and from which pool."""

    programs: tuple[ModelProgram, ...]
    home: Path
    local: int | None
    spares: int
    invitation: str | None
    idle_s: float | None


def programs(
    command: click.Command, models: Sequence[str], file: Path | None, given: Mapping[str, Any], local: int | None
) -> tuple[ModelProgram, ...]:
    """Return the program of each model. `given`: the command line's options as written, by parameter. Raises
    `UsageError`."""
    options = {param.name or "": param for param in command.params if isinstance(param, click.Option)}
    for name in sorted(_FOR_ONE & given.keys()):
        raise UsageError(
            f"{flag_of(options[name])} belongs to one model, but several are served.",
            hint="Write the models into a file with their flags (--models FILE).",
        )
    for name in sorted(_NOT_HERE & given.keys()):
        raise UsageError(f"{flag_of(options[name])} can't be used with several models.", hint="Serve one model alone.")
    shared = _FOR_ALL | ({"spares"} if local is not None else frozenset())
    common = [
        text for name, value in given.items() if name not in shared for text in written_option(options[name], value)
    ]
    if local is not None and "threads" not in given:
        common += ["--threads", str(local_threads(local))]  # the pool's machines need the other cores
    entries: list[tuple[str, dict[str, Any]]] = [(model, {}) for model in models]
    if file is not None:
        own_keys = options.keys() - shared - _NOT_HERE - _SAME
        entries += _read(file, {name: options[name] for name in own_keys})
    made: list[ModelProgram] = []
    for model, own in entries:
        name = own.pop("name", None)
        arguments = [*common, *(text for key, value in own.items() for text in written_option(options[key], value))]
        _check(command, model, arguments, file if own else None)
        adapters = tuple(adapter for adapter, _ in parse_adapters(own.get("adapters", ())))
        made.append(ModelProgram(name or model_name(model), adapters, (model, *arguments)))
    names = [name for program in made for name in (program.name, *program.adapters)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two models or adapters have the name {name!r}.", hint="Give them names in a file (--models FILE)."
            )
    return tuple(made)


def _read(file: Path, options: Mapping[str, click.Option]) -> list[tuple[str, dict[str, Any]]]:
    """Return the models of a file with their options, by parameter. Raises `UsageError`."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise UsageError(f"{file}: the models can't be read: {problem}.") from problem
    by_key = {flag_of(option).removeprefix("--").replace("-", "_"): name for name, option in options.items()}
    entries = table.pop("model", [])
    if table or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{file}: expected tables [[model]] and nothing else.")
    found: list[tuple[str, dict[str, Any]]] = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(model := entry.pop("model", None), str):
            raise UsageError(f'{file}: [[model]] number {number} lacks the key model, such as model = "Qwen/Qwen3-8B".')
        own: dict[str, Any] = {}
        for key, value in entry.items():
            name = by_key.get(key.replace("-", "_"))
            if name is None:
                near = nearest(key.replace("-", "_"), by_key)
                raise UsageError(f"{file}: [[model]] {model!r} has the unknown key {key!r}; {near}")
            if isinstance(value, list) != options[name].multiple or isinstance(value, bool) != options[name].is_flag:
                kind = "a list" if options[name].multiple else "true or false" if options[name].is_flag else "one value"
                raise UsageError(f"{file}: [[model]] {model!r}: {key} needs {kind}, got {value!r}.")
            own[name] = value
        found.append((model, own))
    if not found:
        raise UsageError(f"{file}: expected at least one table [[model]].")
    return found


def _check(command: click.Command, model: str, arguments: Sequence[str], file: Path | None) -> None:
    """Raise `UsageError` if the command would refuse these arguments."""
    try:
        command.make_context("serve", [model, *arguments])
    except click.UsageError as wrong:
        where = "" if file is None else f"{file}: "
        raise UsageError(f"{where}{model}: {wrong.format_message()}") from wrong


async def serve_several(request: FrontRequest, door: OpenEndpoint, stop: asyncio.Event) -> None:
    """Serve the models until `stop` is set; the first one is loaded at once. Raises what prevents that."""
    home, invitation = request.home, request.invitation
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusion-models-")))
        if request.local is not None:
            console.line(f"starting a pool of {request.local} peers and {request.spares} spares on this machine")
            starting = serving_pool(home, request.local, request.spares, say=lambda text: console.line(text))
            pool = await stack.enter_async_context(starting)
            home, invitation = pool.directory / OWNER_DIRECTORY, pool.invitation
        await owner_membership(home, invitation)
        own = tuple(
            ModelProgram(one.name, one.adapters, (*one.arguments, "--home", str(home))) for one in request.programs
        )
        hosts = await stack.enter_async_context(ModelHosts(own, directory, _say, idle_s=request.idle_s))
        config = GatewayConfig(model="", keys=door.keys, created_s=int(time.time()))
        await _listen(Front(config, hosts), hosts, door, stop)


async def _listen(front: Front, hosts: ModelHosts, door: OpenEndpoint, stop: asyncio.Event) -> None:
    names = [program.name for program in hosts.programs]
    closing = asyncio.Event()

    def announce() -> None:
        console.line(f"listening at {door.url}/v1 for {', '.join(names)}")
        console.line(f"page: {door.url}/ (also the base URL for clients of Anthropic and Ollama)")
        console.line("a request loads its model; a model makes room when another needs its machines")

    async def load_first() -> None:
        async with hosts.use(names[0]):
            write_json(door.json_file, "serve", {"url": door.url, "models": names, "loaded": [names[0]]})
            console.line(f"ready: {names[0]} answers at {door.url}/v1")

    listening = asyncio.create_task(
        server.serve(front, door.listener, stop=closing, on_listening=announce, tls=door.tls)
    )
    first, asked = asyncio.create_task(load_first()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({listening, first, asked}, return_when=asyncio.FIRST_COMPLETED)
        if first.done() and not (listening.done() or asked.done()):
            first.result()
            await asyncio.wait({listening, asked}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        closing.set()
        for task in (first, asked):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await listening


def _say(name: str, text: str) -> None:
    if text:
        console.line(f"[{name}] {console.printable(text)}")
