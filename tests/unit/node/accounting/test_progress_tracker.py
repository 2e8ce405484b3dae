from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.membership.identity import Identity
from p2pdrl.node.accounting import progress_tracker as ledger_module
from p2pdrl.node.accounting.claims import ClaimBounds
from p2pdrl.node.accounting.counters import MAX_ENTRIES, Counts, NodeCounts
from p2pdrl.node.accounting.facts import FactSigner, ForgedFactError, SignedFact
from p2pdrl.node.accounting.progress_tracker import LineageFacts, LineageRank, ProgressTracker
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

from ..signing import counted, node_id, tracker_of

NODES = [node_id(number) for number in range(3)]
A, B, C = 10, 11, 12
who = st.integers(0, 2)
operations = st.one_of(
    st.tuples(st.just("work"), who, st.integers(1, 50)),
    st.tuples(st.just("follow"), who, st.integers(0, 3)),
    st.tuples(st.just("tell"), who, who),
    st.tuples(st.just("restart"), who, st.booleans()),
    st.tuples(st.just("fold"), who, st.none()),
)


class World:
    """Three nodes, and what they really did."""

    def __init__(self) -> None:
        self.boots = [10, 10, 10]
        self.ledgers = [tracker_of(number, 10) for number in range(3)]
        self.this_boot = [0, 0, 0]
        self.done = [0, 0, 0]
        self.lineages = ["l0", "l0", "l0"]
        for progress_tracker in self.ledgers:
            progress_tracker.follow("l0")

    def do(self, what: str, node: int, value) -> None:
        progress_tracker = self.ledgers[node]
        if what == "work":
            self.this_boot[node] += value
            self.done[node] += value
            progress_tracker.credit(
                Counts(self.this_boot[node], 2 * self.this_boot[node], self.this_boot[node])
            )
        elif what == "follow":
            self.lineages[node] = f"l{value}"
            progress_tracker.follow(self.lineages[node])
        elif what == "tell":
            self.ledgers[value].merge_counts(over_the_wire(progress_tracker))
        elif what == "fold":
            progress_tracker.fold_own()
        else:
            self.restart(node, twice=value)

    def restart(self, node: int, *, twice: bool) -> None:
        """A daemon comes back on its checkpoint, and is told the same again by it."""
        saved = over_the_wire(self.ledgers[node])
        self.boots[node] += 1
        self.this_boot[node] = 0
        self.ledgers[node] = tracker_of(node, self.boots[node])
        for _ in range(2 if twice else 1):
            self.ledgers[node].merge_counts(saved)
        self.ledgers[node].follow(self.lineages[node])


def over_the_wire(progress_tracker: ProgressTracker) -> LineageFacts:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(counted(progress_tracker)), type=LineageFacts)


@settings(max_examples=120, deadline=None)
@given(st.lists(operations, max_size=25))
def test_no_step_is_lost_or_counted_twice(steps):
    world = World()
    for step in steps:
        world.do(*step)
        for number, progress_tracker in enumerate(world.ledgers):
            assert progress_tracker.of_node(NODES[number]).env_steps == world.done[number]
            assert progress_tracker.total().env_steps <= sum(world.done)
            lineages = sum(progress_tracker.steps(f"l{lineage}") for lineage in range(4))
            assert lineages == progress_tracker.total().env_steps
    for progress_tracker in world.ledgers:
        for other in world.ledgers:
            progress_tracker.merge_counts(over_the_wire(other))
    totals = {progress_tracker.total() for progress_tracker in world.ledgers}
    assert totals == {Counts(sum(world.done), 2 * sum(world.done), sum(world.done))}


def test_back_to_an_earlier_lineage():
    progress_tracker = tracker_of(A, 1)
    progress_tracker.follow("l0")
    progress_tracker.credit(Counts(100))
    progress_tracker.follow("l1")
    progress_tracker.credit(Counts(150))
    progress_tracker.follow("l0")
    progress_tracker.credit(Counts(200))
    assert (progress_tracker.steps("l0"), progress_tracker.steps("l1")) == (150, 50)
    progress_tracker.follow("l0")
    progress_tracker.credit(Counts(201))
    assert progress_tracker.total() == Counts(201)


def test_unknown_lineages_have_no_steps():
    progress_tracker = tracker_of(A, 1)
    assert progress_tracker.steps("l7") == 0
    assert progress_tracker.total() == progress_tracker.of_node(node_id(A)) == Counts()


def test_lineages_are_bounded():
    progress_tracker = tracker_of(A, 1)
    progress_tracker.follow("mine")
    progress_tracker.credit(Counts(5))
    other = tracker_of(B, 1)
    for number in range(ledger_module.MAX_LINEAGES + 20):
        other.follow(f"{number}")
        other.credit(Counts(number + 1))
    progress_tracker.merge_counts(counted(other))
    assert len(counted(progress_tracker)) == ledger_module.MAX_LINEAGES
    assert progress_tracker.steps("mine") == 5


@pytest.mark.slow
def test_a_crowd_in_many_lineages_takes_no_more_room_than_in_one():
    """A member makes nodes up, of one step each; whoever really did much in another lineage is heard."""
    progress_tracker = tracker_of(A, 1)
    progress_tracker.follow("mine")
    body = msgspec.msgpack.encode(NodeCounts(Counts(1), 1))
    for number in range(4):
        crowd = [SignedFact(bytes([number]) + at.to_bytes(31), body, b"") for at in range(MAX_ENTRIES // 2)]
        for _ in range(2):
            progress_tracker.merge_counts({f"l{number}": crowd, "mine": crowd})
    held = counted(progress_tracker)
    assert sum(len(facts) for lineage, facts in held.items() if lineage != "mine") == MAX_ENTRIES
    assert len(held["mine"]) == MAX_ENTRIES
    honest = tracker_of(B, 1)
    honest.follow("l9")
    honest.credit(Counts(MAX_ENTRIES))
    progress_tracker.merge_counts(counted(honest))
    assert progress_tracker.steps("l9") == MAX_ENTRIES


def test_nodes_that_a_member_made_up_leave_room_for_those_that_are_there(monkeypatch):
    monkeypatch.setattr(FactSigner, "check", lambda *_: None)
    progress_tracker, liar, honest = tracker_of(A, 1), tracker_of(B, 1), tracker_of(C, 1)
    progress_tracker.bounds = ClaimBounds(node_id(A), 1e6)
    progress_tracker.bounds.look([node_id(B), node_id(C)], 0.0)
    progress_tracker.follow("mine")
    body = msgspec.msgpack.encode(NodeCounts(Counts(1), 1))
    crowd = [SignedFact(b"\x01" + at.to_bytes(31), body, b"") for at in range(MAX_ENTRIES)]
    progress_tracker.merge_counts({"mine": crowd}, teller=node_id(B), now_s=1.0)
    assert len(counted(progress_tracker)["mine"]) == MAX_ENTRIES // 2
    for there, steps in ((honest, 7), (liar, 8)):
        there.follow("mine")
        there.credit(Counts(steps))
        progress_tracker.merge_counts(counted(there), teller=node_id(B), now_s=1.0)
    assert progress_tracker.steps("mine") == MAX_ENTRIES // 2 + 15


def test_a_full_table_of_lineages_keeps_the_greatest_and_our_own():
    progress_tracker = tracker_of(A, 1)
    for lineage, total in (("before", 1), ("mine", 3)):
        progress_tracker.follow(lineage)
        progress_tracker.credit(Counts(total))
    liar, honest = tracker_of(B, 1), tracker_of(C, 1)
    done = 0
    for number in range(ledger_module.MAX_LINEAGES):
        done += 10 + number
        liar.follow(f"{number:02}")
        liar.credit(Counts(done))
    progress_tracker.merge_counts(counted(liar))
    progress_tracker.merge_counts(counted(liar))
    honest.follow("greater")
    honest.credit(Counts(1000))
    progress_tracker.merge_counts(counted(honest))
    assert (
        progress_tracker.steps("before"),
        progress_tracker.steps("mine"),
        progress_tracker.steps("greater"),
    ) == (1, 2, 1000)
    assert len(counted(progress_tracker)) == ledger_module.MAX_LINEAGES
    # The rest are the 61 greatest: the newcomer took the place of the least.
    assert (
        min(steps for name in counted(progress_tracker) if (steps := progress_tracker.steps(name)) > 2) == 13
    )


def test_empty_lineages_are_neither_told_nor_taken_in():
    progress_tracker, other = tracker_of(A), tracker_of(B)
    nothing = other.signer.sign("counts", "l", msgspec.msgpack.encode(NodeCounts()))
    progress_tracker.merge_counts({f"{number}": [] for number in range(100)} | {"l": [nothing]})
    progress_tracker.follow("mine")
    assert counted(progress_tracker) == {}


def test_counts_of_the_far_future_arent_taken_in():
    progress_tracker, other = tracker_of(A, 1), tracker_of(B, 5000)
    other.follow("l0")
    other.credit(Counts(9))
    progress_tracker.merge_counts(counted(other), latest_boot=4999)
    assert progress_tracker.total().env_steps == 0
    progress_tracker.merge_counts(counted(other), latest_boot=5000)
    assert progress_tracker.total().env_steps == 9


def test_what_others_say_of_this_boot_is_ignored():
    progress_tracker, liar = tracker_of(A, 3), tracker_of(A, 3)
    progress_tracker.follow("l0")
    progress_tracker.credit(Counts(10))
    liar.follow("l0")
    liar.credit(Counts(10**9))
    progress_tracker.merge_counts(counted(liar))
    assert progress_tracker.total().env_steps == 10


def moments(count: float, mean: float = 0.0, size: int = 2) -> Moments:
    return Moments(count, np.full(size, mean), np.ones(size))


def packed(one: Moments) -> bytes:
    return msgspec.msgpack.encode(one.to_wire())


def swap(asks: ProgressTracker, gives: ProgressTracker) -> int:
    """What a round of gossip does about moments."""
    gives.sign()
    digest = msgspec.msgpack.decode(msgspec.msgpack.encode(asks.moments_digest()))
    entries = msgspec.msgpack.decode(msgspec.msgpack.encode(gives.moments_since(digest)))
    return asks.merge_moments(entries)


def swap_all(asks: ProgressTracker, gives: ProgressTracker) -> int:
    asks.merge_counts(over_the_wire(gives))
    return swap(asks, gives)


def worked(node: int, steps: int, boot: int = 1, **fields) -> ProgressTracker:
    """A step accounting of a node that has made steps and counted as many samples."""
    made = tracker_of(node, boot)
    made.follow("l0")
    made.credit(Counts(steps))
    made.put_moments({"obs": packed(moments(steps, **fields))})
    return made


def others_of(progress_tracker: ProgressTracker) -> Moments:
    return Moments.from_wire(msgspec.msgpack.decode(progress_tracker.others_moments()["obs"]))


def test_moments_of_the_others():
    one, two = worked(A, 10, mean=1.0), worked(B, 30, mean=5.0)
    assert swap_all(one, two) == 1
    assert swap_all(one, two) == 0
    assert (others_of(one).count, others_of(one).mean.tolist()) == (30.0, [5.0, 5.0])
    two.put_moments({"obs": packed(moments(40, 5.0))})
    assert swap_all(one, two) == 1
    assert others_of(one).count == 40.0


def test_moments_wait_until_the_steps_behind_them_are_known():
    one, two = worked(A, 10), worked(B, 30)
    assert swap(one, two) == 0
    assert swap_all(one, two) == 1
    two.put_moments({"obs": packed(moments(61))})
    assert swap_all(one, two) == 0
    two.credit(Counts(31))
    assert swap_all(one, two) == 1


def test_a_learner_counts_samples_of_steps_that_nobody_else_has_counted():
    """In a pipeline the first rank sees what the actors of all ranks make, and those count the steps."""
    one, rank0, rank1 = worked(A, 10), worked(B, 5), tracker_of(C)
    rank1.follow("l0")
    rank1.credit(Counts(100))
    rank0.put_moments({"obs": packed(moments(105))})
    assert swap_all(one, rank0) == 0
    one.merge_counts(counted(rank1))
    assert swap_all(one, rank0) == 1
    rank0.put_moments({"obs": packed(moments(211))})
    assert swap(one, rank0) == 0


def test_what_others_counted_themselves_isnt_left_for_a_liar_of_the_same_message():
    one, honest, liar, carrier = worked(A, 1), worked(B, 1000), worked(C, 10), worked(13, 1)
    liar.put_moments({"obs": packed(moments(500, mean=1e6))})
    for teller in (honest, liar):
        carrier.merge_counts(counted(teller))
        swap(carrier, teller)
    one.merge_counts(counted(carrier))
    one.merge_counts(counted(honest))
    one.merge_counts(counted(liar))
    honest.sign()
    liar.sign()
    rows = [*liar.moments_since({})["obs"], *honest.moments_since({})["obs"]]
    assert one.merge_moments({"obs": rows}) == 1
    assert others_of(one).count == 1000


@pytest.mark.parametrize("mean", [1.1e6, -1e99])
def test_absurd_moments_are_put_aside(mean):
    one = worked(A, 10)
    assert swap_all(one, worked(B, 30, mean=mean)) == 0
    assert others_of(one).count == 0


def test_moments_of_the_far_future_or_of_our_own_boot_arent_taken_in():
    one, two, twin = worked(A, 10, boot=5), worked(B, 30, boot=9), worked(A, 15, boot=6)
    one.merge_counts(over_the_wire(two))
    two.sign()
    twin.sign()
    rows = [*two.moments_since({})["obs"], *twin.moments_since({})["obs"]]
    assert one.merge_moments({"obs": rows}, latest_boot=8) == 0
    assert one.merge_moments({"obs": rows}, latest_boot=9) == 1
    assert others_of(one).count == 30


def test_streams_that_this_node_doesnt_have_are_passed_over():
    one, two = tracker_of(A, 1), worked(B, 3)
    assert swap_all(one, two) == 0
    assert one.moments_digest() == {}


def test_streams_of_the_learner_are_open_before_its_first_report():
    def of_stream(name: str, shape: tuple[int, ...]) -> list[SidecarItem]:
        parts = (("count", ()), ("mean", shape), ("m2", shape))
        return [SidecarItem(f"{name}.{part}", size, "float64", "moments") for part, size in parts]

    one, two = tracker_of(A, 1), worked(B, 3)
    adam = SidecarItem("adam.mean", (9,))
    one.open_streams(SidecarLayout((adam, *of_stream("obs", (2,)), *of_stream("returns", ()))))
    assert set(one.moments_digest()) == {"obs", "returns"}
    assert swap_all(one, two) == 1
    assert others_of(one).count == 3
    one.open_streams(SidecarLayout(tuple(of_stream("obs", (2,)))))
    assert others_of(one).count == 3


def test_moments_come_back_from_a_checkpoint():
    one = tracker_of(A, 1)
    one.put_moments({"obs": packed(moments(10, 1.0)), "returns": packed(moments(4, size=1))})
    one.sign()
    heir = tracker_of(A, 2)
    heir.restore_moments(msgspec.msgpack.decode(msgspec.msgpack.encode(one.moments_since({}))))
    assert others_of(heir).count == 10.0
    assert set(heir.moments_digest()) == {"obs", "returns"}


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1, 2])])
def test_unreadable_moments_are_a_wire_error(data):
    with pytest.raises(WireError):
        tracker_of(A, 1).put_moments({"obs": data})


@pytest.mark.parametrize("rows", [[["a" * 32, 1]], [7], [["a" * 32, 1, "moments"]]])
def test_unreadable_moments_of_a_checkpoint_are_a_wire_error(rows):
    with pytest.raises(WireError):
        tracker_of(A, 1).restore_moments({"obs": rows})


def test_streams_are_bounded():
    progress_tracker = tracker_of(A, 1)
    many = {f"s{number}": packed(moments(1)) for number in range(ledger_module.MAX_STREAMS)}
    progress_tracker.put_moments(many)
    with pytest.raises(WireError, match="streams"):
        progress_tracker.put_moments({"one more": packed(moments(1))})


REAL = [Identity(bytes([number]) * 32) for number in (1, 2)]


def real(number: int, swarm: str = "swarm", boot: int = 1) -> ProgressTracker:
    return ProgressTracker(FactSigner(REAL[number], swarm), boot)


def test_a_row_is_taken_in_as_its_node_signed_it_and_no_otherwise():
    one, two = real(0), real(1)
    two.follow("l0")
    two.credit(Counts(50))
    ((fact,),) = counted(two).values()
    changed = msgspec.msgpack.encode(NodeCounts(boots=((1, Counts(10**9)),)))
    forged = [
        SignedFact(fact.public_key, changed, fact.signature),
        SignedFact(REAL[0].public_key, fact.body, fact.signature),
        SignedFact(bytes(32), fact.body, fact.signature),
        SignedFact(fact.public_key, fact.body, b""),
        real(1, "another swarm").signer.sign("counts", "l0", fact.body),
        two.signer.sign("report", "", fact.body),
        two.signer.sign("counts", "l1", fact.body),
    ]
    for number, wrong in enumerate(forged, 1):
        with pytest.raises(ForgedFactError):
            one.merge_counts({"l0": [wrong]}, teller=REAL[1].node_id)
        assert one.signer.forged == number
        assert one.total() == Counts()
    for _ in range(3):
        one.merge_counts({"l0": [fact]})
    assert one.total() == Counts(50)
    assert one.counts() == {"l0": [fact]}


def test_an_old_row_that_comes_again_changes_nothing_and_isnt_even_checked():
    one, two = real(0), real(1)
    two.follow("l0")
    two.credit(Counts(50))
    old = counted(two)
    two.credit(Counts(60))
    one.merge_counts(counted(two))
    one.merge_counts(old)
    assert one.total() == Counts(60)
    (fact,) = old["l0"]
    one.merge_counts({"l0": [SignedFact(fact.public_key, fact.body, b"x" * 64)]})
    assert one.signer.forged == 0


def test_what_a_node_said_before_it_died_comes_back_to_it():
    before, peer = real(0), real(1)
    before.follow("l0")
    before.credit(Counts(30))
    saved = counted(before)
    before.credit(Counts(100))
    peer.merge_counts(counted(before))
    back = real(0, boot=2)
    back.merge_counts(saved)
    back.follow("l0")
    back.credit(Counts(7))
    peer.merge_counts(counted(back))
    assert peer.of_node(REAL[0].node_id) == Counts(107)
    back.merge_counts(peer.counts(), teller=REAL[1].node_id)
    back.fold_own()
    assert back.total() == Counts(107)
    peer.merge_counts(counted(back))
    assert (peer.total(), len(peer.counts()["l0"])) == (Counts(107), 1)


def test_moments_are_taken_in_as_their_node_signed_them():
    one, two = real(0), real(1)
    for tracker in (one, two):
        tracker.follow("l0")
        tracker.credit(Counts(10))
        tracker.put_moments({"obs": packed(moments(10))})
    one.merge_counts(counted(two))
    ((row,),) = two.moments_since({}).values()
    node, boot, wire, proof = row
    for wrong in (
        [node, boot, moments(10, 99.0).to_wire(), proof],
        [node, boot + 1, wire, proof],
        [REAL[0].node_id, 0, wire, proof],
        [node, boot, wire, b""],
        [node, boot, wire, bytes(96)],
    ):
        with pytest.raises(ForgedFactError):
            one.merge_moments({"obs": [wrong]})
    assert one.signer.forged == 5
    assert one.merge_moments({"obs": [row]}) == 1


def test_a_rank_is_the_word_of_several_living_members_then_steps_then_the_lower_id():
    tracker = tracker_of(A)
    for number, (lineage, steps) in enumerate(
        [("l0", 100), ("l0", 5), ("l1", 10**9), ("l2", 100), ("l2", 4)]
    ):
        other = tracker_of(20 + number)
        other.follow(lineage)
        other.credit(Counts(steps))
        tracker.merge_counts(counted(other))
    everybody = [node_id(20 + number) for number in range(5)]
    ranks = [tracker.rank(lineage, everybody) for lineage in ("l0", "l1", "l2", "l3")]
    assert [rank.several for rank in ranks] == [True, False, False, False]
    assert [rank.lineage for rank in sorted(ranks)] == ["l3", "l2", "l1", "l0"]
    assert not tracker.rank("l0", everybody[:1]).several
    assert LineageRank(True, 5, "a") > LineageRank(True, 5, "b")
    assert max(ranks).lineage == "l0"
