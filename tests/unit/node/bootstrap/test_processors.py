"""Which processors a node keeps to."""

from __future__ import annotations

import os

import pytest

from p2pdrl.config.node import LimitsConfig, NodeConfig
from p2pdrl.errors import UsageError
from p2pdrl.node.bootstrap.processors import choose, keep_to_processors


def test_so_many_neighbours_from_one_that_the_key_picks():
    usable = {0, 2, 3, 5, 8}
    chosen = {tuple(sorted(choose(usable, 2, f"folder {number}"))) for number in range(100)}
    assert chosen == {(0, 2), (2, 3), (3, 5), (5, 8), (0, 8)}
    assert choose(usable, 2, "folder 1") == choose(usable, 2, "folder 1")


@pytest.mark.parametrize("count", [0, 5, 6, 1000])
def test_more_than_there_are_is_all_of_them(count):
    assert choose({0, 2, 3, 5, 8}, count, "folder") == {0, 2, 3, 5, 8}


@pytest.fixture
def affinity(monkeypatch):
    """A machine of eight processors; what each thread was kept to."""
    kept: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda thread, chosen: kept.update({thread: set(chosen)}), raising=False
    )
    return kept


def test_the_process_and_each_thread_of_it_keep_to_the_same(affinity, tmp_path):
    node = NodeConfig(data_dir=str(tmp_path), limits=LimitsConfig(cpus=3))
    keep_to_processors(node)
    assert 0 in affinity
    assert {len(chosen) for chosen in affinity.values()} == {3}
    assert len({frozenset(chosen) for chosen in affinity.values()}) == 1
    first = affinity[0]
    keep_to_processors(node)
    assert affinity[0] == first  # the same node, the same processors


def test_without_a_bound_nothing_is_set(affinity):
    keep_to_processors(NodeConfig())
    assert affinity == {}


def test_a_system_that_cant_says_what_to_do(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(UsageError, match=r"leave it 0, and lower node\.actors\.count"):
        keep_to_processors(NodeConfig(limits=LimitsConfig(cpus=1)))
    keep_to_processors(NodeConfig())
