"""Flags of the commands: how each kind is declared, and those that several commands share. Also writes `--json FILE`.

`primitives.units` parses quantities.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import click
import msgspec

from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.privacy import LEVELS, PrivacyLevel, keeps_ends
from fusionai.primitives.units import parse_seconds
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.storage.atomic import write_atomic
from fusionai.transport.routes.addresses import SCHEME, parse_address
from fusionai.transport.security.identity import write_private
from fusionai.wire.serving import MAX_SESSIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Option = Callable[[_Function], _Function]


class WordOrCount(click.ParamType[Any]):
    """Parameter type: one of `words`, or a whole number from 1 to `most`. `expected`: the error's sentence, in which
    `{}` stands for the value."""

    name = "number"

    def __init__(self, words: Sequence[str], expected: str, most: int | None = None) -> None:
        self._words, self._expected, self._most = words, expected, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in self._words:
            return value
        number = int(value) if str(value).isdecimal() else 0
        if not 1 <= number <= (self._most or number):
            self.fail(self._expected.format(value), param, ctx)
        return number


def options(*given: _Option[_Function]) -> _Option[_Function]:
    """Return a decorator that gives a command several options, in the order of its help."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(given):
            function = option(function)
        return function

    return decorate


def number_option(
    flag: str,
    what: str,
    default: int | None = None,
    least: int | None = None,
    most: int | None = None,
    *,
    name: str = "",
    metavar: str | None = "N",
) -> _Option[_Function]:
    """Give a command an option that is a whole number from `least` to `most`, as the parameter `name` or the flag's
    own. `what`: the help."""
    names, kind = (flag, name) if name else (flag,), click.INT if least is None else click.IntRange(least, most)
    return click.option(*names, type=kind, default=default, show_default=True, metavar=metavar, help=what)


def choice_option(flag: str, what: str, words: Sequence[str], default: str | None = None) -> _Option[_Function]:
    """Give a command an option that is one of `words`. `what`: the help."""
    return click.option(flag, type=click.Choice(words), default=default, show_default=True, help=what)


def path_option(
    flag: str, metavar: str | None, what: str, *, name: str = "", default: Path | None = None, **kind: bool
) -> _Option[_Function]:
    """Give a command an option that is a path, as the parameter `name` or the flag's own. `what`: the help; `kind`: as
    for `click.Path`."""
    path: click.Path = click.Path(path_type=Path, **kind)
    names = (flag, name) if name else (flag,)
    return click.option(*names, type=path, default=default, show_default=True, metavar=metavar, help=what)


def converted(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return an option's callback that parses its value, or each of several. An error of `parse` becomes the usage
    error of that flag."""

    def convert(context: click.Context, parameter: click.Parameter, given: Any) -> Any:
        try:
            return given if given is None else parse(given) if isinstance(given, str) else tuple(map(parse, given))
        except UsageError as wrong:
            raise click.BadParameter(wrong.message, context, parameter) from wrong

    return convert


def quantity_option(
    flag: str, parse: Callable[[str], Any], metavar: str, what: str, default: str | None = None, *, name: str = ""
) -> _Option[_Function]:
    """Give a command an option with a unit, as the parameter `name` or the flag's own. `what`: the help."""
    names = (flag, name) if name else (flag,)
    return click.option(
        *names, callback=converted(parse), default=default, show_default=True, metavar=metavar, help=what
    )


def device_option(what: str, *, auto: bool = True) -> _Option[_Function]:
    """Give a command the parameter `device: str`. `what`: the imperative sentence of the help, without its period."""
    if not auto:
        return choice_option("--device", f"{what}.", ["cpu", "cuda", "mps"], "cpu")
    chosen = "auto: with PyTorch, cuda if there is one, else mps, else cpu"
    return choice_option("--device", f"{what}; {chosen}.", ["auto", "cpu", "cuda", "mps"], "auto")


def threads_option(what: str) -> _Option[_Function]:
    """Give a command the parameter `threads: int | None`."""
    return number_option("--threads", f"{what}.  [default: all cores]", None, 1)


def secret_text(text: str) -> str:
    """Return a secret: the text itself, which other users see in the list of processes, or the first line of standard
    input (`-`) or of a file (`@FILE`), which they don't."""
    if text == "-":
        return sys.stdin.readline().strip()
    if not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: expected a secret on its first line, as text: {problem}.") from problem
    return (lines or [""])[0].strip()


def own_part_options(what: str) -> _Option[_Function]:
    """Give a job's command the parameters `invitation`, `device`, `threads`, `wait` and `priority`. `what` this machine
    computes itself."""
    joining = (
        "Join the pool with this invitation first. Needed only until this machine has joined. - reads it from standard "
        "input, @FILE from a file."
    )
    return options(
        click.option("--invite", "invitation", metavar="INVITE", callback=converted(secret_text), help=joining),
        device_option(f"Compute the job owner's part ({what}) on this device of this machine"),
        threads_option("Compute the job owner's part with this many threads"),
        click.option(
            "--wait",
            is_flag=True,
            help="Wait in the pool's queue if no machines are free, and start when it is this job's turn. Ctrl-C gives "
            "the place up; `fusion jobs` lists the queue.",
        ),
        click.option(
            "--priority",
            metavar="CLASS",
            default="",
            help="With --wait: the job's priority class, one of those of the pool; without a policy of its owner they "
            "are high, normal, low, and idle, which gives way to the others.  [default: the pool's usual one]",
        ),
    )


def check_waiting(given: Mapping[str, Any], can_wait: bool) -> None:
    """Raise `UsageError` for a priority class without `--wait`, and for `--wait` in a command that can't wait."""
    if given["priority"] and not given["wait"]:
        raise UsageError("--priority is for a job that waits in the queue.", hint="Add --wait.")
    if given["wait"] and not can_wait:
        raise UsageError("--wait is for one model on a pool: it can't be combined with --local or several models.")


recipe_argument = click.argument("recipe", metavar="RECIPE.toml", type=click.Path(path_type=Path))
"""Gives a command the parameter `recipe: Path`."""


def stages_option(per_replica: str = "") -> _Option[_Function]:
    """Give a command the parameter `stages: int | None`."""
    what = f"Cut the model into exactly this many stages{per_replica}.  [default: the planner chooses]"
    return number_option("--stages", what, None, 1)


def host_option(default: str = "0.0.0.0", beside: str = "; 0.0.0.0: on all its IPv4 addresses") -> _Option[_Function]:
    """Give a command that other machines connect to the parameter `host: str`."""
    what = f"Listen on this address of the machine{beside}."
    return click.option("--host", default=default, show_default=True, metavar="ADDRESS", help=what)


def port_option(what: str, *, default: int | None = 0, shown: str) -> _Option[_Function]:
    """Give a command the parameter `port`. `shown`: the default in the help."""
    help_text = f"{what}  [default: {shown}]"
    return click.option("--port", type=click.IntRange(0, 65_535), default=default, metavar="PORT", help=help_text)


def invitation_options(uses: int) -> _Option[_Function]:
    """Give a command the parameters `uses: int`, with this default, and `lifetime: float` in seconds."""
    what = "Let machines join with the invitation for this long, e.g. 30min."
    return options(
        number_option("--uses", "Let this many machines join with the invitation.", uses, 1, 100_000),
        quantity_option("--lifetime", _lifetime, "TIME", what, "24h"),
    )


def _lifetime(text: str) -> float:
    seconds = parse_seconds(text)
    if not seconds:
        raise UsageError(f"expected a time above 0, such as 30min or 24h, got {text!r}.")
    return seconds


lora_option = number_option(
    "--lora",
    "Train LoRA adapters of this rank on every linear layer except the head, instead of the whole model.",
    None,
    1,
    4096,
    metavar="RANK",
)
"""Gives a command the parameter `lora: int | None`."""


def _writable(home: Path) -> Path:
    """Return `home`. Raises `UsageError` if it can't be written: the machine would get a new key at every start."""
    standing = next(place for place in (home.absolute(), *home.absolute().parents) if place.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        what = "not writable" if standing.is_dir() else "a file"
        raise UsageError(
            f"this machine's key can't be stored in {home}: {standing} is {what}.",
            hint="Choose another directory with --home or FUSION_HOME.",
        )
    return home


home_option = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=environment.fusion_home,
    callback=lambda _context, _parameter, home: _writable(home),
    help="Directory for this machine's key, pool membership and runs.  [default: $FUSION_HOME, or the platform's data "
    "directory]",
)
"""Gives a command the parameter `home: Path`."""


def privacy_option(default: str) -> _Option[_Function]:
    """Give a command the parameter `privacy: PrivacyLevel | None`. `default`: the level if the flag is not given."""
    what = "Set what stays on the job owner's machine; `fusion privacy` explains the levels."
    return choice_option("--privacy", f"{what}  [default: {default}]", LEVELS)


def _address(text: str) -> str:
    address = text if "://" in text else f"{SCHEME}://{text}"
    if parse_address(address) is None:
        raise UsageError(f"expected HOST:PORT, got {text!r}.")
    return address


address_option = click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="HOST:PORT",
    callback=converted(_address),
    help="Announce this address instead of the machine's own, e.g. a forwarded port or a name. May be repeated.",
)
"""Gives a command the parameter `addresses: tuple[str, ...]`, as `tcp://host:port`."""


def _creatable(path: Path | None) -> Path | None:
    """Return `path`. Raises `UsageError` if no file can be created there, before the work begins."""
    if path is None:
        return None
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"can't write {path}: there is no directory {folder}.", hint="Create it or name another file.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"can't write {path}: {folder} is not writable.", hint="Name a file in another directory.")
    return path


json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=lambda _context, _parameter, path: _creatable(path),
    help="Also write the results to FILE as one JSON object.",
    metavar="FILE",
)
"""Gives a command the parameter `json_file: Path | None`."""


def write_json(path: Path | None, command: str, figures: Mapping[str, object], *, is_secret: bool = False) -> None:
    """Write `figures` to `path` under the schema of `command`; nothing if `path` is None. NaN and infinities become
    null, as JSON has neither. With `is_secret`, only this user may read the file. Raises `StorageError` if the file
    can't be written; an existing file is then unchanged."""
    if path is None:
        return
    encoded = msgspec.json.encode({"schema": f"fusionai.{command}/1", **figures}, enc_hook=_encode)
    content = msgspec.json.format(encoded, indent=2) + b"\n"
    if is_secret:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, content)
    else:
        write_atomic(path, content)


def given_options(command: click.Command, context: click.Context, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line as they are written: parameter -> text, list of texts, or flag."""
    given, _, _ = command.make_parser(context).parse_args([*arguments])
    names = {param.name for param in command.params if isinstance(param, click.Option)}
    return {name: value for name, value in given.items() if name in names}


def flag_of(option: click.Option) -> str:
    """Return the option's long form."""
    return max(option.opts, key=len)


def written_option(option: click.Option, value: Any) -> list[str]:
    """Return an option as it is written on a command line."""
    if option.is_flag:
        return [flag_of(option)] if value else [*option.secondary_opts[:1]]
    values = value if isinstance(value, list | tuple) else [value]
    return [text for each in values for text in (flag_of(option), str(each))]


def attributes(record: object, names: str) -> dict[str, object]:
    """Return attributes of a record by their names, which are separated by spaces, in that order."""
    return {name: getattr(record, name) for name in names.split()}


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


LONGEST_TOKENS: Final = 32_768
"""Longest context unless another is asked for: that of an agent's prompt; chosen."""
CONTEXT_TOKENS: Final = 4096
"""Default and, if the model allows more, upper limit of the default context, in tokens (chosen)."""
SESSIONS: Final = 16
MOST_SESSIONS: Final = MAX_SESSIONS - 1
"""Upper limit of `--sessions`. The probe takes one more session."""
CACHED_CONTEXTS: Final = 4
"""Number of full contexts that the KV cache must hold (chosen). Sessions are usually shorter than the context."""
PASS_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Values of the flags. `context_tokens` None: the model's, at least `CONTEXT_TOKENS`, up to `LONGEST_TOKENS` if the
    cache has room. `ends`: where embedding and head are; always `owner` if `privacy` keeps them there."""

    weights: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "packed"]
    cache: Literal["fp32", "bf16", "fp16", "int8"]
    context_tokens: int | None
    sessions: int
    ends: Literal["owner", "pool"]
    privacy: PrivacyLevel = "split"
    confidential: bool = False
    asked: PrivacyLevel | None = None
    """The level given with `--privacy`, None if none was."""
    first_layers: int = 0
    last_layers: int = 0
    """Layers at either end that also stay with the job owner at level `split-k`."""

    def needs(self, model_tokens: int | None, packed: bool = False) -> ServingNeeds:
        """Return the planner's serving needs. `model_tokens`: the model's largest context, None if unlimited or
        unknown. `packed`: the model's files are quantised, and all machines can keep their matrices as they are. Raises
        `UsageError` if a context was given that the model does not have."""
        if self.context_tokens is not None and model_tokens is not None and self.context_tokens > model_tokens:
            raise UsageError(
                f"--context: expected at most {model_tokens}, the model's positions, got {self.context_tokens}.",
                hint="Give fewer tokens, or leave --context out.",
            )
        asked = self.context_tokens or CONTEXT_TOKENS
        context = min(asked, model_tokens or asked)
        longest = min(LONGEST_TOKENS, model_tokens or LONGEST_TOKENS) if self.context_tokens is None else 0
        return ServingNeeds(
            weights=self.weights if self.weights != "auto" else "packed" if packed else "fp32",
            cache=self.cache,
            context_tokens=context,
            longest_tokens=longest,
            sessions=self.sessions,
            cache_tokens=context * min(self.sessions, CACHED_CONTEXTS),
            pass_tokens=PASS_TOKENS,
        )


_FLAGS: Final = options(
    choice_option(
        "--weights",
        "Store the model's matrices in this format; int8 and int4 are weight-only quantisation. packed: as quantised "
        "files hold them, with the results of fp32; auto: packed if the files are quantised and all machines can, else "
        "fp32.",
        ["auto", "fp32", "bf16", "fp16", "int8", "int4", "packed"],
        "auto",
    ),
    choice_option(
        "--cache",
        "Store the KV cache in this format. int8: a byte for each number, with a scale for each head of each token.",
        ["fp32", "bf16", "fp16", "int8"],
        "fp32",
    ),
    number_option(
        "--context",
        "Limit prompt plus answer to this many tokens.  [default: the model's limit, at most "
        f"{LONGEST_TOKENS}, and at most {CONTEXT_TOKENS} if the machines have no memory for more]",
        None,
        2,
        name="context_tokens",
        metavar="TOKENS",
    ),
    number_option("--sessions", "Serve up to this many sessions at the same time.", SESSIONS, 1, MOST_SESSIONS),
    choice_option(
        "--ends",
        "Place embedding and head on this machine (`owner`: tokens and logits never leave it) or on peers (`pool`).  "
        "[default: owner]",
        ["owner", "pool"],
    ),
    privacy_option("split; with --ends pool: encrypted"),
    click.option("--confidential", is_flag=True, help="Refuse to run at any privacy level other than `trusted`."),
    *(
        click.option(
            f"--keep-{end}",
            f"{end}_layers",
            type=click.IntRange(min=0),
            default=0,
            metavar=metavar,
            help=f"With --privacy split-k: keep the {end} {metavar} layers on this machine too.  [default: 0]",
        )
        for end, metavar in (("first", "K"), ("last", "M"))
    ),
)


def serving_options(function: _Function) -> _Function:
    """Give a command the parameter `served: ServingOptions`."""

    @wraps(function)
    def with_options(*, ends: Literal["owner", "pool"] | None, privacy: PrivacyLevel | None, **given: Any) -> object:
        """Fill in the defaults that depend on each other, and raise `UsageError` for flags that contradict the privacy
        level."""
        level = privacy or ("encrypted" if ends == "pool" else "split")
        if ends == "pool" and keeps_ends(level):
            raise UsageError(
                f"--ends pool sends token ids and logits to peers, but --privacy {level} keeps them on this machine.",
                hint="Leave one of the two out.",
            )
        kept = {field: given.pop(field) for field in ServingOptions.__dataclass_fields__ if field in given}
        served = ServingOptions(**kept, ends=ends or "owner", privacy=level, asked=privacy)
        if served.confidential and level != "trusted":
            raise UsageError(
                f"--confidential needs --privacy trusted: at level {level!r} others could reconstruct the text.",
                hint="Add --privacy trusted, or leave --confidential out.",
            )
        if (level == "split-k") != bool(served.first_layers or served.last_layers):
            raise UsageError(
                "--keep-first and --keep-last need --privacy split-k, which needs at least one of them; got "
                f"--privacy {level}."
            )
        return function(served=served, **given)

    return cast(_Function, _FLAGS(with_options))
