"""Findings of an audit that nobody ran, for tests of what is made of them."""

from __future__ import annotations

from fusionai.privacy.findings import Attack, BoundaryFindings, Budget, Control, Findings, Recovery, Subject, Trial


def recovered(attack: Attack, top1: float) -> Recovery:
    return Recovery(
        attack=attack,
        tokens=100,
        top1=top1,
        low=max(0.0, top1 - 0.1),
        high=min(1.0, top1 + 0.1),
        rouge_l=top1,
        secrets=2,
        secrets_found=0,
        budget=Budget(forward_tokens=10, seconds=1.0),
    )


def boundary(depth: int, defence: str, white_box: float, **others: float) -> BoundaryFindings:
    aside = tuple(recovered(attack, top1) for attack, top1 in others.items())  # pyright: ignore[reportArgumentType]
    return BoundaryFindings(
        depth=depth, defence=defence, loss=2.0, white_box=recovered("white-box", white_box), others=aside
    )


def findings(
    *boundaries: BoundaryFindings, controls: tuple[Control, ...] = (Control(name="clean", got=1.0),)
) -> Findings:
    return Findings(
        date="2026-01-02",
        command="fusion audit",
        versions={"torch": "2"},
        machine="one",
        seconds=1.0,
        subject=Subject(
            name="tiny",
            parameters=10,
            layers=2,
            width=4,
            vocabulary=8,
            trained_tokens=100,
            data="text",
            loss=2.0,
            perplexity=7.4,
        ),
        trial=Trial(texts=2, template_tokens=3, private_tokens=50, chance=0.06),
        local_blocks=1,
        boundaries=boundaries,
        updates=(),
        controls=controls,
    )
