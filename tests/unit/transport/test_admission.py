"""Token buckets and handler slots."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.transport.calls import Admission, TokenBuckets
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Refusal


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    clock = ManualClock()
    buckets = TokenBuckets(clock, rate_per_s=2.0, burst=3.0)
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]
    assert buckets.take("b")
    clock.advance(0.5)
    assert [buckets.take("a") for _ in range(2)] == [True, False]
    clock.advance(1000)
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]


def test_buckets_are_bounded() -> None:
    buckets = TokenBuckets(ManualClock(), rate_per_s=0.0, burst=1.0, max_keys=2)
    assert [buckets.take(key) for key in "abc"] == [True] * 3
    assert not buckets.take("c")
    assert buckets.take("a")  # it was forgotten, and starts full


def test_slots_are_counted_by_peer_and_in_all() -> None:
    limits = TransportLimits(max_requests=3, max_requests_per_peer=2)
    admission = Admission(limits, ManualClock())
    with ExitStack() as held:
        held.enter_context(admission.slot("a"))
        held.enter_context(admission.slot("a"))
        with pytest.raises(Refusal, match="2 of your requests"), admission.slot("a"):
            pass
        held.enter_context(admission.slot("b"))
        with pytest.raises(Refusal, match="3 requests are running") as info, admission.slot("c"):
            pass
        assert info.value.status == 429
    with pytest.raises(KeyError), admission.slot("a"):
        raise KeyError
    for _ in range(3):
        with admission.slot("a"), admission.slot("b"), admission.slot("c"):
            pass
