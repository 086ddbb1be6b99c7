# What FusionAI uses of transformers, for the type checker alone: reading the sources of all its models would take a
# quarter of the checker's time. A name that is missing here is added by hand.

from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

class PreTrainedConfig:
    model_type: str
    attribute_map: dict[str, str]
    is_decoder: bool
    def __init__(self, **fields: Any) -> None: ...
    def to_dict(self) -> dict[str, Any]: ...
    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> PreTrainedConfig: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...

class _Configs:
    def __contains__(self, model_type: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, model_type: str) -> type[PreTrainedConfig]: ...

CONFIG_MAPPING: _Configs

class AutoConfig:
    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], **choices: Any) -> PreTrainedConfig: ...

class AutoFeatureExtractor:
    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], **choices: Any) -> Any: ...

class _Tokenizer:
    model_input_names: list[str]

class AutoImageProcessor:
    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], **choices: Any) -> Any: ...

class _Tokenizer:
    model_input_names: list[str]

class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], **choices: Any) -> _Tokenizer: ...

class _AutoModel:
    _model_mapping: Any
    @classmethod
    def from_config(cls, config: PreTrainedConfig, **choices: Any) -> nn.Module: ...
    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], **choices: Any) -> nn.Module: ...

class AutoModel(_AutoModel): ...
class AutoModelForCausalLM(_AutoModel): ...
class AutoModelForMaskedLM(_AutoModel): ...
class AutoModelForSequenceClassification(_AutoModel): ...

class AttentionInterface:
    @classmethod
    def register(cls, key: str, value: Callable[..., Any]) -> None: ...

def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler: ...
