"""Checks the tables of a recipe against each other and builds the settings of the job from them.

`corpus.tables` has the schema of each table, `corpus.recipe` reads the file. A setting that would have no effect is an
error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from fusionai.corpus import tables as spec
from fusionai.corpus.schedule import TIMES, outer_step, usual_early_steps
from fusionai.corpus.strict import show
from fusionai.primitives.errors import RecipeError
from fusionai.primitives.privacy import keeps_ends
from fusionai.wire.messages import OptimizerSpec

DEFAULT_MASK_FRACTION = 0.15
"""The value of BERT (arXiv 1810.04805, section 3.1)."""
DEFAULT_RANK = 16
"""Default rank of a new adapter; its default alpha is twice the rank."""


class RecipeChecks:
    """Checks across keys; knows the file's name for messages."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def resolve(self, name: str) -> str:
        """Return an absolute path; `~` is the home directory, relative paths start at the recipe's directory."""
        return str(self._path.parent.absolute() / Path(name).expanduser())

    def fail(self, table: str, message: str, *, hint: str | None = None) -> RecipeError:
        return RecipeError(f"{self._path.name}: [{table}]: {message}", hint=hint)

    def exactly_one(self, table: str, given: msgspec.Struct, keys: str) -> str:
        """Return the one of `keys` (separated by spaces) that is set."""
        choices = keys.split()
        found = [key for key in choices if getattr(given, key) is not None]
        if len(found) != 1:
            raise self.fail(
                table, f"expected exactly one of {', '.join(choices)}, got {' and '.join(found) or 'none of them'}."
            )
        return found[0]

    def no_effect(self, table: str, given: object, keys: str, because: str) -> None:
        """Refuse each of `keys` (separated by spaces) that is set in `given`, a struct or a table as written."""
        for key in keys.split():
            value = given.get(key) if isinstance(given, Mapping) else getattr(given, key)
            if value is not None:
                raise self.fail(table, f"{key} = {show(value)} has no effect {because}.", hint="Remove it.")

    def model(self, table: spec.ModelTable) -> spec.Model:
        match self.exactly_one("model", table, "config path hub factory"):
            case "config":
                source = spec.ConfigModel(config=self._config(table.config or {}))
            case "path":
                source = spec.LocalModel(path=self.resolve(str(table.path)))
            case "hub":
                source = spec.HubModel(hub=str(table.hub))
            case _:
                module, function = str(table.factory).split(":")
                source = spec.FactoryModel(
                    module=module, function=function, directory=str(self._path.parent.absolute())
                )
        if table.task == "module_loss" and not isinstance(source, spec.FactoryModel):
            raise self.fail("model", 'task = "module_loss" needs a factory whose module returns its loss.')
        return spec.Model(task=table.task, source=source)

    def _config(self, config: dict[str, Any] | str) -> dict[str, Any]:
        if isinstance(config, str):
            file = self.resolve(config)
            try:
                read = msgspec.json.decode(Path(file).read_bytes())
            except OSError as problem:
                raise self.fail("model", f"config {config}: can't be read ({problem.strerror}).") from None
            except msgspec.DecodeError as problem:
                raise self.fail("model", f"config {config}: not valid JSON ({problem}).") from None
            if not isinstance(read, dict):
                raise self.fail("model", f"config {config}: expected a JSON object, got {type(read).__name__}.")
            config = read
        if not isinstance(config.get("model_type"), str):
            raise self.fail("model", 'config lacks model_type, for example model_type = "llama".')
        return config

    def data(self, tables: spec.RecipeTables) -> spec.Data:
        table, task = tables.data, tables.model.task
        language = task in ("causal_lm", "masked_lm")
        source = self._data_source(table, language)
        tensors = source.format == "tensors"
        chat = source.format in ("chat", "instructions")
        if not chat:
            because = f"with format = {source.format!r}; it belongs to 'chat' and 'instructions'"
            self.no_effect("data", table, "template loss_on packing too_long bad_rows", because)
        elif task != "causal_lm":
            raise self.fail("data", f"format = {source.format!r} is for task 'causal_lm', got task {task!r}.")
        if tensors and language:
            raise self.fail("data", f"task {task!r} reads text, got format = 'tensors'.")
        if not tensors and not language and task != "module_loss":
            raise self.fail(
                "data", f"task {task!r} reads arrays: expected format = 'tensors' with columns, got {table.format!r}."
            )
        common: dict[str, Any] = {
            "source": source, "evaluation_fraction": table.evaluation_fraction, "shuffle": table.shuffle,
        }  # fmt: skip
        if tensors:
            because = "with format = 'tensors'"
            self.no_effect("data", table, "field sequence_length mask_fraction tokenizer", because)
            if not table.columns:
                raise self.fail(
                    "data",
                    "format = 'tensors' needs columns, a table of model input = column.",
                    hint='For example columns = { x = "image", labels = "digit" }.',
                )
            return spec.TensorData(columns=table.columns, **common)
        self.no_effect("data", table, "columns", "with text; it belongs to format = 'tensors'")
        if task != "masked_lm":
            self.no_effect("data", table, "mask_fraction", f"with task {task!r}")
        if table.sequence_length is None:
            raise self.fail("data", "lacks the key 'sequence_length' (tokens per row).")
        if chat:
            self.no_effect("data", table, "field", f"with format = {source.format!r}")
        common |= {
            "sequence_length": table.sequence_length,
            "tokenizer": self._tokenizer(table.tokenizer, tables.model),
        }
        if chat:
            return spec.ChatData(
                layout="chat" if source.format == "chat" else "instructions",
                template=None if table.template is None else self.resolve(table.template),
                loss_on=table.loss_on or "answers",
                packing=bool(table.packing),
                too_long=table.too_long or "truncate",
                bad_rows=table.bad_rows or 0,
                **common,
            )
        masked = (table.mask_fraction or DEFAULT_MASK_FRACTION) if task == "masked_lm" else None
        return spec.TextData(field=table.field or "text", mask_fraction=masked, **common)

    def _data_source(self, table: spec.DataTable, language: bool) -> spec.FileData | spec.HubData:
        if self.exactly_one("data", table, "files dataset") == "files":
            self.no_effect("data", table, "subset split", "with files; it belongs to dataset")
            files = tuple(self.resolve(name) for name in table.files or ())
            return spec.FileData(files=files, format=table.format)
        match table.format:
            case "auto":
                form = "text" if language or not table.columns else "tensors"
            case "text" | "tensors" | "chat" | "instructions":
                form = table.format
            case "jsonl" | "parquet":
                raise self.fail(
                    "data",
                    f"dataset with format {table.format!r}: expected 'auto', 'text', 'tensors', 'chat' or "
                    "'instructions'.",
                )
        return spec.HubData(dataset=str(table.dataset), subset=table.subset, split=table.split or "train", format=form)

    def _tokenizer(
        self, table: spec.TokenizerTable | None, model: spec.ModelTable
    ) -> spec.TrainTokenizer | spec.LocalTokenizer | spec.HubTokenizer:
        if table is None:
            # A pretrained model's weights are useless with any other tokenizer, so its own is the default.
            if model.path is not None:
                return spec.LocalTokenizer(path=self.resolve(model.path))
            if model.hub is not None:
                return spec.HubTokenizer(hub=model.hub)
            raise self.fail(
                "data",
                "lacks the key 'tokenizer'.",
                hint="Write tokenizer = { train = 8192 }, { path = DIRECTORY } or { hub = ID }.",
            )
        match self.exactly_one("data.tokenizer", table, "train path hub"):
            case "train":
                return spec.TrainTokenizer(vocabulary=table.train or 0)
            case "path":
                return spec.LocalTokenizer(path=self.resolve(str(table.path)))
            case _:
                return spec.HubTokenizer(hub=str(table.hub))

    def train(self, tables: spec.RecipeTables, raw: Mapping[str, object]) -> None:
        train = tables.train
        if train.batch_size % train.microbatches:
            raise self.fail(
                "train",
                f"batch_size {train.batch_size} can't be divided into {train.microbatches} equal microbatches.",
            )
        if train.warmup_steps > tables.job.steps:
            raise self.fail("train", f"warmup_steps {train.warmup_steps} is above the job's {tables.job.steps} steps.")
        if train.offload_weights == "always" and train.recompute == "never":
            raise self.fail(
                "train",
                "offload_weights = 'always' needs recomputed activations, but recompute = 'never'.",
                hint="Set recompute to 'auto' or 'always': kept activations would keep the weights in memory.",
            )
        if train.schedule == "constant" and train.minimum_ratio:
            self.no_effect("train", train, "minimum_ratio", "with schedule = 'constant'")
        section = raw.get("train")
        written = section.get("optimizer", {}) if isinstance(section, Mapping) else {}
        self._optimizer(train.optimizer, written if isinstance(written, Mapping) else {})

    def _optimizer(self, optimizer: OptimizerSpec, written: Mapping[str, object]) -> None:
        table = "train.optimizer"
        foreign = {"adamw": "momentum nesterov", "sgd": "betas eps state_bits"}[optimizer.kind]
        self.no_effect(table, written, foreign, f"with kind = {optimizer.kind!r}")
        self.no_effect(table, written, "anchored overlapped", "in a recipe")
        for beta in optimizer.betas:
            if not 0 <= beta < 1:
                raise self.fail(table, f"betas: expected two numbers in [0, 1), got {list(optimizer.betas)}.")
        if optimizer.eps <= 0:
            raise self.fail(table, f"eps: expected a number above 0, got {optimizer.eps:g}.")
        if optimizer.weight_decay < 0:
            raise self.fail(table, f"weight_decay: expected a number of at least 0, got {optimizer.weight_decay:g}.")
        if not 0 <= optimizer.momentum < 1:  # from 1 on, old gradients never fade
            raise self.fail(table, f"momentum: expected a number in [0, 1), got {optimizer.momentum:g}.")
        if optimizer.nesterov and optimizer.momentum == 0:
            raise self.fail(table, "nesterov = true needs a momentum above 0.")

    def adapter(self, tables: spec.RecipeTables) -> spec.Adapter | None:
        table = tables.adapter
        if table is None:
            return None
        if table.holder == "owner":
            level = self.privacy(tables).level
            if not keeps_ends(level):
                raise self.fail(
                    "adapter",
                    f"holder = 'owner' needs a level that keeps embedding and head with the owner, got {level!r}.",
                    hint='Write level = "split" in [privacy], or leave holder out.',
                )
            if tables.train.compression != "none":
                raise self.fail(
                    "adapter",
                    f"holder = 'owner' sends the adapter itself, which compression = {tables.train.compression!r} "
                    "would change.",
                    hint="Leave compression out.",
                )
        if table.start is not None:
            self.no_effect("adapter", table, "rank alpha targets rslora", "with start: the adapter there has its own")
            return spec.KnownAdapter(
                path=self.resolve(table.start), dropout=table.dropout, base=table.base, holder=table.holder
            )
        rank = DEFAULT_RANK if table.rank is None else table.rank
        return spec.NewAdapter(
            rank=rank,
            alpha=float(2 * rank) if table.alpha is None else table.alpha,
            dropout=table.dropout,
            targets=None if table.targets in (None, "all-linear") else tuple(table.targets),
            rslora=bool(table.rslora),
            base=table.base,
            holder=table.holder,
        )

    def evaluation(self, tables: spec.RecipeTables) -> spec.EvaluationTable | None:
        if tables.data.evaluation_fraction == 0:
            if tables.evaluation is not None:
                raise self.fail(
                    "evaluation",
                    "there is no data for evaluation.",
                    hint="Set evaluation_fraction in [data] above 0, or remove [evaluation].",
                )
            return None
        evaluation = tables.evaluation or spec.EvaluationTable()
        chooses = evaluation.patience is not None or evaluation.keep_best
        if evaluation.patience is None and evaluation.minimum_improvement:
            self.no_effect("evaluation", evaluation, "minimum_improvement", "without patience")
        if chooses and not evaluation.every:
            raise self.fail(
                "evaluation",
                "patience and keep_best need evaluations during the job, but every = 0 evaluates only at its end.",
                hint="Set every to the number of steps between evaluations.",
            )
        if chooses and tables.replicas is not None and tables.replicas.gradients == "local":
            raise self.fail(
                "evaluation",
                "patience and keep_best can't be combined with local updates in [replicas]: each replica evaluates a "
                "model of its own.",
                hint='Remove both, or set gradients = "summed" in [replicas].',
            )
        return evaluation

    def summed(self, tables: spec.RecipeTables) -> int | Literal["auto"]:
        table = tables.replicas
        if table is None or table.gradients == "local":
            return 1
        local = "every codec learning_rate momentum deadline_s overlap early_steps"
        self.no_effect("replicas", table, local, 'with gradients = "summed"; it belongs to "local"')
        if table.count != "auto" and tables.train.microbatches < table.count:
            raise self.fail(
                "replicas",
                f"{table.count} replicas need a microbatch each in every step, but [train] has microbatches = "
                f"{tables.train.microbatches}.",
                hint="Raise microbatches, or take fewer replicas.",
            )
        return table.count

    def replicas(self, tables: spec.RecipeTables) -> spec.Replicas | None:
        table = tables.replicas
        if table is None or table.gradients == "summed":
            return None
        written = {
            name: value for name in spec.Replicas.__struct_fields__ if (value := getattr(table, name)) is not None
        }
        every = spec.EVERY if table.every is None else table.every
        usual = outer_step(max(1, tables.job.steps // every))
        if tables.model.path is None and tables.model.hub is None:
            written.setdefault("early_steps", usual_early_steps(every, tables.job.steps, table.overlap or 0))
        replicas = spec.Replicas(**usual._asdict() | written)
        if tables.faults.checks == "spot":
            raise self.fail(
                "faults",
                'checks = "spot" has no effect with [replicas]: steps that end in an exchange can\'t be spot-checked.',
                hint='Remove it, or write checks = "none".',
            )
        if tables.job.steps % replicas.every:
            raise self.fail(
                "replicas",
                f"the job's {tables.job.steps} steps can't be divided into rounds of every = {replicas.every}.",
                hint=f"The last round must be whole, as with {_next_multiple(tables.job.steps, replicas.every)} steps.",
            )
        if replicas.overlap >= replicas.every:
            raise self.fail(
                "replicas",
                f"overlap = {replicas.overlap}: expected fewer steps than there are between two exchanges "
                f"(every = {replicas.every}).",
            )
        self._early(replicas)
        if tables.placement.required:
            raise self.fail(
                "placement",
                f"required = {show(list(tables.placement.required))} has no effect with [replicas]: machines are "
                "divided among them.",
                hint="Remove it.",
            )
        return replicas

    def _early(self, replicas: spec.Replicas) -> None:
        if replicas.early_steps == 0:
            return
        short, rest = divmod(replicas.every, TIMES)
        if rest:
            problem = f"every = {replicas.every} can't be divided into {TIMES} early rounds."
            hint = f"Set every = {_next_multiple(replicas.every, TIMES)}, or early_steps = 0."
        elif replicas.overlap >= short:
            problem = f"overlap = {replicas.overlap}: expected fewer steps than an early round has ({short})."
            hint = "Lower overlap, or set early_steps = 0."
        elif replicas.early_steps % short:
            problem = f"early_steps = {replicas.early_steps} can't be divided into rounds of {short}."
            hint = f"Set it to {_next_multiple(replicas.early_steps, short)}."
        else:
            return
        raise self.fail("replicas", problem, hint=hint)

    def privacy(self, tables: spec.RecipeTables) -> spec.Privacy:
        table, loss = tables.privacy, tables.placement.loss
        level = table.level or ("encrypted" if loss == "pool" else "split")
        if table.confidential and level != "trusted":
            raise self.fail(
                "privacy",
                f"confidential = true runs on trusted peers alone, but level is {level!r}: peers could "
                "reconstruct the text.",
                hint="Set level = 'trusted', or leave confidential out.",
            )
        if keeps_ends(level) and loss == "pool":
            raise self.fail(
                "privacy",
                f"level = {level!r} keeps the loss with the job owner, but [placement] has loss = 'pool'.",
                hint="Remove loss = 'pool', or set level = 'encrypted'.",
            )
        if level != "split-k":
            self.no_effect("privacy", table, "first last", f"with level = {level!r}; it belongs to 'split-k'")
        elif not (table.first or table.last):
            raise self.fail(
                "privacy", "level = 'split-k' needs first or last, the number of layers that stay at each end."
            )
        return spec.Privacy(level=level, first=table.first or 0, last=table.last or 0, confidential=table.confidential)

    def placement(self, placement: spec.PlacementTable) -> spec.PlacementTable:
        both = sorted(set(placement.required) & set(placement.excluded))
        if both:
            raise self.fail("placement", f"peer {both[0]!r} is both required and excluded.")
        return placement


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
