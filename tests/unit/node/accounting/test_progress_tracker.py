from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.node.accounting import progress_tracker as ledger_module
from p2pdrl.node.accounting.counters import Counts, CountsWire, NodeCounts
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

A, B = "a" * 32, "b" * 32
NODES = [f"{number:032x}" for number in range(3)]
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
        self.ledgers = [ProgressTracker(node, 10) for node in NODES]
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
        self.ledgers[node] = ProgressTracker(NODES[node], self.boots[node])
        for _ in range(2 if twice else 1):
            self.ledgers[node].merge_counts(saved)
        self.ledgers[node].follow(self.lineages[node])


def over_the_wire(progress_tracker: ProgressTracker) -> dict[str, CountsWire]:
    return msgspec.msgpack.decode(
        msgspec.msgpack.encode(progress_tracker.counts()), type=dict[str, CountsWire]
    )


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
    progress_tracker = ProgressTracker(A, 1)
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
    progress_tracker = ProgressTracker(A, 1)
    assert progress_tracker.steps("l7") == 0
    assert progress_tracker.total() == progress_tracker.of_node(A) == Counts()


def test_lineages_are_bounded():
    progress_tracker = ProgressTracker(A, 1)
    progress_tracker.follow("mine")
    progress_tracker.credit(Counts(5))
    other = ProgressTracker(B, 1)
    for number in range(ledger_module.MAX_LINEAGES + 20):
        other.follow(f"{number}")
        other.credit(Counts(number + 1))
    progress_tracker.merge_counts(other.counts())
    assert len(progress_tracker.counts()) == ledger_module.MAX_LINEAGES
    assert progress_tracker.steps("mine") == 5


def test_a_full_table_of_lineages_keeps_the_greatest_and_our_own():
    progress_tracker = ProgressTracker(A, 1)
    for lineage, total in (("before", 1), ("mine", 3)):
        progress_tracker.follow(lineage)
        progress_tracker.credit(Counts(total))
    liar, honest = ProgressTracker(B, 1), ProgressTracker("c" * 32, 1)
    done = 0
    for number in range(ledger_module.MAX_LINEAGES):
        done += 10 + number
        liar.follow(f"{number:02}")
        liar.credit(Counts(done))
    progress_tracker.merge_counts(liar.counts())
    progress_tracker.merge_counts(liar.counts())
    honest.follow("greater")
    honest.credit(Counts(1000))
    progress_tracker.merge_counts(honest.counts())
    assert (
        progress_tracker.steps("before"),
        progress_tracker.steps("mine"),
        progress_tracker.steps("greater"),
    ) == (1, 2, 1000)
    assert len(progress_tracker.counts()) == ledger_module.MAX_LINEAGES
    # The rest are the 61 greatest: the newcomer took the place of the least.
    assert (
        min(steps for name in progress_tracker.counts() if (steps := progress_tracker.steps(name)) > 2) == 13
    )


def test_empty_lineages_are_neither_told_nor_taken_in():
    progress_tracker = ProgressTracker(A, 1)
    progress_tracker.merge_counts({f"{number}": CountsWire() for number in range(100)})
    progress_tracker.merge_counts(
        over_the_wire(progress_tracker) | {"l": CountsWire((NodeCounts(B, Counts(), 0, ()),))}
    )
    progress_tracker.follow("mine")
    assert progress_tracker.counts() == {}


def test_counts_of_the_far_future_arent_taken_in():
    progress_tracker, other = ProgressTracker(A, 1), ProgressTracker(B, 5000)
    other.follow("l0")
    other.credit(Counts(9))
    progress_tracker.merge_counts(other.counts(), latest_boot=4999)
    assert progress_tracker.total().env_steps == 0
    progress_tracker.merge_counts(other.counts(), latest_boot=5000)
    assert progress_tracker.total().env_steps == 9


def test_what_others_say_of_this_boot_is_ignored():
    progress_tracker, liar = ProgressTracker(A, 3), ProgressTracker(A, 3)
    progress_tracker.follow("l0")
    progress_tracker.credit(Counts(10))
    liar.follow("l0")
    liar.credit(Counts(10**9))
    progress_tracker.merge_counts(liar.counts())
    assert progress_tracker.total().env_steps == 10


def moments(count: float, mean: float = 0.0, size: int = 2) -> Moments:
    return Moments(count, np.full(size, mean), np.ones(size))


def packed(one: Moments) -> bytes:
    return msgspec.msgpack.encode(one.to_wire())


def swap(asks: ProgressTracker, gives: ProgressTracker) -> int:
    """What a round of gossip does about moments."""
    digest = msgspec.msgpack.decode(msgspec.msgpack.encode(asks.moments_digest()))
    entries = msgspec.msgpack.decode(msgspec.msgpack.encode(gives.moments_since(digest)))
    return asks.merge_moments(entries)


def swap_all(asks: ProgressTracker, gives: ProgressTracker) -> int:
    asks.merge_counts(over_the_wire(gives))
    return swap(asks, gives)


def worked(node: str, steps: int, boot: int = 1, **fields) -> ProgressTracker:
    """A step accounting of a node that has made steps and counted as many samples."""
    made = ProgressTracker(node, boot)
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
    """A learner counts samples of other nodes' actors: the bound is what the whole swarm has made."""
    one, two = worked(A, 10), worked(B, 30)
    assert swap(one, two) == 0
    assert swap_all(one, two) == 1
    two.put_moments({"obs": packed(moments(81))})
    assert swap_all(one, two) == 0
    two.credit(Counts(31))
    assert swap_all(one, two) == 1


@pytest.mark.parametrize("mean", [1.1e6, -1e99])
def test_absurd_moments_are_put_aside(mean):
    one = worked(A, 10)
    assert swap_all(one, worked(B, 30, mean=mean)) == 0
    assert others_of(one).count == 0


def test_moments_of_the_far_future_or_of_our_own_boot_arent_taken_in():
    one, two = worked(A, 10, boot=5), worked(B, 30, boot=9)
    one.merge_counts(over_the_wire(two))
    rows = [[B, 9, moments(30).to_wire()], [A, 5, moments(15).to_wire()], [A, 6, moments(15).to_wire()]]
    assert one.merge_moments({"obs": rows}, latest_boot=8) == 0
    assert one.merge_moments({"obs": rows}, latest_boot=9) == 1
    assert others_of(one).count == 30


def test_streams_that_this_node_doesnt_have_are_passed_over():
    one, two = ProgressTracker(A, 1), worked(B, 3)
    assert swap_all(one, two) == 0
    assert one.moments_digest() == {}


def test_streams_of_the_learner_are_open_before_its_first_report():
    def of_stream(name: str, shape: tuple[int, ...]) -> list[SidecarItem]:
        parts = (("count", ()), ("mean", shape), ("m2", shape))
        return [SidecarItem(f"{name}.{part}", size, "float64", "moments") for part, size in parts]

    one, two = ProgressTracker(A, 1), worked(B, 3)
    adam = SidecarItem("adam.mean", (9,))
    one.open_streams(SidecarLayout((adam, *of_stream("obs", (2,)), *of_stream("returns", ()))))
    assert set(one.moments_digest()) == {"obs", "returns"}
    assert swap_all(one, two) == 1
    assert others_of(one).count == 3
    one.open_streams(SidecarLayout(tuple(of_stream("obs", (2,)))))
    assert others_of(one).count == 3


def test_moments_come_back_from_a_checkpoint():
    one = ProgressTracker(A, 1)
    one.put_moments({"obs": packed(moments(10, 1.0)), "returns": packed(moments(4, size=1))})
    heir = ProgressTracker(A, 2)
    heir.restore_moments(msgspec.msgpack.decode(msgspec.msgpack.encode(one.moments_since({}))))
    assert others_of(heir).count == 10.0
    assert set(heir.moments_digest()) == {"obs", "returns"}


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1, 2])])
def test_unreadable_moments_are_a_wire_error(data):
    with pytest.raises(WireError):
        ProgressTracker(A, 1).put_moments({"obs": data})


@pytest.mark.parametrize("rows", [[[A, 1]], [7], [[A, 1, "moments"]]])
def test_unreadable_moments_of_a_checkpoint_are_a_wire_error(rows):
    with pytest.raises(WireError):
        ProgressTracker(A, 1).restore_moments({"obs": rows})


def test_streams_are_bounded():
    progress_tracker = ProgressTracker(A, 1)
    many = {f"s{number}": packed(moments(1)) for number in range(ledger_module.MAX_STREAMS)}
    progress_tracker.put_moments(many)
    with pytest.raises(WireError, match="streams"):
        progress_tracker.put_moments({"one more": packed(moments(1))})
