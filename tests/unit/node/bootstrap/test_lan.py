"""What nodes announce on the local network, and whom they take for one of theirs."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from p2pdrl.errors import UsageError
from p2pdrl.ids import swarm_id_from_key, swarm_id_from_name
from p2pdrl.node.bootstrap.lan import LanDiscovery, fingerprint, may_join


def test_fingerprints_tell_swarms_and_tasks_apart_and_nothing_of_the_key():
    ours, theirs = (swarm_id_from_key(key * 32) for key in (b"a", b"b"))
    assert may_join(fingerprint(ours), fingerprint(ours))
    assert not may_join(fingerprint(ours), fingerprint(theirs))
    assert ours not in fingerprint(ours)
    named = swarm_id_from_name("default")
    cartpole, pong = (fingerprint(named, task * 64) for task in "01")
    assert may_join(cartpole, fingerprint(named))  # a newcomer that takes any task
    assert may_join(fingerprint(named), cartpole)
    assert not may_join(cartpole, pong)
    for nonsense in ("", "x", fingerprint(named)[:-1]):
        assert not may_join(fingerprint(named), nonsense)


def test_without_the_extra_a_person_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[lan\]'"):
        LanDiscovery.require()


@pytest.mark.skipif(importlib.util.find_spec("zeroconf") is None, reason="wants the extra lan (zeroconf)")
def test_with_the_extra_nothing_is_wanted():
    LanDiscovery.require()
