from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.group.compatibility import Summary, Verdict, judge, lineage_of_most_words

MIRROR = {
    Verdict.MIX: Verdict.MIX,
    Verdict.ADOPT: Verdict.BE_ADOPTED,
    Verdict.BE_ADOPTED: Verdict.ADOPT,
    Verdict.OTHER_TASK: Verdict.OTHER_TASK,
    Verdict.OTHER_MODE: Verdict.OTHER_MODE,
}
few = st.integers(0, 3)
summaries = st.builds(
    Summary,
    node_id=st.sampled_from(["1", "2"]),
    task_hash=st.sampled_from(["t", "u"]),
    layout_hash=st.sampled_from(["l", "m"]),
    mode_epoch=few,
    lineage=st.sampled_from(["aa", "bb", "cc"]),
    lineage_steps=few,
    policy_version=st.integers(0, 20),
)
ME = Summary("1", "task", "layout", 1, "bb", 100, 50)


@given(summaries, summaries, st.integers(1, 10))
def test_both_sides_come_to_mirrored_verdicts(mine, theirs, max_staleness):
    assert judge(theirs, mine, max_staleness) is MIRROR[judge(mine, theirs, max_staleness)]


@given(summaries, st.integers(1, 10))
def test_a_twin_is_mixed_with(mine, max_staleness):
    assert judge(mine, mine, max_staleness) is Verdict.MIX


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        ({}, Verdict.MIX),
        ({"policy_version": 60}, Verdict.MIX),
        ({"policy_version": 61}, Verdict.ADOPT),
        ({"policy_version": 40}, Verdict.MIX),
        ({"policy_version": 39}, Verdict.BE_ADOPTED),
        ({"mode_epoch": 2}, Verdict.OTHER_MODE),
        ({"task_hash": "x"}, Verdict.OTHER_TASK),
        ({"layout_hash": "x"}, Verdict.OTHER_TASK),
        # More steps stay; then the lower id.
        ({"lineage": "cc", "lineage_steps": 101}, Verdict.ADOPT),
        ({"lineage": "cc", "lineage_steps": 99}, Verdict.BE_ADOPTED),
        ({"lineage": "aa", "lineage_steps": 100}, Verdict.ADOPT),
        ({"lineage": "cc", "lineage_steps": 100}, Verdict.BE_ADOPTED),
        # Another lineage is settled before the mode is, never before the task.
        ({"lineage": "aa", "mode_epoch": 9}, Verdict.ADOPT),
        ({"lineage": "aa", "task_hash": "x"}, Verdict.OTHER_TASK),
        ({"lineage": "cc", "lineage_steps": 0, "policy_version": 9999}, Verdict.BE_ADOPTED),
    ],
)
def test_verdicts(theirs, verdict):
    assert judge(ME, msgspec.structs.replace(ME, node_id="2", **theirs), 10) is verdict


def test_in_a_group_the_lineage_of_several_stays_whatever_one_says():
    assert lineage_of_most_words([("bb", 5)]) == "bb"
    assert lineage_of_most_words([("bb", 5), ("aa", 4)]) == "bb"
    assert lineage_of_most_words([("bb", 5), ("aa", 5)]) == "aa"
    assert lineage_of_most_words([("bb", 5), ("bb", 3), ("aa", 2**50)]) == "bb"
    assert lineage_of_most_words([("bb", 5), ("bb", 3), ("aa", 4), ("aa", 9)]) == "aa"
