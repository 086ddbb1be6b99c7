"""Runs a privacy audit: a model (trained here, or given), texts with planted secrets, and attacks on all boundaries.

Defines what is private in the trial and what the attacker knows; the attacks are in `privacy`. The text is the source
of Python's standard library, which every machine has. Its files are divided into training data, the attacker's data and
the texts of the trial. `corpus` reads and tokenises, `execution.training.codecs` are the codecs of real links,
`cli.privacy` prints the findings."""

from __future__ import annotations

import datetime
import math
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.corpus.files import select_library
from fusionai.corpus.tables import LocalTokenizer
from fusionai.corpus.tokens import CorpusTokenizer, load_tokenizer, train_tokenizer
from fusionai.execution.training.codecs import pack, unpack
from fusionai.primitives.errors import ModelError, UsageError
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.primitives.tensors import host_tensor
from fusionai.privacy import audit
from fusionai.privacy import findings as metrics
from fusionai.privacy.attacks import FitBudget, InverterBudget, check_invertible
from fusionai.privacy.findings import AuditAttack, Findings, Subject, Trial, Truth
from fusionai.privacy.subject import (
    NOISES,
    AttackedModel,
    Change,
    Defence,
    Packed,
    SmallModel,
    as_rows,
    as_tokens,
    batches_of,
    chosen_device,
    defences,
    load_attacked,
    secret_prefix,
    train_small_model,
)
from fusionai.wire.codecs import Packing

CORPUS_BYTES: Final = 3_000_000
VOCABULARY: Final = 1024
TEMPLATE: Final = "system: You are a careful assistant. Say what this code does.\nuser: "
"""Beginning of every request, known to every peer."""
PACKINGS: Final[tuple[Packing, ...]] = ("int8", "int4")
SECRET_HEX: Final = 10
_ROW_TOKENS: Final = 64
_HEAD_TOKENS: Final = 4
_HELD_OUT_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Options of an audit. `model` None: train a small one. `depths` None: all that peers see at `level`. `level` None:
    all depths and defences. `first`, `last`: blocks that stay with the owner at `split-k`."""

    model: Path | None = None
    small: SmallModel = field(default_factory=SmallModel)
    level: PrivacyLevel | None = None
    first: int = 1
    last: int = 1
    depths: tuple[int, ...] | None = None
    attacks: frozenset[AuditAttack] = frozenset()
    texts: int = 10
    private_tokens: int = 32
    auxiliary_tokens: int = 32_768
    known_tokens: int = 8192
    secret_steps: int = 150
    inverter: InverterBudget = field(default_factory=InverterBudget)
    fit: FitBudget = field(default_factory=FitBudget)
    device: str = "auto"
    seed: int = 7
    command: str = "fusion audit"


def audited(options: AuditOptions, on_doing: Callable[[audit.Doing], None]) -> Findings:
    """Run the audit and return its findings. Raises `UsageError` for depths or texts that do not fit the model,
    `ModelError` for a model that an attack can't read."""
    begun_s = time.perf_counter()
    device = chosen_device(options.device)
    corpus = _corpus(options)
    attacked = _attacked(options, corpus, device, on_doing)
    depths = _depths(options, attacked.depth)
    if "gradients" in options.attacks:
        check_invertible(attacked)
    texts = _texts(options, corpus, device)
    longest = max(texts.trial.shape[1], _ROW_TOKENS)
    if longest > attacked.longest_tokens:
        raise UsageError(
            f"texts of {longest} tokens are longer than this model's context of {attacked.longest_tokens} tokens.",
            hint="Shorten the private part with --tokens.",
        )
    victims = _victims(options, attacked, corpus, device, on_doing)
    plan = audit.AuditPlan(
        depths=depths,
        attacks=options.attacks,
        updates=_updates(attacked, options),
        inverter=options.inverter,
        fit=options.fit,
        seed=options.seed,
    )
    found = audit.run(attacked, victims, texts, plan, on_doing)
    return Findings(
        date=datetime.date.today().isoformat(),
        command=options.command,
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
        },
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {device}",
        seconds=time.perf_counter() - begun_s,
        subject=_subject(options, attacked, corpus, texts),
        trial=Trial(
            texts=options.texts,
            template_tokens=texts.template_tokens,
            private_tokens=options.private_tokens,
            chance=metrics.chance(corpus.auxiliary, texts.truth),
        ),
        local_blocks=options.first,
        boundaries=found.boundaries,
        updates=found.updates,
        controls=found.controls,
    )


@dataclass(frozen=True, slots=True)
class _Corpus:
    """Token ids of the training files, of the attacker's files, and of the files for the trial."""

    tokenizer: CorpusTokenizer
    total_bytes: int
    training: list[int]
    auxiliary: list[int]
    held_out: list[int]


def _corpus(options: AuditOptions) -> _Corpus:
    files = select_library(CORPUS_BYTES)
    contents = [path.read_text(encoding="utf-8") for path in files]
    if options.model is None:
        tokenizer = train_tokenizer(iter(contents), VOCABULARY)
    else:
        tokenizer = load_tokenizer(LocalTokenizer(path=str(options.model)))
    # Eight of ten files are for training, one is the attacker's, one is for the trial; no file is in two parts.
    parts: list[list[int]] = [[], [], []]
    for number, ids in enumerate(tokenizer.encode_batch(contents)):
        parts[{8: 1, 9: 2}.get(number % 10, 0)].extend(ids)
    return _Corpus(tokenizer, sum(path.stat().st_size for path in files), *parts)


def _attacked(
    options: AuditOptions, corpus: _Corpus, device: str, on_doing: Callable[[audit.Doing], None]
) -> AttackedModel:
    if options.model is not None:
        return load_attacked(options.model, device)
    small = options.small
    stream = as_tokens(corpus.training, device)
    batches = batches_of(stream, small.rows, small.tokens, options.seed)

    def on_step(step: int, loss: float) -> None:
        on_doing(audit.Doing(f"training a small model (loss {loss:.2f})", step, small.steps))

    return train_small_model(small, corpus.tokenizer.vocabulary, batches, device, on_step)


def _depths(options: AuditOptions, layers: int) -> tuple[int, ...]:
    least, most = (options.first, layers - options.last) if options.level == "split-k" else (0, layers)
    if least > most:
        raise UsageError(
            f"the model has {layers} blocks: with the first {options.first} and the last {options.last} kept local, "
            "none is left for peers.",
            hint="Keep fewer blocks with --first and --last.",
        )
    asked = tuple(range(least, most + 1)) if options.depths is None else tuple(sorted(set(options.depths)))
    if odd := [depth for depth in asked if not least <= depth <= most]:
        raise UsageError(
            f"peers see nothing at depth {odd[0]}, only at depths {least} to {most}.",
            hint=f"Choose --depths from {least} to {most}.",
        )
    return asked


def _victims(
    options: AuditOptions,
    attacked: AttackedModel,
    corpus: _Corpus,
    device: str,
    on_doing: Callable[[audit.Doing], None],
) -> list[audit.Victim]:
    clean, *others = defences({codec: through(codec) for codec in PACKINGS}, NOISES, options.seed)
    victims = [audit.Victim(defence, attacked) for defence in (clean, *others)]
    if options.level not in (None, "split-k") or not 0 < options.first < attacked.depth:
        return victims
    small = options.small
    stream = as_tokens(corpus.training, device)
    for name, distance in (("secret prefix, tuned", 0.0), ("secret prefix, fresh", 1.0)):
        batches = batches_of(stream, small.rows, small.tokens, options.seed + 1)

        def on_step(step: int, name: str = name) -> None:
            on_doing(audit.Doing(f"training a {name}", step, options.secret_steps))

        secret = secret_prefix(
            attacked,
            batches,
            blocks=options.first,
            distance=distance,
            steps=options.secret_steps,
            learning_rate=small.learning_rate / 3,
            seed=options.seed,
            on_step=on_step,
        )
        victims.append(audit.Victim(Defence(name, clean.change), secret, options.first))
    return victims


def through(codec: Packing) -> Packed:
    """Return a function that packs and unpacks boundaries with `codec`, as links do."""

    def there_and_back(boundary: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        sent = pack("boundary", host_tensor("float32", boundary.shape, boundary.data), codec, following=True)
        return np.frombuffer(unpack(sent).data, np.float32).reshape(boundary.shape)

    def each(boundary: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.stack([there_and_back(np.ascontiguousarray(part)) for part in boundary])

    return each


def _updates(attacked: AttackedModel, options: AuditOptions) -> tuple[audit.UpdateCase, ...]:
    """Return the cases of gradients: several numbers of texts, below and above the width of the weight; then one number
    in other formats."""
    packed = {one.name: one.change for one in defences({codec: through(codec) for codec in PACKINGS}, ())}
    tokens = min(16, options.private_tokens - 1)
    fits = max(2, attacked.width // tokens - 1)
    some = max(1, min(4, fits // 2))
    sizes = dict.fromkeys((1, some, fits, 3 * attacked.width // (2 * tokens)))

    def alone(change: Change) -> Change:
        return lambda gradient: change(gradient[None])[0]

    return (
        *(audit.UpdateCase(texts, tokens, "fp32", alone(packed["clean"])) for texts in sizes),
        *(audit.UpdateCase(some, tokens, name, alone(packed[name])) for name in ("bf16", *PACKINGS)),
        audit.UpdateCase(
            some, tokens, f"adapter of rank {audit.LORA_RANK}", alone(audit.low_rank(audit.LORA_RANK, options.seed))
        ),
    )


def _texts(options: AuditOptions, corpus: _Corpus, device: str) -> audit.Texts:
    tokenizer, chance = corpus.tokenizer, random.Random(options.seed)
    template = tokenizer.encode(TEMPLATE)
    private: list[tuple[int, ...]] = []
    secrets: list[str] = []
    for _ in range(options.texts):
        secret = "sk-" + "".join(chance.choices("0123456789abcdef", k=SECRET_HEX))
        planted = tokenizer.encode(f'\nKEY = "{secret}"\n')
        start = chance.randrange(len(corpus.held_out) - options.private_tokens)
        around = corpus.held_out[start : start + options.private_tokens]
        text = (*around[:_HEAD_TOKENS], *planted, *around[_HEAD_TOKENS:])[: options.private_tokens]
        private.append(text)
        secrets.append(secret if secret in tokenizer.decode(text) else "")

    known = min(options.known_tokens, len(corpus.auxiliary) // 3)
    return audit.Texts(
        trial=as_tokens([[*template, *text] for text in private], device),
        template_tokens=len(template),
        truth=Truth(tuple(private), tuple(secrets), tokenizer.decode),
        auxiliary=as_rows(corpus.auxiliary[known:][: options.auxiliary_tokens], _ROW_TOKENS, device),
        known=as_rows(corpus.auxiliary[:known], _ROW_TOKENS, device),
        held_out=as_rows(corpus.held_out[:_HELD_OUT_TOKENS], _ROW_TOKENS, device),
    )


def _subject(options: AuditOptions, attacked: AttackedModel, corpus: _Corpus, texts: audit.Texts) -> Subject:
    loss = attacked.loss(texts.held_out)
    given = options.model
    return Subject(
        name="a small Llama-type model, trained in the run" if given is None else given.name,
        parameters=sum(parameter.numel() for parameter in attacked.model.parameters()),
        layers=attacked.depth,
        width=attacked.width,
        vocabulary=attacked.vocabulary,
        trained_tokens=options.small.trained_tokens if given is None else None,
        data=f"{corpus.total_bytes / 1e6:.1f} MB of the source text of Python {platform.python_version()}'s library",
        loss=loss,
        perplexity=math.exp(loss),
    )


def check_model(path: Path) -> None:
    """Check the model's directory before it is loaded, which takes minutes. Raises `ModelError`."""
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} is not a model directory: it has no config.json.",
            hint="Give a directory in Hugging Face layout, or leave --model out to train a small model.",
        )
