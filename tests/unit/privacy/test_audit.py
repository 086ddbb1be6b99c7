"""A whole audit of a tiny model: the controls succeed, what hides nothing is told so, what hides something too."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from fusionai.privacy import audit
from fusionai.privacy.attacks import FitBudget, InverterBudget
from fusionai.privacy.findings import AuditAttack, Truth
from fusionai.privacy.subject import AttackedModel, Defence, defences
from harness.attacked import VOCABULARY, tiny

TEMPLATE = 3


@pytest.fixture(scope="module")
def attacked() -> AttackedModel:
    return tiny()


def texts() -> audit.Texts:
    dice = torch.Generator().manual_seed(6)

    def drawn(rows: int, tokens: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (rows, tokens), generator=dice)

    trial = drawn(2, TEMPLATE + 8)
    trial[:, :TEMPLATE] = trial[0, :TEMPLATE]
    private = tuple(tuple(row) for row in trial[:, TEMPLATE:].tolist())
    truth = Truth(private, (str(private[0][2]), ""), lambda tokens: " ".join(map(str, tokens)))
    return audit.Texts(
        trial=trial,
        template_tokens=TEMPLATE,
        truth=truth,
        auxiliary=drawn(40, 16),
        known=drawn(10, 16),
        held_out=drawn(4, 16),
    )


def plan(*attacks: AuditAttack, depths: tuple[int, ...] = (0, 2)) -> audit.AuditPlan:
    return audit.AuditPlan(
        depths=depths,
        attacks=frozenset(attacks),
        updates=(audit.UpdateCase(1, 6, "fp32", lambda gradient: gradient),),
        few=1,
        inverter=InverterBudget(steps=2, width=16),
        fit=FitBudget(steps=80),
    )


@pytest.mark.slow
def test_every_attack_is_run_and_every_control_succeeds(attacked: AttackedModel):
    clean = audit.Victim(defences({}, ())[0], attacked)
    told: list[audit.Doing] = []
    found = audit.run(attacked, [clean], texts(), plan(*get_args(AuditAttack)), told.append)
    assert [one.depth for one in found.boundaries] == [0, 2]
    assert all(one.white_box.top1 == 1 and one.white_box.secrets_found == 1 for one in found.boundaries)
    run = {other.attack for one in found.boundaries for other in one.others}
    assert run == {
        "template", "known text", "recovered prefix", "nearest", "ridge", "inverter", "optimisation", "pooled"
    }  # fmt: skip
    assert [update.recovery.top1 for update in found.updates] == [1.0]
    assert all(control.passed for control in found.controls)
    assert {doing.what for doing in told} >= {"white-box, every token tried", "clean at depth 2"}


def test_what_replaces_the_boundary_hides_the_text_and_costs_the_loss(attacked: AttackedModel):
    """Noise without measure: the audit must be able to say that something works, and what it costs."""
    ways = defences({}, (50.0,))
    victims = [audit.Victim(ways[0], attacked), audit.Victim(ways[-1], attacked)]
    found = audit.run(attacked, victims, texts(), plan(depths=(2,)), lambda _: None)
    clean, noisy = found.boundaries
    assert (clean.white_box.top1, clean.defence, noisy.defence) == (1.0, "clean", "noise 50")
    assert noisy.white_box.top1 < 0.3
    assert noisy.loss > clean.loss + 0.01
    assert not noisy.others


def test_a_broken_control_is_told(attacked: AttackedModel):
    """Where even the clean boundary gives nothing, something is wrong with the audit."""
    broken = audit.Victim(Defence("clean", torch.zeros_like), attacked)
    found = audit.run(attacked, [broken], texts(), plan(), lambda _: None)
    assert found.controls
    assert not any(control.passed for control in found.controls)


def test_a_secret_prefix_is_attacked_from_where_it_ends(attacked: AttackedModel):
    clean = defences({}, ())[0]
    victims = [audit.Victim(clean, attacked), audit.Victim(Defence("secret", clean.change), tiny(seed=9), first=1)]
    found = audit.run(attacked, victims, texts(), plan("inverter", depths=(0, 1)), lambda _: None)
    assert [(one.defence, one.depth) for one in found.boundaries] == [("clean", 0), ("clean", 1), ("secret", 1)]
    assert "inverter, known text" in {other.attack for other in found.boundaries[-1].others}
    assert found.boundaries[-1].white_box.top1 < 1
