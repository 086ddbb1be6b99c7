"""The tables of a recipe as frozen structs: names, types, bounds, defaults. Reads no file, checks nothing across keys.

`*Table` structs are what a file may say; where exactly one of several keys must stand there, the public struct holds
a tagged union instead (`Model.source`, `Data.source`, `Data.tokenizer`), so that no reader meets a half-filled table.
Neighbours: `strict` fills these, `recipe` checks them against each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.primitives.privacy import PrivacyLevel
from fusionai.wire.codecs import Compression, Exchanged
from fusionai.wire.messages import OptimizerSpec

Task = Literal["causal_lm", "masked_lm", "seq2seq_lm", "classification", "regression", "module_loss"]
Format = Literal["auto", "text", "jsonl", "parquet", "tensors", "chat", "instructions"]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
NotNegative = Annotated[int, Meta(ge=0, le=2**40)]
Seed = Annotated[int, Meta(ge=0, lt=2**62)]
Filled = Annotated[str, Meta(min_length=1, max_length=4096)]
JobName = Annotated[
    str,
    Meta(max_length=64, pattern=r"^[a-z0-9][a-z0-9-]*$", description="lower-case letters, digits and hyphens"),
]
FactoryName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="a name such as 'my_models:build'")
]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
MOST_REPLICAS: Final = 64


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: immutable and strict."""


# ------------------------------------------------------------------------------------------------------ sources


class ConfigModel(_Table, frozen=True, kw_only=True, tag="config"):
    """A Hugging Face config: weights are initialised from the seed."""

    config: dict[str, Any]


class LocalModel(_Table, frozen=True, kw_only=True, tag="path"):
    """A local directory in Hugging Face layout."""

    path: str


class HubModel(_Table, frozen=True, kw_only=True, tag="hub"):
    """A hub id; its weights are downloaded by the job owner."""

    hub: str


class FactoryModel(_Table, frozen=True, kw_only=True, tag="factory"):
    """The job owner's own code: `function` of `module` returns an `nn.Module`. `directory` (the recipe's) is where
    the module is looked for first. It runs in the job owner's process only."""

    module: str
    function: str
    directory: str


class FileData(_Table, frozen=True, kw_only=True, tag="files"):
    """Files: absolute paths or glob patterns."""

    files: tuple[str, ...]
    format: Format


class HubData(_Table, frozen=True, kw_only=True, tag="dataset"):
    """A Hugging Face data set id (needs the `datasets` package)."""

    dataset: str
    subset: str | None
    split: str
    format: Literal["text", "tensors", "chat", "instructions"]


class TrainTokenizer(_Table, frozen=True, kw_only=True, tag="train"):
    """Train a byte-level BPE of at most this many entries on the training split."""

    vocabulary: int


class LocalTokenizer(_Table, frozen=True, kw_only=True, tag="path"):
    """A directory that holds `tokenizer.json`."""

    path: str


class HubTokenizer(_Table, frozen=True, kw_only=True, tag="hub"):
    """The tokenizer of a hub id."""

    hub: str


# ------------------------------------------------------------------------------------------------------- tables


class Job(_Table, frozen=True, kw_only=True):
    """`steps` optimizer updates; a checkpoint every `checkpoint_every` of them (0: only at the end). `directory`
    holds everything the job writes."""

    name: JobName
    steps: Positive
    seed: Seed = 0
    checkpoint_every: NotNegative = 0
    directory: Filled | None = None
    keep_checkpoints: Positive = 2


class ModelTable(_Table, frozen=True, kw_only=True):
    """Exactly one of `config`, `path`, `hub`, `factory`."""

    task: Task = "causal_lm"
    config: dict[str, Any] | Filled | None = None
    path: Filled | None = None
    hub: Filled | None = None
    factory: FactoryName | None = None


class TokenizerTable(_Table, frozen=True, kw_only=True):
    """Exactly one of `train`, `path`, `hub`."""

    train: Annotated[int, Meta(ge=258, le=2**24)] | None = None
    path: Filled | None = None
    hub: Filled | None = None


class DataTable(_Table, frozen=True, kw_only=True):
    """Exactly one of `files`, `dataset`."""

    files: Annotated[list[Filled], Meta(min_length=1)] | None = None
    dataset: Filled | None = None
    subset: Filled | None = None
    split: Filled | None = None
    format: Format = "auto"
    field: Filled | None = None
    columns: dict[Filled, Filled] | None = None
    sequence_length: Annotated[int, Meta(ge=2, le=2**24)] | None = None
    evaluation_fraction: Fraction = 0.0
    mask_fraction: Annotated[float, Meta(gt=0, lt=1)] | None = None
    tokenizer: TokenizerTable | None = None
    shuffle: bool = True
    template: Filled | None = None
    loss_on: Literal["answers", "all"] | None = None
    packing: bool | None = None
    too_long: Literal["truncate", "drop"] | None = None
    bad_rows: NotNegative | Fraction | None = None


class Model(_Table, frozen=True, kw_only=True):
    """What is trained. `task` says what its loss is."""

    task: Task
    source: ConfigModel | LocalModel | HubModel | FactoryModel


class TextData(_Table, frozen=True, kw_only=True, tag="text"):
    """Documents, tokenised and packed into rows of `sequence_length` tokens. `mask_fraction`: share of positions
    a masked language model has to guess, None for a causal one."""

    source: FileData | HubData
    field: str
    sequence_length: int
    tokenizer: TrainTokenizer | LocalTokenizer | HubTokenizer
    mask_fraction: float | None
    evaluation_fraction: float
    shuffle: bool


class TensorData(_Table, frozen=True, kw_only=True, tag="tensors"):
    """Records whose columns are arrays. `columns`: model input -> column."""

    source: FileData | HubData
    columns: dict[str, str]
    evaluation_fraction: float
    shuffle: bool


class ChatData(_Table, frozen=True, kw_only=True, tag="chat"):
    """Conversations, one or several to a row of `sequence_length` tokens. `layout`: OpenAI's or Alpaca's. `template`: a
    file that holds the chat template, None for the tokenizer's own. `bad_rows`: so many may be left out; below 1, so
    large a part of all."""

    source: FileData | HubData
    layout: Literal["chat", "instructions"]
    sequence_length: int
    tokenizer: TrainTokenizer | LocalTokenizer | HubTokenizer
    template: str | None
    loss_on: Literal["answers", "all"]
    packing: bool
    too_long: Literal["truncate", "drop"]
    bad_rows: int | float
    evaluation_fraction: float
    shuffle: bool


Data = TextData | TensorData | ChatData


class Train(_Table, frozen=True, kw_only=True):
    """One step takes `batch_size` sequences in `microbatches` equal parts. `clip_norm` None: no clipping. `schedule`
    is as `transformers.get_scheduler` has it, down to `minimum_ratio` of `learning_rate`. `compression`: how
    activations and gradients between stages are packed. `recompute`: whether activations are made again in
    backward; `offload`: whether optimizer state lies in files; `offload_weights`: whether weights do."""

    batch_size: Positive
    learning_rate: PositiveFloat
    microbatches: Annotated[int, Meta(ge=1, le=65_536)] = 1
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NotNegative = 0
    minimum_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    clip_norm: PositiveFloat | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    compression: Compression = "none"
    recompute: Literal["auto", "never", "always"] = "auto"
    offload: Literal["auto", "never", "always"] = "auto"
    offload_weights: Literal["auto", "never", "always"] = "auto"

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.batch_size // self.microbatches


BaseForm = Literal["fp32", "bf16", "int8", "int4"]


Holder = Literal["peers", "owner"]


class AdapterTable(_Table, frozen=True, kw_only=True):
    """Train a low-rank adapter and nothing else (LoRA, arXiv 2106.09685): `B(A(x))` times `alpha` / `rank` is added to
    what each layer of `targets` gives. `start`: an adapter's directory in PEFT layout that is trained on; then its own
    settings hold. `base`: how the weights that are not trained are kept; computed with in float32 all the same.
    `holder`: who has the adapter and the optimizer's state for it, the peers each for its layers or the job owner."""

    kind: Literal["lora"] = "lora"
    base: BaseForm = "fp32"
    holder: Holder = "peers"
    rank: Annotated[int, Meta(ge=1, le=4096)] | None = None
    alpha: PositiveFloat | None = None
    dropout: Fraction = 0.0
    targets: Annotated[list[Filled], Meta(min_length=1)] | Literal["all-linear"] | None = None
    rslora: bool | None = None
    start: Filled | None = None


class NewAdapter(_Table, frozen=True, kw_only=True, tag="new"):
    """An adapter that begins as nothing. `targets` None: every linear layer but the head. `rslora`: the scale is
    `alpha` over the root of `rank`."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...] | None
    rslora: bool
    base: BaseForm = "fp32"
    holder: Holder = "peers"


class KnownAdapter(_Table, frozen=True, kw_only=True, tag="start"):
    """An adapter in a directory in PEFT layout, trained on."""

    path: str
    dropout: float
    base: BaseForm = "fp32"
    holder: Holder = "peers"


Adapter = NewAdapter | KnownAdapter


class Evaluation(_Table, frozen=True, kw_only=True):
    """`batches` microbatches of the evaluation part every `every` steps (0: only at the end). `patience`: the job ends
    after so many evaluations without an improvement of at least `minimum_improvement`. `keep_best`: the checkpoint of
    the lowest loss is made and stays; without a word, where there is a patience."""

    every: NotNegative = 0
    batches: Positive = 8
    patience: Positive | None = None
    minimum_improvement: Annotated[float, Meta(ge=0)] = 0.0
    keep_best: bool | None = None

    @property
    def keeps_best(self) -> bool:
        return self.patience is not None if self.keep_best is None else self.keep_best


class Placement(_Table, frozen=True, kw_only=True):
    """What the planner must keep to. Peers by id or by name."""

    stages: Annotated[int, Meta(ge=1, le=1024)] | None = None
    loss: Literal["owner", "pool"] = "owner"
    required: tuple[Filled, ...] = ()
    excluded: tuple[Filled, ...] = ()


class Faults(_Table, frozen=True, kw_only=True):
    """Who may go on in a lost peer's place: `any`, one that computes the same bits, and after `grace_s` seconds without
    one anybody, or those that remain with the model cut anew; `exact`, only the same bits, and the job waits for them;
    `tolerant`, anybody at once; `refuse`, as `exact`, but the job ends in order if there are only others. Where results
    may differ from then on, it is said and recorded.

    `checks`: whether part of the machines' work is run again by others that stand by (`spot`), or none; None: `spot`
    where that can be, which is everywhere but in jobs that exchange with others."""

    takeover: Literal["any", "exact", "tolerant", "refuse"] = "any"
    grace_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    checks: Literal["none", "spot"] | None = None

    @property
    def numerics(self) -> Literal["exact", "any", "tolerant"]:
        """Whether other bits are tolerated: `any` tolerates them after a fault alone."""
        return "exact" if self.takeover == "refuse" else self.takeover


EVERY: Final = 50
"""Steps between exchanges, unless told."""
Count = Annotated[int, Meta(ge=2, le=MOST_REPLICAS)] | Literal["auto"]


class ReplicasTable(_Table, frozen=True, kw_only=True):
    """Several pipelines train one model. With `gradients = "local"` as `Replicas` says; with `"summed"` a step's
    microbatches are dealt to them and all gradients summed at its end: one pipeline's training, bit for bit but for the
    order in which the sums are made. The other keys are of local updates alone."""

    count: Count
    gradients: Literal["local", "summed"] = "local"
    every: Positive | None = None
    codec: Exchanged | None = None
    learning_rate: PositiveFloat | None = None
    momentum: Annotated[float, Meta(ge=0, lt=1)] | None = None
    deadline_s: PositiveFloat | None = None
    overlap: NotNegative | None = None
    early_steps: NotNegative | None = None


class Replicas(_Table, frozen=True, kw_only=True):
    """Several pipelines train one model, each on `train.batch_size` sequences of its own at a time, and agree every
    `every` steps (DiLoCo, arXiv 2311.08105). `codec`: how differences and agreements are packed; `learning_rate` and
    `momentum` are the outer step's, where nothing is told those of `outer_step`. Nobody waits longer than `deadline_s`
    for the others. `overlap`: steps that go on while what was found out travels (arXiv 2501.18512). `early_steps`: so
    many after the warm-up have five exchanges where there is usually one."""

    count: Count
    every: Positive = EVERY
    codec: Exchanged = "int4"
    learning_rate: PositiveFloat
    momentum: Annotated[float, Meta(ge=0, lt=1)]
    deadline_s: PositiveFloat = 60.0
    overlap: NotNegative = 0
    early_steps: NotNegative = 0

    @property
    def most(self) -> int:
        """So many there may be at once."""
        return MOST_REPLICAS if self.count == "auto" else self.count


class PrivacyTable(_Table, frozen=True, kw_only=True):
    """What stays with the job owner: without a word `split`, unless the loss is placed with the pool. `first`, `last`:
    layers at each end that do, with `split-k` alone."""

    level: PrivacyLevel | None = None
    first: NotNegative | None = None
    last: NotNegative | None = None
    confidential: bool = False


class Privacy(_Table, frozen=True, kw_only=True):
    """The level of a job (see `primitives.privacy`); so many layers at each end stay with the job owner besides what
    the level keeps there."""

    level: PrivacyLevel = "split"
    first: int = 0
    last: int = 0
    confidential: bool = False


class Output(_Table, frozen=True, kw_only=True):
    """What is written besides checkpoints and telemetry."""

    tensorboard: bool = True
    report: bool = True


class RecipeTables(_Table, frozen=True, kw_only=True):
    """A recipe file as it may be written."""

    job: Job
    model: ModelTable
    data: DataTable
    train: Train
    adapter: AdapterTable | None = None
    evaluation: Evaluation | None = None
    placement: Placement = Placement()
    faults: Faults = Faults()
    replicas: ReplicasTable | None = None
    privacy: PrivacyTable = PrivacyTable()
    output: Output = Output()
