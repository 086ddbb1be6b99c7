"""When there is no plan: only changes that lead to one are named."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.cli.planning.request import Change, what_would_fit
from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem, RolePlacement

GB = 10**9


def block(number: int, parameter_bytes: int = GB) -> BlockCost:
    return BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=parameter_bytes,
        trainable_bytes=parameter_bytes,
        activation_bytes=1_000,
        output_bytes=1_000,
        gradient_bytes=1_000,
    )


def peer(name: str, gigabytes: float) -> PeerProfile:
    return PeerProfile(peer=name, name=name, flops_per_s=1e12, memory_bytes=int(gigabytes * GB))


def problem(*peers: PeerProfile, blocks: int = 6, **fields: object) -> Problem:
    """Each block takes 4 GB with gradient and optimizer."""
    roles = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))
    plain = Problem(
        graph_hash="g",
        blocks=tuple(block(number) for number in range(blocks)),
        peers=peers,
        roles=roles,
        microbatches=2,
        microbatch_tokens=8,
    )
    return msgspec.structs.replace(plain, **fields)


def test_a_model_too_large_says_how_many_more_machines_hold_it():
    small = problem(peer("a", 9), peer("b", 5))
    with pytest.raises(PlanError, match=r"10 GB are missing"):
        plan(small)
    assert what_would_fit(small) == ["with 2 more machines like a (9 GB each)"]


def test_what_is_far_too_large_is_said_without_trying():
    assert what_would_fit(problem(peer("a", 5), blocks=200)) == ["with at least 159 more machines like a (5 GB each)"]


def test_lifting_a_constraint_is_named_only_if_it_helps():
    peers = (peer("a", 13), peer("b", 13), peer("c", 5))
    assert what_would_fit(problem(*peers, stages=5)) == ["with another number of stages"]
    assert what_would_fit(problem(*peers, spares_wanted=2)) == ["with no spares kept free"]
    assert what_would_fit(problem(*peers, excluded=("a",))) == ["without `excluded`"]
    assert what_would_fit(problem(*peers, required=("a", "b", "c"), stages=2)) == [
        "without `required`",
        "with another number of stages",
    ]


def test_other_changes_are_tried_and_made_only_then():
    small = problem(peer("a", 9))
    made: list[str] = []

    def change(words: str, made_of: Problem | None) -> Change:
        return Change(words=words, problem=lambda: (made.append(words), made_of)[1])

    found = what_would_fit(
        small,
        [change("smaller", problem(peer("a", 9), blocks=2)), change("as large", small), change("not at all", None)],
    )
    assert found == ["smaller"]
    assert made == ["smaller", "as large", "not at all"]


def test_more_machines_don_t_help_where_a_block_fits_none_but_more_memory_does():
    giant = msgspec.structs.replace(problem(peer("a", 16)), blocks=(block(0, 10 * GB),))
    (said,) = what_would_fit(giant)
    assert said.startswith("if peers lent ")
    # 40 GB and a little in flight, to within a sixteenth.
    assert 2.5 <= float(said.split()[3]) <= 2.7


def test_nothing_is_said_where_nothing_helps():
    assert what_would_fit(problem(peer("a", 0.001))) == []


def test_the_ends_of_the_model_may_be_what_is_in_the_way():
    ends = (RolePlacement(role="feed"), RolePlacement(role="loss"))
    owner = peer("me", 1)
    assert what_would_fit(problem(peer("a", 30), owner=owner, roles=ends)) == ["with embedding and head in the pool"]


def test_a_split_that_the_owner_has_no_memory_for() -> None:
    asked = problem(peer("a", 40), blocks=6)
    owner = msgspec.structs.replace(peer("me", 10), roles=("owner",))
    split = msgspec.structs.replace(
        asked, owner=owner, roles=(RolePlacement(role="feed"), RolePlacement(role="loss")), kept_first=1, kept_last=2
    )
    with pytest.raises(PlanError, match="the model's ends"):
        plan(split)
    assert what_would_fit(split, []) == ["with --privacy encrypted"]


@pytest.mark.parametrize("kept", [(0, 0), (1, 2)])
def test_where_no_machine_takes_a_stage_the_owners_could_be_lent(kept: tuple[int, int]) -> None:
    """Six blocks of 4 GB: 40 GB hold them all, with both ends and the rest on one machine too."""
    roles = (RolePlacement(role="feed"), RolePlacement(role="loss"))
    owner = msgspec.structs.replace(peer("me", 40), roles=("owner",))
    asked = problem(peer("a", 0.5), owner=owner, roles=roles)
    asked = msgspec.structs.replace(asked, kept_first=kept[0], kept_last=kept[1])
    with pytest.raises(PlanError, match="no peer of the pool can be used"):
        plan(asked)
    lent = "with this machine lent to the pool as well (`fusion join`)"
    assert what_would_fit(asked)[-1] == lent
    small = msgspec.structs.replace(asked, owner=msgspec.structs.replace(owner, memory_bytes=20 * GB))
    assert not any("this machine" in words for words in what_would_fit(small))
    assert what_would_fit(msgspec.structs.replace(asked, peers=()))[-1] == lent
