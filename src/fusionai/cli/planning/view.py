"""Prints a plan: a table of stages, a picture in text, and sentences about speed, standbys and cost.

`cli.planning.plan` and `cli.serving.view` use this; `dashboard.plan_chart` draws a plan as SVG.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from fusionai.cli import console
from fusionai.primitives.privacy import STAYS, PrivacyLevel, keeps_ends
from fusionai.primitives.units import format_bytes, format_seconds, format_speed
from fusionai.scheduling.problem.embedding_and_head import owners_part
from fusionai.scheduling.problem.memory_savings import describe_savings
from fusionai.scheduling.problem.stage_costs import Crossing
from fusionai.scheduling.problem.types import PROMPT_TOKENS, Excluded, Plan, StagePlacement
from fusionai.scheduling.standby.assignment import StandbyAssignment
from fusionai.scheduling.token_cost import TokenCost
from fusionai.scheduling.training.compression import shown

_BAR: Final = 10
_NAMED: Final = 8
"""Most peers named in a list."""
_REASONS: Final = 8
"""Most reasons listed for left-out peers or missing standbys."""


def show_plan(found: Plan, names: Mapping[str, str]) -> None:
    """Print the stages, the predicted speed, the optimality gap, the spares, the peers left out and the warnings."""
    show_stages(found, names)
    show_speed(found)
    show_proof(found, names)
    show_warnings(found)


def show_stages(found: Plan, names: Mapping[str, str]) -> None:
    """Print a table: who holds what, and the time and memory that it takes."""
    rows = [
        (
            str(stage.stage),
            names.get(stage.peer, stage.peer),
            _blocks(stage),
            "+".join(stage.roles),
            format_seconds(stage.compute_s),
            format_seconds(stage.send_s),
            f"{format_bytes(stage.memory_bytes)} of {format_bytes(stage.memory_limit_bytes)}",
        )
        for stage in found.stages
    ]
    console.table(
        ("stage", "peer", "blocks", "roles", "compute", "send", "memory"),
        rows,
        title="Plan, per microbatch" if found.serving is None else f"Plan, per {_unit(found)}",
        right=(4, 5),
    )


def show_proof(found: Plan, names: Mapping[str, str]) -> None:
    """Print what saves memory and traffic, how far the plan can be from the best, the spares and the peers left out."""
    if found.codecs:
        console.line(f"Between stages, activations and gradients are compressed: {shown(found.codecs)}.")
    for sentence in describe_savings(found):
        console.line(sentence)
    certificate = found.certificate
    if certificate.exact:
        console.line(f"Proven best ({certificate.method}).")
    else:
        console.line(
            f"No plan can be {faster(certificate.optimality_gap)} ({certificate.method}; bound "
            f"{format_speed(certificate.bound_tokens_per_s)} {units(found)}/s)."
        )
    if found.single_peer_tokens_per_s is not None:
        console.line(f"One machine alone: {format_speed(found.single_peer_tokens_per_s)} {units(found)}/s.")
    if found.spares:
        console.line(f"Spares: {_list([names.get(peer, peer) for peer in found.spares])}.")
    reasons = _by_reason(found.excluded, names)
    for reason, peers in list(reasons.items())[:_REASONS]:
        console.line(f"Left out: {_list(peers)}: {reason}.")
    if len(reasons) > _REASONS:
        more = sum(len(peers) for peers in list(reasons.values())[_REASONS:])
        console.line(f"Left out: {more} more; --json lists all with their reasons.")


def show_warnings(found: Plan) -> None:
    for warning in found.warnings:
        console.warning(warning)


def show_picture(found: Plan, crossings: Sequence[Crossing], names: Mapping[str, str]) -> None:
    for line in picture(found, crossings, names, console.width()):
        console.line(console.printable(line))
    console.line()


def picture(
    found: Plan, crossings: Sequence[Crossing], names: Mapping[str, str], columns: int | None = None
) -> Iterator[str]:
    """Yield the pipeline from the feed down: who holds what, the time of each stage and link, and the use of memory.
    The slowest stage or link is marked. `columns`: width above which a stage or link takes two lines."""
    slowest_s = max([*(s.compute_s for s in found.stages), *(c.transfer_s for c in crossings), 1e-12])
    width = max(len(names.get(stage.peer, stage.peer)) for stage in found.stages)
    held = max(len(_holds(stage)) for stage in found.stages)
    marked = False
    behind = {link.from_stage: link for link in crossings}
    replica = None
    for stage in found.stages:
        if stage.replica != replica:
            replica = stage.replica
            which = f", replica {replica}" if found.replicas > 1 else ""
            if found.feed != stage.peer:
                yield f"    {names.get(found.feed, found.feed)}: feed{which}"
                yield "     |"
            elif which:
                yield f"    {which[2:]}"
        name = names.get(stage.peer, stage.peer)
        slowest = not marked and stage.compute_s == slowest_s
        marked = marked or slowest
        memory = stage.memory_bytes / stage.memory_limit_bytes if stage.memory_limit_bytes else 0.0
        head = f"[{stage.stage:>2}] {name:<{width}}  {_holds(stage):<{held}}"
        time = f"compute {_bar(stage.compute_s / slowest_s)} {format_seconds(stage.compute_s):>8}"
        held_bytes = f"{format_bytes(stage.memory_bytes)} of {format_bytes(stage.memory_limit_bytes)}"
        mark = "  <- slowest" if slowest else ""
        yield from _fitting(f"{head}  {time}", f"memory {_bar(memory)} {held_bytes}", mark, len(head) + 2, columns)
        link = behind.get(stage.stage)
        if link is not None:
            slowest = not marked and link.transfer_s == slowest_s
            marked = marked or slowest
            time = f"     |  link {_bar(link.transfer_s / slowest_s)} {format_seconds(link.transfer_s)}"
            back = f" there, {format_bytes(link.gradient_bytes)} back" if link.gradient_bytes else ""
            mark = "  <- slowest" if slowest else ""
            head = f"{time} + {format_seconds(link.latency_s)} latency"
            yield from _fitting(f"{head},", f"{format_bytes(link.forward_bytes)}{back}", mark, 13, columns, gap=" ")
    if found.spares:
        yield f"     spares: {_list([names.get(peer, peer) for peer in found.spares])}"


def _fitting(head: str, rest: str, mark: str, indent: int, columns: int | None, gap: str = "  ") -> Iterator[str]:
    """Yield one line, or two if it is longer than `columns`; the second one begins at `indent`."""
    whole = f"{head}{gap}{rest}{mark}"
    if columns is None or len(whole) <= columns:
        yield whole
        return
    yield f"{head.removesuffix(',')}{mark}"
    trunk = "     |" if head.startswith("     |") else ""
    yield f"{trunk:<{indent}}{rest}"


def show_standbys(watch: StandbyAssignment, names: Mapping[str, str]) -> None:
    """Print the warm standby of each stage, or why it has none."""
    for standby in watch.plan.standbys:
        bits = "" if standby.exact else ", with other numerics"
        where = ", on the same machine" if standby.beside else ""
        console.line(
            f"Stage {standby.stage} has the warm standby {names.get(standby.peer, standby.peer)}{where}{bits}."
        )
    if watch.plan.standbys:
        console.line(f"Snapshots: {watch.interval.reason}")
    for entry in watch.without_standby:
        reasons = _by_reason(entry.reasons, names)
        why = "; ".join(f"{_list(peers)}: {reason}" for reason, peers in list(reasons.items())[:_REASONS])
        console.line(f"Stage {entry.stage} has no warm standby: {why or 'the pool has no spare'}.")


def show_cost(found: TokenCost, names: Mapping[str, str]) -> None:
    """Print energy and money per million tokens if they are known, or which machines lack a figure."""
    if found.joules is not None and found.power_w is not None:
        console.line(
            f"Energy: {found.joules / 1e3:,.4g} kJ per million tokens, {found.power_w:,.4g} W while the job runs (all "
            "machines with a stage, at full power)."
        )
    if found.money is not None:
        console.line(f"Money: {found.money:.3g} {found.currency} per million tokens.")
    for what, word, missing in (
        ("Energy", "power", found.without_power),
        ("Money", "price", found.without_price if found.joules is not None else ()),
    ):
        if missing:
            console.line(
                f"{what}: unknown, because no {word} is given for {_list([names.get(p, p) for p in missing])}."
            )


def faster(gap: float) -> str:
    """Return a gain in speed in words: a share up to a half, a factor beyond."""
    return f"more than {gap:.1%} faster" if gap <= 0.5 else f"more than {1 + gap:.2g} times as fast"


def _unit(found: Plan) -> str:
    """Return what a serving plan's speeds count."""
    text_tokens = 0 if found.serving is None else found.serving.text_tokens
    return f"text of {text_tokens} tokens" if text_tokens else "token"


def units(found: Plan) -> str:
    return "texts" if found.serving is not None and found.serving.text_tokens else "tokens"


def show_speed(found: Plan) -> None:
    """Print the predicted speed and what limits it."""
    sizes = found.serving
    if sizes is None:
        console.line(
            f"{format_speed(found.tokens_per_s)} tokens/s, a step of {found.microbatches} microbatches in "
            f"{format_seconds(found.step_time_s)}; slowest: {found.bottleneck}."
        )
        if found.replicas > 1:
            console.line(
                f"{found.replicas} replicas share the step and sum their gradients at its end, which takes "
                f"{format_seconds(found.reduction_s)} of it."
            )
        return
    console.line(
        f"One session: {format_speed(found.tokens_per_s)} {units(found)}/s, a {_unit(found)} in "
        f"{format_seconds(found.step_time_s)}; slowest: {found.bottleneck}."
    )
    console.line(
        f"{sizes.sessions} sessions together: {format_speed(sizes.tokens_per_s_together)} {units(found)}/s with "
        f"{sizes.passes_in_flight} passes in flight."
    )
    if sizes.prompt_tokens_per_s > 0:
        tokens = min(PROMPT_TOKENS, sizes.context_tokens)
        console.line(
            f"A prompt of {tokens} tokens: {format_speed(sizes.prompt_tokens_per_s)} tokens/s, the first token after "
            f"{format_seconds(tokens / sizes.prompt_tokens_per_s)}."
        )
    if sizes.text_tokens:
        console.line(f"Weights {sizes.weights}. A text has at most {sizes.context_tokens} tokens.")
        return
    console.line(
        f"Weights {sizes.weights}, cache {sizes.cache}: {sizes.pages} pages, {sizes.pages * sizes.page_tokens} tokens "
        f"(contexts of up to {sizes.context_tokens})."
    )


def _by_reason(entries: Iterable[Excluded], names: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        reasons.setdefault(entry.reason.rstrip("."), []).append(names.get(entry.peer, entry.peer))
    return reasons


def _holds(stage: StagePlacement) -> str:
    roles = [role for role in stage.roles if role != "stage"]
    return ", ".join([f"blocks {_blocks(stage)}", *roles])


def _blocks(stage: StagePlacement) -> str:
    first, last = stage.blocks[0], stage.blocks[1] - 1
    return str(first) if first == last else f"{first}-{last}"


def _bar(part: float) -> str:
    full = min(_BAR, max(0, round(part * _BAR)))
    return "#" * full + "." * (_BAR - full)


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def privacy_lines(level: PrivacyLevel, plan: Plan) -> Iterator[str]:
    """Yield a sentence about the level and, if it keeps blocks with the owner, one about their cost."""
    yield f"Privacy {level}: {STAYS[level]}"
    part = owners_part(plan)
    if not keeps_ends(level) or part is None:
        return
    blocks = " and ".join(
        str(first) if end - first == 1 else f"{first} to {end - 1}" for first, end in dict.fromkeys(part.blocks)
    )
    each = "token" if plan.task == "serve" else "step"
    yield (
        f"This level costs this machine {format_bytes(part.memory_bytes)} of {format_bytes(part.limit_bytes)} memory "
        f"and {format_seconds(part.compute_s)} per {each} (blocks {blocks})."
    )


def privacy_figures(level: PrivacyLevel, plan: Plan) -> dict[str, object]:
    """Return the figures for `--json`. `owner`: cost of the blocks on the job owner's machine, None without any."""
    part = owners_part(plan)
    return {"level": level, "owner": None if part is None else msgspec.structs.asdict(part)}
