"""What rounds cost and brought, per strategy."""

from __future__ import annotations

import math

import msgspec
import pytest

from p2pdrl.config.strategy import AdpsgdConfig, GradAverageConfig, LocalConfig
from p2pdrl.node.accounting.exchanges import ROUNDS_KEPT, STALENESS_BOUNDS, Accounting
from p2pdrl.strategies.protocol import Merged, RoundReport

ME, B, C = "a" * 32, "b" * 32, "c" * 32
NAMES = {ME: "me", B: "bob"}


def named(peer: str) -> str:
    return NAMES.get(peer, peer[:8])


def ok(**changed) -> RoundReport:
    given = {
        "merged": (Merged(ME, 0.5), Merged(B, 0.25, 3), Merged(C, 0.25, 9999)),
        "seconds": 0.5,
        "waited_s": 0.1,
        "bytes_in": 100,
        "bytes_out": 200,
        "round_trips": 2,
        "changed": 1.5,
        "distance": 3.0,
    }
    return RoundReport("ok", **(given | changed))


@pytest.fixture
def accounting(clock) -> Accounting:
    made = Accounting(ME, clock)
    made.entered(AdpsgdConfig(weight=0.3), 1)
    return made


def test_sums_are_kept_per_strategy(accounting, clock):
    accounting.round(ok())
    accounting.round(ok())
    accounting.round(RoundReport("timeout", missing=(B,), seconds=2.0, bytes_out=50, error="no answer"))
    accounting.round(RoundReport("pushed"))
    accounting.saw_distance(0.75)
    clock.advance(10.0)
    accounting.entered(GradAverageConfig(), 2)
    accounting.round(ok(bytes_in=7))
    clock.advance(5.0)
    documents = accounting.document(named)
    assert documents.keys() == {"adpsgd", "grad_average"}
    gossip, reduce = documents["adpsgd"], documents["grad_average"]
    assert gossip["mode"] == "gossip"
    assert (gossip["rounds"], gossip["failed"]) == ({"ok": 2, "timeout": 1, "pushed": 1}, 1)
    assert (gossip["bytes_in"], gossip["bytes_out"], gossip["round_trips"]) == (200, 450, 4)
    assert (gossip["round_s"], gossip["learner_wait_s"]) == (pytest.approx(3.0), pytest.approx(0.2))
    assert (gossip["consensus_distance"], gossip["in_force_s"]) == (0.75, pytest.approx(10.0))
    assert (reduce["mode"], reduce["bytes_in"], reduce["failed"]) == ("allreduce", 7, 0)
    assert (reduce["consensus_distance"], reduce["in_force_s"]) == (None, pytest.approx(5.0))
    msgspec.json.encode(documents)


def test_a_strategy_that_comes_back_goes_on_with_its_account(accounting, clock):
    accounting.round(ok())
    for strategy in (LocalConfig(), AdpsgdConfig()):
        clock.advance(10.0)
        accounting.entered(strategy, 2)
    accounting.round(ok())
    clock.advance(1.0)
    gossip = accounting.document(named)["adpsgd"]
    assert (gossip["rounds"], gossip["in_force_s"]) == ({"ok": 2}, pytest.approx(11.0))
    walk = accounting.walk()
    assert [(step["mode"], step["protocol"]) for step in walk] == [
        ("gossip", "adpsgd"), ("local", "local"), ("gossip", "adpsgd")
    ]  # fmt: skip
    assert walk[0]["options"] == {"weight": 0.3}
    assert walk[2]["time"] - walk[0]["time"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("staleness", "bucket"),
    [(-5, "0"), (0, "0"), (1, "1"), (2, "2"), (3, "4"), (8, "8"), (9, "16"), (1024, "1024"), (1025, ">1024")],
)
def test_staleness_falls_into_powers_of_two(accounting, staleness, bucket):
    accounting.round(ok(merged=(Merged(ME, 0.5, 77), Merged(B, 0.5, staleness))))
    counts = accounting.document(named)["adpsgd"]["staleness"]
    assert len(counts) == len(STALENESS_BOUNDS) + 1
    assert {name: count for name, count in counts.items() if count} == {bucket: 1}, "ourselves don't count"


def test_the_last_round_that_merged_anybody_is_shown_by_name(accounting):
    accounting.round(ok())
    accounting.round(RoundReport("timeout"))
    merged = accounting.document(named)["adpsgd"]["last_merged"]
    assert [(one["name"], one["weight"], one["staleness"]) for one in merged] == [
        ("me", 0.5, 0), ("bob", 0.25, 3), ("cccccccc", 0.25, 9999)
    ]  # fmt: skip


def test_the_last_rounds_are_remembered(accounting, clock):
    for number in range(ROUNDS_KEPT + 5):
        accounting.round(ok(bytes_in=number))
        clock.advance(1.0)
    accounting.round(RoundReport("regrouped", missing=(B, C), error="x" * 1000))
    rounds = accounting.rounds(named)
    assert len(rounds) == ROUNDS_KEPT
    assert [one["number"] for one in rounds] == list(range(7, ROUNDS_KEPT + 7))
    assert rounds[-1]["missing"] == ["bob", "cccccccc"]
    assert len(rounds[-1]["error"]) == 500
    assert rounds[1]["time"] - rounds[0]["time"] == pytest.approx(1.0)


def test_numbers_that_arent_finite_are_shown_as_unknown(accounting):
    accounting.round(ok(changed=math.nan, distance=math.inf, merged=(Merged(B, math.nan),)))
    accounting.saw_distance(math.inf)
    [one] = accounting.rounds(named)
    assert (one["changed"], one["distance"], one["merged"][0]["weight"]) == (None, None, None)
    assert accounting.document(named)["adpsgd"]["consensus_distance"] is None


def test_rounds_before_any_mode_count_as_local(clock):
    accounting = Accounting(ME, clock)
    accounting.round(ok())
    assert accounting.document(named)["local"]["rounds"] == {"ok": 1}
    assert accounting.walk() == []
