"""`fusion.expert_linear`: a linear layer that applies an expert's weight to each row. Fixes the order of the products.

Neighbours: `operators` maps the name, `capture.experts` finds such layers in models.
"""

from __future__ import annotations

import torch


def expert_linear(
    x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Return [rows, out] for x [rows, in], weight [experts, out, in] (`transposed`: [experts, in, out]), experts int64
    [rows].

    Computes one product per expert that has rows. Gathering a weight for each row would take `rows` times a weight's
    memory.
    """
    width = weight.shape[2 if transposed else 1]
    if x.is_meta or not x.shape[0]:
        return x.new_zeros(x.shape[0], width)
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=weight.shape[0]).tolist()
    made = [
        rows @ (one if transposed else one.t())
        for one, rows in zip(weight.unbind(0), x[order].split(counts), strict=True)
        if rows.shape[0]
    ]
    return torch.cat(made)[order.argsort()]
