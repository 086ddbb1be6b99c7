"""The learning rate of a step, as a pure function with the same bits as torch's `LambdaLR` with transformers'
schedules.

Source: `transformers.optimization` (`get_constant_schedule_with_warmup`, `get_linear_schedule_with_warmup`,
`get_cosine_schedule_with_warmup`, `get_cosine_with_min_lr_schedule_with_warmup`). For the linear schedule,
`minimum_ratio` uses the cosine's formula, because transformers has none. Neighbours: `tables.Train` has the settings;
the training driver asks once per step and journals the answer.
"""

from __future__ import annotations

import math

from fusionai.corpus.tables import Train


def learning_rate(train: Train, steps: int, step: int) -> float:
    """The learning rate of `step` (from 0) in a job of `steps` steps."""
    return train.learning_rate * factor(train, steps, step)


def factor(train: Train, steps: int, step: int) -> float:
    """Factor of the base learning rate. The order of operations is that of transformers; another order would change the
    last bit."""
    warmup = train.warmup_steps
    if step < warmup:
        return float(step) / float(max(1, warmup))
    match train.schedule:
        case "constant":
            return 1.0
        case "linear":
            value = max(0.0, float(steps - step) / float(max(1, steps - warmup)))
        case "cosine":
            progress = float(step - warmup) / float(max(1, steps - warmup))
            value = 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))
    return max(0.0, value * (1 - train.minimum_ratio) + train.minimum_ratio)
