from __future__ import annotations

import pytest

from fusionai.corpus.schedule import learning_rate
from fusionai.corpus.tables import Train


def test_warm_up_then_constant() -> None:
    train = Train(batch_size=1, learning_rate=0.1, warmup_steps=4)
    assert [learning_rate(train, 6, step) for step in range(6)] == [0.0, 0.025, 0.05, 0.1 * 0.75, 0.1, 0.1]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decays_to_the_minimum(schedule: str) -> None:
    train = Train(batch_size=1, learning_rate=2.0, schedule=schedule, minimum_ratio=0.25)  # pyright: ignore
    rates = [learning_rate(train, 10, step) for step in range(11)]
    assert rates[0] == 2.0
    assert rates[10] == 0.5
    assert rates == sorted(rates, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "warmup"), [(7, 0), (50, 7), (113, 113), (3, 1)])
@pytest.mark.parametrize(("schedule", "ratio"), [("constant", 0.0), ("linear", 0.0), ("cosine", 0.0), ("cosine", 0.1)])
def test_bit_equal_with_transformers(schedule: str, ratio: float, steps: int, warmup: int) -> None:
    import torch
    from transformers import get_scheduler

    train = Train(
        batch_size=1,
        learning_rate=3.3e-4,
        schedule=schedule,  # pyright: ignore[reportArgumentType]
        warmup_steps=warmup,
        minimum_ratio=ratio,
    )
    name = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}[schedule]
    special = {} if ratio == 0 else {"min_lr_rate": ratio}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=train.learning_rate)
    scheduler = get_scheduler(
        name if ratio == 0 else "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=special or None,
    )
    for step in range(steps):
        assert learning_rate(train, steps, step).hex() == float(optimizer.param_groups[0]["lr"]).hex(), step
        optimizer.step()
        scheduler.step()
