"""The tables of a recipe as frozen structs: names, types, bounds, defaults.

`*Table` structs are what a file may contain. If exactly one of several keys must be set, the public struct has a tagged
union instead (`Model.source`, `Data.source`, `Data.tokenizer`), so that no code meets a half-filled table."""

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
"""Upper limit of replicas in a job (chosen)."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables: immutable; unknown fields are refused."""


# ------------------------------------------------------------------------------------------------------ sources


class ConfigModel(_Table, frozen=True, kw_only=True, tag="config"):
    """A Hugging Face config; weights are initialised from the seed."""

    config: dict[str, Any]


class LocalModel(_Table, frozen=True, kw_only=True, tag="path"):
    """A local directory in Hugging Face layout."""

    path: str


class HubModel(_Table, frozen=True, kw_only=True, tag="hub"):
    """A hub id; the job owner downloads the weights."""

    hub: str


class FactoryModel(_Table, frozen=True, kw_only=True, tag="factory"):
    """The job owner's own code: `function` of `module` returns an `nn.Module`. The module is searched for first in
    `directory` (the recipe's). The code runs in the job owner's process only."""

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
    """Train a byte-level BPE with at most `vocabulary` entries on the training part."""

    vocabulary: int


class LocalTokenizer(_Table, frozen=True, kw_only=True, tag="path"):
    """A directory with `tokenizer.json`."""

    path: str


class HubTokenizer(_Table, frozen=True, kw_only=True, tag="hub"):
    """The tokenizer of a hub id."""

    hub: str


# ------------------------------------------------------------------------------------------------------- tables


class JobTable(_Table, frozen=True, kw_only=True):
    """`steps`: optimizer updates; `checkpoint_every`: updates between checkpoints (0: one at the end). `directory`: of
    all output."""

    name: JobName
    steps: Positive
    seed: Seed = 0
    checkpoint_every: NotNegative = 0
    directory: Filled | None = None
    keep_checkpoints: Positive = 2


class ModelTable(_Table, frozen=True, kw_only=True):
    """Exactly one of `config`, `path`, `hub`, `factory` must be set."""

    task: Task = "causal_lm"
    config: dict[str, Any] | Filled | None = None
    path: Filled | None = None
    hub: Filled | None = None
    factory: FactoryName | None = None


class TokenizerTable(_Table, frozen=True, kw_only=True):
    """Exactly one of `train`, `path`, `hub` must be set."""

    train: Annotated[int, Meta(ge=258, le=2**24)] | None = None
    path: Filled | None = None
    hub: Filled | None = None


class DataTable(_Table, frozen=True, kw_only=True):
    """Exactly one of `files`, `dataset` must be set."""

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
    """The model that is trained. `task` determines its loss."""

    task: Task
    source: ConfigModel | LocalModel | HubModel | FactoryModel


class TextData(_Table, frozen=True, kw_only=True, tag="text"):
    """Documents, tokenised and packed into rows of `sequence_length` tokens. `mask_fraction`: fraction of positions
    that a masked language model has to predict; None for a causal model."""

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
    """Conversations, one or several in a row of `sequence_length` tokens. `layout`: OpenAI's or Alpaca's. `template`:
    file with the chat template; None: the tokenizer's own. `bad_rows`: number, below 1 fraction, of rows that may be
    left out."""

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
    """One step processes `batch_size` sequences in `microbatches` equal parts. `clip_norm` None: no clipping.
    `schedule`: as in `transformers.get_scheduler`, down to `minimum_ratio` of `learning_rate`. `compression`: of
    activations and gradients between stages. `recompute`: whether activations are recomputed in backward; `offload`,
    `offload_weights`: whether the optimizer's state or the weights are kept in files."""

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
    """Train only a low-rank adapter (LoRA, arXiv 2106.09685): `B(A(x))` times `alpha` / `rank` is added to the output
    of each layer in `targets`. `start`: directory of an adapter in PEFT layout that is trained further with its own
    settings. `base`: storage format of the frozen weights; computation is in float32 with each. `holder`: who has the
    adapter and its optimizer state: each peer for its layers, or the job owner."""

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
    """A new adapter, which at first changes nothing. `targets` None: every linear layer but the head. `rslora`: the
    scale is `alpha` over the square root of `rank`."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...] | None
    rslora: bool
    base: BaseForm = "fp32"
    holder: Holder = "peers"


class KnownAdapter(_Table, frozen=True, kw_only=True, tag="start"):
    """An existing adapter in PEFT layout, trained further."""

    path: str
    dropout: float
    base: BaseForm = "fp32"
    holder: Holder = "peers"


Adapter = NewAdapter | KnownAdapter


class EvaluationTable(_Table, frozen=True, kw_only=True):
    """Evaluates `batches` microbatches of the evaluation part every `every` steps (0: only at the end). `patience`:
    number of evaluations without an improvement of at least `minimum_improvement` after which the job ends.
    `keep_best`: make and keep a checkpoint of the lowest loss; by default if `patience` is set."""

    every: NotNegative = 0
    batches: Positive = 8
    patience: Positive | None = None
    minimum_improvement: Annotated[float, Meta(ge=0)] = 0.0
    keep_best: bool | None = None

    @property
    def keeps_best(self) -> bool:
        return self.patience is not None if self.keep_best is None else self.keep_best


class PlacementTable(_Table, frozen=True, kw_only=True):
    """Constraints for the planner. Peers are named by id or by name."""

    stages: Annotated[int, Meta(ge=1, le=1024)] | None = None
    loss: Literal["owner", "pool"] = "owner"
    required: tuple[Filled, ...] = ()
    excluded: tuple[Filled, ...] = ()


class FaultsTable(_Table, frozen=True, kw_only=True):
    """`takeover`: who may replace a lost peer. `exact`: only a peer that computes the same bits, and the job waits for
    one. `any`: the same, but after `grace_s` seconds any peer, or the model is cut anew over the remaining peers.
    `tolerant`: any peer at once. `refuse`: like `exact`, but the job ends in order if there are only other peers. If
    results may differ after a takeover, the job reports and records that.

    `checks`: `spot`: part of the machines' work is recomputed by machines that stand by; `none`: nothing is; None:
    `spot` wherever possible, that is, in all jobs without local updates.
    """

    takeover: Literal["any", "exact", "tolerant", "refuse"] = "any"
    grace_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    checks: Literal["none", "spot"] | None = None

    @property
    def numerics(self) -> Literal["exact", "any", "tolerant"]:
        """Whether different bits are tolerated; with `any` only after a fault."""
        return "exact" if self.takeover == "refuse" else self.takeover


EVERY: Final = 50
"""Default number of steps between exchanges."""
Count = Annotated[int, Meta(ge=2, le=MOST_REPLICAS)] | Literal["auto"]


class ReplicasTable(_Table, frozen=True, kw_only=True):
    """Several pipelines train one model. With `gradients = "local"`, see `Replicas`; with `"summed"`, a step's
    microbatches are divided among the pipelines, and all gradients are summed at its end. That equals the training of
    one pipeline, bit for bit except for the order of the sums. The other keys apply only to local updates."""

    count: Count
    gradients: Literal["local", "summed"] = "local"
    exchange: Literal["peers"] | None = None
    every: Positive | None = None
    codec: Exchanged | None = None
    learning_rate: PositiveFloat | None = None
    momentum: Annotated[float, Meta(ge=0, lt=1)] | None = None
    deadline_s: PositiveFloat | None = None
    overlap: NotNegative | None = None
    early_steps: NotNegative | None = None


class Replicas(_Table, frozen=True, kw_only=True):
    """Several pipelines train one model with local updates: each processes its own `train.batch_size` sequences per
    step, and they average every `every` steps (DiLoCo, arXiv 2311.08105). `codec`: compression of the exchanged
    differences and averages; the replicas' machines sum them, each a share. `learning_rate` and `momentum` are the
    outer step's, by default from `outer_step`. No replica waits longer than `deadline_s` seconds for the others.
    `overlap`: training steps during an exchange (arXiv 2501.18512). `early_steps`: number of steps after the warm-up
    with five exchanges in each usual round."""

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
        """Upper limit of replicas at the same time."""
        return MOST_REPLICAS if self.count == "auto" else self.count


class PrivacyTable(_Table, frozen=True, kw_only=True):
    """What stays with the job owner: by default the level `split`, unless the pool computes the loss. `first`, `last`:
    number of layers at each end that stay, for `split-k` only."""

    level: PrivacyLevel | None = None
    first: NotNegative | None = None
    last: NotNegative | None = None
    confidential: bool = False


class Privacy(_Table, frozen=True, kw_only=True):
    """The privacy level of a job (see `primitives.privacy`). `first`, `last`: layers at each end that stay with the job
    owner in addition to what the level keeps there."""

    level: PrivacyLevel = "split"
    first: int = 0
    last: int = 0
    confidential: bool = False


class OutputTable(_Table, frozen=True, kw_only=True):
    """Optional files besides checkpoints and telemetry."""

    tensorboard: bool = True
    report: bool = True


class RecipeTables(_Table, frozen=True, kw_only=True):
    """A recipe file's tables as written."""

    job: JobTable
    model: ModelTable
    data: DataTable
    train: Train
    adapter: AdapterTable | None = None
    evaluation: EvaluationTable | None = None
    placement: PlacementTable = PlacementTable()
    faults: FaultsTable = FaultsTable()
    replicas: ReplicasTable | None = None
    privacy: PrivacyTable = PrivacyTable()
    output: OutputTable = OutputTable()
