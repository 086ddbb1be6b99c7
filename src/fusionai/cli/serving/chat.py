"""`fusion chat`: a conversation with a served model in the terminal, with the machines that answered on request.

Handles the slash commands and the printing; without a terminal it prints plain lines, so that a conversation can be
piped in. `cli.serving.chat_client` speaks HTTP. With MODEL, `fusion serve` runs as a separate process during the
conversation."""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.options import ServingOptions, home_option, number_option, path_option, serving_options
from fusionai.cli.serving.chat_client import (
    AnswerPart,
    AnswerPiece,
    AnswerRoute,
    ApiRefusal,
    ChatAnswer,
    ChatClient,
    Message,
    Note,
    PictureUrl,
    QuestionPart,
    ServerStatus,
    ThinkingPiece,
)
from fusionai.primitives.errors import FusionError, TransportError, UsageError
from fusionai.primitives.process import FUSION
from fusionai.primitives.units import format_bytes, format_seconds

URL: Final = "http://127.0.0.1:8000"
HELP: Final = """\
/peers   show which machines gave the last answer and how long each took; before the first answer, who holds what
/model [NAME]   go on with another model or adapter of the gateway, or list them
/image FILE   show the model a picture with the next question (JPEG, PNG, WebP or GIF)
/new     forget the conversation
/system TEXT   start a new conversation with this system message
/quit    leave (also Ctrl-D); Ctrl-C cancels an answer"""
READY_POLL_S: Final = 0.2
END_S: Final = 30.0
ANSWER_TOKENS: Final = 512
"""Default limit on the tokens of an answer (chosen); lower if fewer fit in the context."""
_KEY_FILE_HINT: Final = "Write the key, as text, on the first line of the file."
TOO_LONG: Final = "context_length_exceeded"


class _Ready(msgspec.Struct, frozen=True):
    """The part of the file of `fusion serve --json` that is read here."""

    url: str


@click.command()
@click.argument("model", required=False)
@click.option("--url", metavar="URL", help=f"Chat with the model of this running gateway.  [default: {URL}]")
@click.option(
    "--model",
    "wanted",
    metavar="NAME",
    help="Chat with this model or adapter of the gateway.  [default: its first model]",
)
@path_option(
    "--api-key-file",
    "FILE",
    "Use the first API key of this file, with lines `name = key` or `key`.",
    name="key_file",
    dir_okay=False,
    exists=True,
)
@number_option("--local", "With MODEL: start a pool of N peers on this machine.", None, 1)
@serving_options
@number_option(
    "--max-tokens",
    f"Limit the tokens of an answer.  [default: {ANSWER_TOKENS}, or fewer if the context is full]",
    None,
    1,
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0, 2.0),
    metavar="T",
    help="Sampling temperature; 0: greedy.  [default: the model's]",
)
@number_option("--seed", "Sampling seed; the same seed gives the same answers.  [default: random]")
@click.option("--system", metavar="TEXT", help="Start the conversation with this system message.")
@home_option
def chat(
    model: str | None,
    url: str | None,
    wanted: str | None,
    key_file: Path | None,
    local: int | None,
    served: ServingOptions,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    system: str | None,
    home: Path,
) -> None:
    """Chat with the model of a running gateway (--url), or serve MODEL for this conversation. In the chat, /peers shows
    the route of the last answer and /help lists the other commands."""
    if model is not None and url is not None:
        raise UsageError("give a MODEL to serve or the --url of a running gateway, not both.")
    if model is None and local is not None:
        raise UsageError("--local needs a MODEL to serve: `fusion chat MODEL --local N`.")
    if model is not None and wanted is not None:
        raise UsageError("--model names a model of a running gateway; it can't be given with a MODEL to serve.")
    key = None if key_file is None else _key(key_file)
    serving = nullcontext(url or URL) if model is None else _served(model, local, served, home)
    with serving as address, ChatClient(address, key, wanted) as client:
        ChatHistory(client, max_tokens=max_tokens, temperature=temperature, seed=seed, system=system).run()


@dataclass(slots=True)
class ChatHistory:
    """One conversation with one model. `run` lasts until the end of input or /quit."""

    client: ChatClient
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    system: str | None
    messages: list[Message] = field(default_factory=list[Message])
    route: AnswerRoute | None = None
    pictures: list[QuestionPart] = field(default_factory=list[QuestionPart])
    """Pictures to send with the next question."""

    def run(self) -> None:
        """Read questions and print answers. Raises `TransportError` if the gateway can't be reached."""
        self._begin(self.system)
        terminal = sys.stdin.isatty()
        if terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  gives `input` editing and history
            console.line(f"{self.client.model} at {self.client.address}; /help lists the commands.")
        while (line := _line("> " if terminal else "")) is not None:
            text = line.strip()
            if not text:
                continue
            if not text.startswith("/"):
                self._ask(text)
            elif not self._command(text):
                return

    def _begin(self, system: str | None) -> None:
        self.messages = [] if system is None else [Message("system", system)]

    def _command(self, text: str) -> bool:
        """Run a slash command and return whether the conversation continues."""
        word, _, rest = text.partition(" ")
        match word:
            case "/quit" | "/exit":
                return False
            case "/peers":
                self._peers()
            case "/model":
                self._choose(rest.strip())
            case "/image":
                self._show(Path(rest.strip()).expanduser())
            case "/new":
                self._begin(self.system)
                console.line("New conversation.")
            case "/system":
                self.system = rest.strip() or None
                self._begin(self.system)
                console.line("New conversation.")
            case "/help":
                console.line(HELP)
            case _:
                console.line(f"There is no command {word}.\n{HELP}")
        return True

    def _choose(self, name: str) -> None:
        """Go on with another model, which reads the conversation so far; without a name, list the models."""
        models = self.client.models()
        if not name:
            for each in models:
                console.line(f"{'*' if each == self.client.model else ' '} {console.printable(each)}")
            return
        try:
            self.client.choose(name, models)
        except UsageError as wrong:
            console.line(wrong.message)
            return
        console.line(f"{console.printable(name)} answers from here on.")

    def _show(self, file: Path) -> None:
        try:
            data = base64.b64encode(file.read_bytes()).decode()
        except OSError as problem:
            console.line(f"{file}: the picture can't be read: {problem.strerror or problem}.")
            return
        # Which format it is shows in the bytes, so the type named here does not matter.
        self.pictures.append(QuestionPart("image_url", image_url=PictureUrl(f"data:image/png;base64,{data}")))
        console.line(f"{file.name} goes with the next question.")

    def _ask(self, text: str) -> None:
        content = (*self.pictures, QuestionPart("text", text)) if self.pictures else text
        self.pictures = []
        asked = [*self.messages, Message("user", content)]
        written: list[str] = []
        began_s, first_s, thinks = time.monotonic(), None, False
        try:
            for part in self._answer(asked):
                match part:
                    case AnswerPiece(text=piece) | ThinkingPiece(text=piece):
                        first_s = time.monotonic() if first_s is None else first_s
                        if isinstance(part, AnswerPiece):
                            written.append(piece)
                        thinks = _print(part, thinks=thinks)
                    case Note(text=note):
                        console.note(f"[{note}]")
                    case ChatAnswer() as answer:
                        click.echo()
                        self.route = answer.route or self.route
                        self._measure(answer, time.monotonic() - began_s, first_s, began_s)
        except KeyboardInterrupt:
            click.echo()
            console.note("[cancelled]")
        except ApiRefusal as refusal:
            hint = " /new starts a new conversation." if refusal.code == TOO_LONG and self.messages else ""
            console.note(f"[{refusal.message}{hint}]")
            return
        except TransportError as problem:
            if not sys.stdin.isatty():
                raise
            # The gateway may be back by the next question; ending here would lose the conversation.
            console.note(f"[{problem.message}]")
            return
        if written:
            self.messages = [*asked, Message("assistant", "".join(written))]

    def _answer(self, asked: list[Message]) -> Iterator[AnswerPart]:
        try:
            yield from self._parts(asked, self.max_tokens or ANSWER_TOKENS)
        except ApiRefusal as refusal:
            if self.max_tokens is not None or refusal.code != TOO_LONG:
                raise
            yield from self._parts(asked, None)

    def _parts(self, asked: list[Message], max_tokens: int | None) -> Iterator[AnswerPart]:
        return self.client.answer(asked, max_tokens=max_tokens, temperature=self.temperature, seed=self.seed)

    def _measure(self, answer: ChatAnswer, took_s: float, first_s: float | None, began_s: float) -> None:
        if not sys.stdout.isatty():
            return
        speed = answer.route.tokens_per_s if answer.route is not None else None
        facts = [f"{answer.completion_tokens} tokens in {format_seconds(took_s)}"]
        if first_s is not None:
            facts.append(f"first token after {format_seconds(first_s - began_s)}")
        if speed is not None:
            facts.append(f"{speed:.3g} tokens/s")
        if answer.finish == "length":
            facts.append("cut off there; raise --max-tokens" if self.max_tokens is None else "cut off at --max-tokens")
        console.note(f"[{', '.join(facts)}; /peers shows the route]")

    def _peers(self) -> None:
        if self.route is None:
            _show_status(self.client.status())
            return
        console.table(
            ("stage", "peer", "tokens", "queued", "compute", "transfer"),
            [
                (
                    str(hop.stage),
                    hop.peer,
                    str(hop.tokens),
                    format_seconds(hop.queued_s),
                    format_seconds(hop.compute_s),
                    format_seconds(hop.transfer_s),
                )
                for hop in self.route.hops
            ],
            title=f"Route of the last answer: {' > '.join(self.route.route)}; means per token",
            right=(0, 2, 3, 4, 5),
        )
        speed = self.route.tokens_per_s
        if speed is not None:
            console.line(f"{speed:.3g} tokens/s")
        for wait in self.route.waits:
            console.line(f"after {format_seconds(wait.at_s)}: {wait.state} {console.printable(wait.detail)}".rstrip())


def _show_status(status: ServerStatus) -> None:
    engine = status.engine
    console.table(
        ("stage", "peer", "blocks", "state", "spare", "memory", "compute"),
        [
            (
                str(stage.stage),
                stage.name,
                f"{stage.blocks[0]}-{stage.blocks[1] - 1}",
                stage.state,
                stage.spare,
                format_bytes(stage.resident_bytes),
                format_seconds(stage.mean_compute_s),
            )
            for stage in engine.stages
        ],
        title=f"{status.model}: {engine.state}, {engine.tokens_per_s:.3g} tokens/s over all sessions",
        right=(0, 5, 6),
    )


def _line(prompt: str) -> str | None:
    """Return a line of input, None at its end. Ctrl-C at the prompt counts as the end."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        if prompt:
            click.echo()
        return None


def _print(part: AnswerPiece | ThinkingPiece, *, thinks: bool) -> bool:
    """Print thinking dimmed on standard error, the answer on standard output, and an empty line between the two.
    `thinks`: the previous part was thinking. Returns whether this part is."""
    if isinstance(part, ThinkingPiece):
        click.echo(click.style(_shown(part.text), dim=True), nl=False, err=True)
        return True
    if thinks:
        click.echo("\n", err=True)
    click.echo(_shown(part.text), nl=False)
    sys.stdout.flush()
    return False


def _shown(text: str) -> str:
    """Return `text` without control characters, so that a model can't move the cursor or colour the terminal. Line
    breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _key(file: Path) -> str:
    """Return the first key of a file of `fusion serve --api-key-file`, with lines `name = key` or `key`."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{file}: the API key can't be read: {problem}.", hint=_KEY_FILE_HINT) from problem
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            return line.rpartition("=")[2].strip() if " = " in line else line.strip()
    raise UsageError(f"{file} contains no API key.", hint=_KEY_FILE_HINT)


@contextmanager
def _served(model: str, local: int | None, served: ServingOptions, home: Path) -> Iterator[str]:
    """Run `fusion serve` on a free port of this machine during the block and yield its URL. Its output goes to standard
    error. Raises `FusionError` if it ends before it is ready."""
    with tempfile.TemporaryDirectory(prefix="fusion-chat-") as folder:
        announced = Path(folder) / "serve.json"
        arguments = ["serve", model, "--port", "0", "--json", str(announced), "--home", str(home), "--lifeline"]
        arguments += ["--weights", served.weights, "--cache", served.cache, "--ends", served.ends]
        arguments += ["--privacy", served.privacy]
        arguments += ["--confidential"] if served.confidential else []
        if served.privacy == "split-k":
            arguments += ["--keep-first", str(served.first_layers), "--keep-last", str(served.last_layers)]
        arguments += ["--sessions", str(served.sessions)]
        arguments += [] if local is None else ["--local", str(local)]
        arguments += [] if served.context_tokens is None else ["--context", str(served.context_tokens)]
        process = subprocess.Popen(
            [*FUSION, *arguments],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            # Ctrl-C cancels an answer and must not reach the server, which is terminated after the conversation.
            start_new_session=sys.platform != "win32",
        )
        try:
            while not announced.is_file():
                if process.poll() is not None:
                    raise FusionError(f"{model} could not be served; the messages above say why.")
                time.sleep(READY_POLL_S)
            yield msgspec.json.decode(announced.read_bytes(), type=_Ready).url
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
