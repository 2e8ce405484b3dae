"""Plans of who serves what, from a view's notes."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.group.rendezvous import ranked
from p2pdrl.strategies.servers.shard_plan import (
    NOTE_BYTES,
    Claim,
    Holder,
    ServerNote,
    ShardSpan,
    cut,
    make_plan,
    pieces,
    read_note,
)

SIZE = 100
IDS = [f"{number:032x}" for number in range(5)]


def note(**changes) -> ServerNote:
    return msgspec.structs.replace(ServerNote(lineage="aa", steps=50, policy=7), **changes)


def held(version: int, *claims: Claim, branch: str = "1/a", progress: int = 100, **changes) -> ServerNote:
    return note(copy=version, claims=claims, branch=branch, progress=progress, **changes)


def plan_of(notes: dict[str, ServerNote], servers: int = 2):
    return make_plan("seed", sorted(notes), notes, servers, SIZE)


@given(st.integers(1, 500), st.integers(1, 40))
def test_a_cut_covers_everything_evenly(size, count):
    count = min(size, count)
    spans = cut(size, count)
    assert spans[0].start == 0
    assert spans[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    sizes = {span.size for span in spans}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0


def test_the_first_in_rendezvous_order_serve_and_begin_from_the_mean():
    notes = {peer: note() for peer in IDS}
    plan = plan_of(notes)
    order = ranked("seed", IDS)
    assert plan.servers == tuple(order[:2])
    assert plan.successors == (order[2], order[2])
    assert plan.seed
    assert plan.givers == tuple(IDS)
    assert plan.version == 7
    assert plan.shard_of(order[1]) == 1
    assert plan.shard_of(order[2]) is None


def test_pinned_nodes_come_first_and_rendezvous_fills_up():
    order = ranked("seed", IDS)
    last = order[-1]
    plan = plan_of({peer: note(pin=0 if peer == last else -1) for peer in IDS}, servers=3)
    assert plan.servers == (last, order[0], order[1])
    both = {peer: note() for peer in IDS}
    both[order[4]], both[order[2]] = note(pin=1), note(pin=0)
    assert plan_of(both).servers == (order[2], order[4])


def test_fewer_members_than_servers():
    plan = plan_of({IDS[0]: note()}, servers=4)
    assert plan.servers == (IDS[0],)
    assert plan.successors == (IDS[0],)
    assert plan.spans == (ShardSpan(0, SIZE),)


def test_when_all_serve_the_next_keeps_the_copy():
    plan = plan_of({peer: note() for peer in IDS[:3]}, servers=3)
    order = ranked("seed", IDS[:3])
    assert plan.successors == (order[1], order[2], order[0])


def test_who_holds_a_shard_keeps_it_when_another_server_dies():
    order = ranked("seed", IDS)
    notes = {peer: held(20) for peer in order[1:]}
    notes[order[1]] = held(20, Claim(50, 100, 20, live=True))
    plan = plan_of(notes)
    assert plan.servers == (order[2], order[1])
    assert not plan.seed
    assert plan.version == 20


def test_pieces_come_from_the_highest_version_and_from_ourselves_first():
    me, other, keeper = IDS[:3]
    notes = {
        me: held(20, Claim(0, 50, 21, live=True)),
        other: held(21),
        keeper: held(19, Claim(50, 100, 15, live=False)),
    }
    plan = plan_of(notes, servers=1)
    assert plan.version == 21
    first, second = pieces(ShardSpan(0, 100), me, plan, notes)
    assert first.span == ShardSpan(0, 50)
    assert first.holders[0] == Holder(me, 21, state=True)
    assert first.holders[1] == Holder(other, 21, state=False)
    assert second.span == ShardSpan(50, 100)
    assert [holder.peer for holder in second.holders] == [other, me, keeper, keeper]
    assert second.holders[-1] == Holder(keeper, 15, state=True)


def test_only_one_branch_gives():
    notes = {
        IDS[0]: held(90, branch="3/x", progress=500),
        IDS[1]: held(60, branch="3/y", progress=900),
        IDS[2]: held(61, branch="3/y", progress=900),
        IDS[3]: note(),
    }
    plan = plan_of(notes)
    assert plan.holders == (IDS[1], IDS[2])
    assert plan.version == 61
    assert plan.progress == 900
    assert plan.givers == tuple(IDS[:4])


def test_the_lineage_with_more_steps_stays():
    notes = {
        IDS[0]: held(90, lineage="bb", steps=10),
        IDS[1]: note(lineage="aa", steps=20),
        IDS[2]: note(lineage="cc", steps=20),
        IDS[3]: ServerNote(),
    }
    plan = plan_of(notes)
    assert (plan.lineage, plan.givers, plan.donor) == ("aa", (IDS[1],), IDS[1])
    assert plan.seed


def test_nobody_has_parameters():
    plan = plan_of({peer: ServerNote() for peer in IDS})
    assert plan.seed
    assert (plan.givers, plan.holders, plan.lineage) == ((), (), "")


def test_all_members_make_the_same_plan_in_any_order():
    rng = np.random.default_rng(0)
    notes = {peer: held(int(rng.integers(5, 9)), branch=f"1/{index % 2}") for index, peer in enumerate(IDS)}
    shuffled = {peer: notes[peer] for peer in rng.permutation(IDS)}
    assert plan_of(notes) == plan_of(shuffled)


def test_a_note_fits_whatever_it_claims():
    claims = tuple(Claim(2**40, 2**41, 2**50, live=True) for _ in range(9))
    long = ServerNote(
        lineage="ä" * 40,
        steps=2**52,
        policy=2**52,
        copy=2**52,
        branch="9" * 64,
        progress=2**52,
        claims=claims,
    )
    assert len(long.encode()) <= NOTE_BYTES
    usual = held(2**40, *claims[:4], lineage="a" * 16, branch=f"{2**30}/{'f' * 12}")
    assert len(read_note(usual.encode(), 2**42).claims) == 4


@pytest.mark.parametrize("data", [None, b"", b"\xc1", b"\x91\x01", b"x" * 300])
def test_a_note_that_cannot_be_read_claims_nothing(data):
    assert read_note(data, SIZE) == ServerNote()


def test_impossible_claims_are_dropped():
    good = Claim(0, 10, 1, live=True)
    bad = (Claim(5, 5, 1, live=True), Claim(0, SIZE + 1, 1, live=True), good)
    assert read_note(held(3, *bad).encode(), SIZE).claims == (good,)
