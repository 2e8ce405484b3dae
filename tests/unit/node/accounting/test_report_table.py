from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.membership.identity import Identity
from p2pdrl.node.accounting.facts import FactSigner, ForgedFactError, SignedFact
from p2pdrl.node.accounting.report_table import FAN_OUT, PeerReport, ReportRow, ReportTable, period_s

from ..signing import node_id, said, signer_of

ME = node_id(0)


def report(number: int, boot: int = 1, seq: int = 1, **fields) -> PeerReport:
    return PeerReport(id=node_id(number), boot=boot, seq=seq, **fields)


def row(number: int, boot: int = 1, seq: int = 1, age_s: float = 0.0, **fields) -> ReportRow:
    return said(report(number, boot, seq, **fields), age_s)


def told(table: ReportTable, now: float, limit: int = 32) -> list[ReportRow]:
    return [row for _, row in table.outgoing(now, limit)]


def held(table: ReportTable) -> dict[str, tuple[int, int]]:
    found = {node: table.get(node, 0.0) for node in table.ids()}
    return {node: (got[0].boot, got[0].seq) for node, got in found.items()}


def test_the_newer_boot_and_seq_win():
    table = ReportTable(signer_of(0))
    assert table.merge([row(1, 5, 9)], 0.0) == [node_id(1)]
    assert table.merge([row(1, 5, 9), row(1, 5, 8), row(1, 4, 99)], 0.0) == []
    assert table.merge([row(1, 6, 0)], 0.0) == [node_id(1)]
    assert held(table) == {node_id(1): (6, 0)}


news = st.lists(st.builds(row, st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), max_size=12)


@given(news, news)
def test_merge_is_commutative_idempotent_and_grows_only(first, second):
    ours, theirs = ReportTable(signer_of(0)), ReportTable(signer_of(0))
    ours.merge(first, 0.0)
    before = held(ours)
    ours.merge(second, 0.0)
    theirs.merge(second, 0.0)
    theirs.merge(first, 0.0)
    assert held(ours) == held(theirs)
    assert all(held(ours)[node] >= stamp for node, stamp in before.items())
    assert ours.merge([*first, *second], 1.0) == []


def test_what_others_say_about_me_is_ignored():
    table = ReportTable(signer_of(0))
    table.put(report(0, name="me"), 0.0)
    assert table.merge([row(0, 9, 9, name="forged")], 0.0) == []
    got = table.get(ME, 2.0)
    assert got is not None
    assert (got[0].name, got[1]) == ("me", 2.0)


def test_far_future_boots_are_ignored():
    table = ReportTable(signer_of(0))
    assert table.merge([row(1, boot=11), row(2, boot=10)], 0.0, latest_boot=10) == [node_id(2)]


def test_a_crowd_that_somebody_made_up_pushes_no_living_member_out():
    table = ReportTable(signer_of(0), capacity=4)
    table.living = {node_id(1), node_id(2), node_id(9)}
    table.put(report(0), 0.0)
    table.merge([row(1), row(2)], 0.0)
    for number in range(10, 30):
        table.merge([row(number)], float(number))
    assert {ME, node_id(1), node_id(2), node_id(29)} == set(table.ids())
    table.merge([row(9)], 30.0)
    table.merge([row(31)], 31.0)
    assert {ME, node_id(1), node_id(2), node_id(9)} == set(table.ids())
    table.living = {*table.living, node_id(5)}
    table.merge([row(5), row(2, seq=2)], 32.0)
    assert {ME, node_id(2), node_id(9), node_id(5)} == set(table.ids()), "the oldest of the living"


def test_age_travels_with_the_report():
    first, second = ReportTable(signer_of(1)), ReportTable(signer_of(2))
    first.put(report(1), 100.0)
    (sent,) = told(first, 103.0)
    assert sent.age_s == pytest.approx(3.0)
    second.merge([sent], 1000.0)
    got = second.get(node_id(1), 1002.0)
    assert got is not None
    assert got[1] == pytest.approx(5.0)
    assert second.get(node_id(7), 0.0) is None


def test_outgoing_is_bounded_and_starts_with_my_own():
    table = ReportTable(signer_of(0))
    table.put(report(0), 0.0)
    table.merge([row(number) for number in range(1, 50)], 0.0)
    sent = table.outgoing(0.0, limit=8)
    assert len(sent) == 8
    assert sent[0][0] == ME
    assert [node for node, _ in table.outgoing(0.0, limit=1)] == [ME]


def test_changes_go_first_and_everything_gets_around():
    table = ReportTable(signer_of(0))
    table.put(report(0), 0.0)
    table.merge([row(number) for number in range(1, 50)], 0.0)
    seen: set[str] = set()
    for turn in range(12):
        table.merge([row(49, seq=2 + turn)], 0.0)
        sent = [node for node, _ in table.outgoing(0.0, limit=8)]
        assert sent[1] == node_id(49)
        seen.update(sent)
    assert len(seen) == 50


def test_drop_forgets():
    table = ReportTable(signer_of(0))
    table.merge([row(1), row(2)], 0.0)
    table.drop([node_id(1), node_id(9)])
    assert table.ids() == [node_id(2)]


def test_a_full_table_forgets_the_one_silent_longest_but_never_me():
    table = ReportTable(signer_of(0), capacity=3)
    table.put(report(0), 0.0)
    table.merge([row(1)], 2.0)
    table.merge([row(2)], 1.0)
    table.merge([row(3)], 3.0)
    assert set(table.ids()) == {ME, node_id(1), node_id(3)}
    assert len(table) == 3


def test_period_grows_with_the_swarm():
    assert [period_s(n) for n in (1, 6, 24, 120)] == [1.0, 1.0, 4.0, 20.0]


def simulate(nodes: int, rounds: int, seed: int) -> list[float]:
    """Gossip with reports renewed each period; the oldest report of each node's table, in periods."""
    rng = random.Random(seed)
    tables = [ReportTable(signer_of(number)) for number in range(nodes)]
    for now in range(rounds):
        for number, table in enumerate(tables):
            table.put(report(number, seq=now), float(now))
        for number in rng.sample(range(nodes), nodes):
            for partner in rng.sample([other for other in range(nodes) if other != number], FAN_OUT):
                mine = told(tables[number], float(now))
                theirs = told(tables[partner], float(now))
                tables[partner].merge(mine, float(now))
                tables[number].merge(theirs, float(now))
    ages = []
    for table in tables:
        found = [table.get(node_id(number), float(rounds)) for number in range(nodes)]
        ages.append(max(math.inf if got is None else rounds - got[0].seq for got in found))
    return ages


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_32_nodes_are_all_fresh_within_3_log_n_periods(seed):
    bound = 3 * math.ceil(math.log2(32))
    assert max(simulate(32, bound, seed)) <= bound
    assert max(simulate(32, 2 * bound, seed)) <= bound


@pytest.mark.slow
def test_more_nodes_than_a_message_holds_stay_fresh_too():
    bound = 3 * math.ceil(math.log2(80))
    assert max(simulate(80, 2 * bound, seed=1)) <= bound


def decoded(value: object) -> list[PeerReport]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=list[PeerReport])


def plain(**changes) -> list[object]:
    fields = dict(zip(PeerReport.__struct_fields__, msgspec.to_builtins(report(1)), strict=True))
    return [list({**fields, **changes}.values())]


@pytest.mark.parametrize(
    ("told", "at_work"),
    [
        ({"updates": 3}, True),
        ({"updates": 0, "steps_per_s": 9.0}, False),
        ({"trains": False, "updates": 3}, False),
        ({"trains": False, "stage": "2/3"}, True),
        ({"trains": False, "steps_per_s": 9.0}, True),
        ({"trains": False, "steps_per_s": 9.0, "state": "paused"}, False),
    ],
)
def test_who_is_at_work(told, at_work):
    assert report(1, **{"state": "training"} | told).at_work is at_work


def test_wire_round_trip():
    reports = [report(1, name="n", mean_return=-3.5, consensus_distance=0.25, reasons=("a", "b"))]
    assert decoded(reports) == reports


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "x"},
        {"boot": -1},
        {"seq": "1"},
        {"seq": 2**53},
        {"name": "n" * 65},
        {"steps_per_s": math.nan},
        {"reasons": ["r" * 201]},
        {"reasons": ["r"] * 6},
    ],
)
def test_reports_out_of_bounds_are_not_decoded(changes):
    with pytest.raises(msgspec.ValidationError):
        decoded(plain(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean_return", math.nan),
        ("mean_return", -math.inf),
        ("steps_per_s", math.inf),
        ("consensus_distance", math.inf),
        ("loop_lag_s", math.inf),
    ],
)
def test_numbers_that_are_not_finite_are_refused_and_nothing_is_taken_in(name, value):
    table = ReportTable(signer_of(0))
    with pytest.raises(WireError, match=name):
        table.merge([row(2), row(1, **{name: value})], 0.0)
    with pytest.raises(WireError, match="age_s"):
        table.merge([row(2), row(1, age_s=math.inf)], 0.0)
    assert len(table) == 0


def test_numbers_of_my_own_that_are_not_finite_are_told_as_unknown():
    table = ReportTable(signer_of(0))
    table.put(report(0, mean_return=math.nan, steps_per_s=math.inf, consensus_distance=2.0), 0.0)
    ((_, told),) = table.outgoing(0.0)
    sent = msgspec.msgpack.decode(told.fact.body, type=PeerReport)
    assert (sent.mean_return, sent.steps_per_s, sent.consensus_distance) == (None, 0.0, 2.0)


def test_a_report_is_taken_in_as_its_node_signed_it_and_no_otherwise():
    mine, other = Identity(b"1" * 32), Identity(b"2" * 32)
    signer = FactSigner(mine, "swarm")
    table = ReportTable(signer)
    body = msgspec.msgpack.encode(PeerReport(id=other.node_id, boot=1, seq=1))
    elsewhere = FactSigner(other, "another swarm").sign("report", "", body)
    in_anothers_name = signer.sign("report", "", body)
    fact = FactSigner(other, "swarm").sign("report", "", body)
    changed = msgspec.msgpack.encode(PeerReport(id=other.node_id, boot=1, seq=1, mean_return=1e9))
    for wrong in (elsewhere, in_anothers_name, SignedFact(fact.public_key, changed, fact.signature)):
        with pytest.raises(ForgedFactError):
            table.merge([ReportRow(0.0, wrong)], 0.0)
    assert (len(table), signer.forged) == (0, 3)
    assert table.merge([ReportRow(0.0, fact)], 0.0) == [other.node_id]
    assert table.outgoing(0.0) == [(other.node_id, ReportRow(0.0, fact))]


def test_fields_of_newer_nodes_are_passed_over():
    assert decoded(plain(later="x")) == [report(1)]
