"""Gradient clipping in three steps: norms and multiplication run where the gradients are, the scale where the driver
is.

Together they equal `torch.nn.utils.clip_grad_norm_` bit for bit, because they make the same calls in the same order.
Neighbours: `program` computes norms and multiplies, `backend` computes the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def clip_scale(norms: Sequence[float], max_norm: float, device: torch.device) -> tuple[float, float]:
    """Return (n = norm of the stacked float32 norms, min(max_norm / (n + 1e-6), 1.0))."""
    if not norms:
        return 0.0, 1.0
    stacked = torch.tensor(list(norms), dtype=torch.float32, device=device)
    total = torch.linalg.vector_norm(stacked, 2.0)
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    return total.item(), scale.item()


def parameter_norms(gradients: Sequence[torch.Tensor]) -> list[float]:
    """Return the Euclidean norm of each tensor, exactly as `torch.nn.utils.clip_grad_norm_` computes it."""
    if not gradients:
        return []
    if gradients[0].device.type in ("cpu", "cuda"):
        norms = torch._foreach_norm(list(gradients), 2.0)  # pyright: ignore[reportPrivateImportUsage]
    else:
        norms = [torch.linalg.vector_norm(gradient, 2.0) for gradient in gradients]
    if len({norm.dtype for norm in norms}) == 1:
        return torch.stack(list(norms)).tolist()
    return [norm.item() for norm in norms]


def scale_gradients(gradients: Sequence[torch.Tensor], scale: float) -> None:
    """Multiply the gradients in place as `torch.nn.utils.clip_grad_norm_` does."""
    factor = torch.tensor(scale, dtype=torch.float32, device=gradients[0].device)
    if gradients[0].device.type in ("cpu", "cuda"):
        torch._foreach_mul_(list(gradients), factor)  # pyright: ignore[reportPrivateImportUsage]
    else:
        for gradient in gradients:
            gradient.mul_(factor)
