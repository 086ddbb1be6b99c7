"""Every module, definition and message field serves a command: read from the syntax of the source (`source_graph`)."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.source_graph import modules, reached_modules, unreached

UNREACHED_MODULES: dict[str, str] = {}
"""Module -> why no command reaches it and it stays."""
UNREACHED: dict[str, str] = {
    "fusionai.cli.planning.analyze.shipped_comparisons": "docs/generate.py writes docs/analysis.md from it",
    "fusionai.dashboard.analysis_page.document": "docs/generate.py writes docs/analysis.md with it",
    "fusionai.dashboard.analysis_page._markdown": "part of `document`",
    "fusionai.coordination.machine.START": "part of `rows`",
    "fusionai.coordination.machine.rows": "docs/generate.py draws docs/machines.md from it",
    "fusionai.backends.worker.kernel_cache.ReadOnlyLocator": "numba loads it by the name in its environment",
    "fusionai.backends.worker.kernel_cache.ReadOnlyLocator.__init__": "part of it",
    "fusionai.backends.worker.kernel_cache.ReadOnlyLocator.ensure_cache_path": "part of it",
    "fusionai.backends.worker.kernel_cache._has_kernels": "part of it",
    "fusionai.serving.inspection.Measured": "result of `measured`",
    "fusionai.serving.inspection.measured": "benchmarks/verification_serving.py measures limits with it",
}
"""Definition -> who uses it instead of a command."""
UNREAD: dict[str, str] = {
    "Hello.software": "for people who look at a connection; a handshake is the same in every version",
    "Welcome.software": "as Hello.software",
    "Detach.reason": "for people who look at a connection",
    "Pong.sent_at_s": "echoes the ping's, for people who look at a connection",
}
"""Field of a message -> why it is sent although no code reads it."""
MOST_EXCEPTIONS = 19


def test_every_module_serves_a_command():
    idle = sorted(set(modules()) - reached_modules() - set(UNREACHED_MODULES))
    assert not idle, f"no command reaches {idle}: delete them, or say in UNREACHED_MODULES why they stay"


def test_processes_and_modules_loaded_by_name_are_followed():
    by_name = {"fusionai.__main__", "fusionai.backends.survey", "fusionai.backends.torch.reference"}
    assert by_name | {"fusionai.backends.torch.row_kernels", "fusionai.cli.training.demo"} <= reached_modules()


def test_every_definition_serves_a_command():
    idle = sorted(f"{unit.module}.{unit.name}" for unit in unreached())
    new = [name for name in idle if name not in UNREACHED]
    assert not new, f"no command reaches {new}: delete them with their tests, or say in UNREACHED who uses them"


def test_exceptions_are_few_and_still_needed():
    idle = {f"{unit.module}.{unit.name}" for unit in unreached()}
    assert not set(UNREACHED) - idle, "reached again"
    assert not set(UNREACHED_MODULES) & reached_modules(), "reached again"
    assert set(UNREAD) == set(unread_fields()), "read again, or gone"
    assert len(UNREACHED) + len(UNREACHED_MODULES) + len(UNREAD) <= MOST_EXCEPTIONS


def test_every_field_of_a_message_is_read():
    idle = sorted(set(unread_fields()) - set(UNREAD))
    assert not idle, f"no code outside `wire` reads {idle}: remove them, and raise PROTOCOL_VERSION"


def unread_fields() -> Iterator[str]:
    """Fields of structs in `wire` that no other module reads. A message's field counts as read in a module that names
    the message, and in any where no other struct has such a field; a part's field in any. Tensors are read by
    `wire.frame` for all messages."""
    outside = [used(module.nodes) for module in modules().values() if not module.name.startswith("fusionai.wire")]
    matched = {pair for one in outside for pair in one.matched}
    anywhere = {name for one in outside for name in one.read} | {field for _, field in matched}
    structs = list(wire_structs())
    counts = Counter(field for _, _, fields in structs for field in fields)
    for struct, is_message, fields in structs:
        for field in fields:
            if is_message and counts[field] > 1:
                is_read = any(field in one.read and struct in one.named for one in outside)
                is_read = is_read or (struct, field) in matched or field == "tensors"
            else:
                is_read = field in anywhere
            if not is_read:
                yield f"{struct}.{field}"


def wire_structs() -> Iterator[tuple[str, bool, list[str]]]:
    """Name, whether it is a message, fields: of all that crosses a network."""
    for module in modules().values():
        if not module.name.startswith("fusionai.wire") or module.name == "fusionai.wire.frame":
            continue
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if bases & {"WireMessage", "Struct"}:
                    fields = [child.target for child in node.body if isinstance(child, ast.AnnAssign)]
                    names = [target.id for target in fields if isinstance(target, ast.Name)]
                    yield node.name, "WireMessage" in bases, names


@dataclass(frozen=True, slots=True)
class Used:
    """What a module uses: attributes it reads, names and attributes it has, (class, field) of its patterns."""

    read: set[str]
    named: set[str]
    matched: set[tuple[str, str]]


def used(nodes: Iterable[ast.AST]) -> Used:
    found = Used(set(), set(), set())
    for node in nodes:
        match node:
            case ast.Attribute(ctx=ast.Load(), attr=name):
                found.read.add(name)
                found.named.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.read.add(name)
            case ast.Name(id=name):
                found.named.add(name)
            case ast.MatchClass():
                found.matched.update((ast.unparse(node.cls).rpartition(".")[2], name) for name in node.kwd_attrs)
            case _:
                pass
    return found


def test_patterns_attributes_and_getattr_are_reading():
    tree = ast.parse("match message:\n case wire.Ready(step=step): use(message.stage, getattr(step, 'fence'))")
    found = used(ast.walk(tree))
    assert found.matched == {("Ready", "step")}
    assert found.read == {"Ready", "stage", "fence"}
    assert {"Ready", "message", "use"} <= found.named
