"""Unrolls through shared memory: order, back-pressure, torn slots, writers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.unroll_ring import Assignment, UnrollItem, UnrollRing, UnrollSpec, assignments, shares_of

ITEMS = (UnrollItem("obs", "float32", (5, -1, 3)), UnrollItem("valid", "bool", (4, -1)))


def spec_of(shares=(2, 1), slots=2):
    return UnrollSpec(ITEMS, shares, slots)


@pytest.fixture
def made():
    regions = []

    def make(spec):
        region = SharedRegion.create(spec.nbytes, "test")
        regions.append(region)
        return UnrollRing(region, spec), UnrollRing(region, spec)

    yield make
    for region in regions:
        region.close()


def write(lane, number, **facts):
    arrays = lane.begin()
    arrays["obs"][:] = number
    arrays["valid"][:] = number % 2
    lane.commit(**{"policy_version": 10 * number, "episodes": 1, "env_steps": 4, **facts})


def test_an_unroll_arrives_as_it_was_written(made):
    actors, learner = made(spec_of())
    lane, read = actors.lanes[0], learner.lanes[0]
    lane.started()
    read.grant(0)
    write(lane, 7)
    found = read.peek()
    assert (found.serial, found.life, found.policy_version, found.episodes, found.env_steps) == (
        1,
        1,
        70,
        1,
        4,
    )
    assert {name: array.shape for name, array in found.arrays.items()} == {"obs": (5, 2, 3), "valid": (4, 2)}
    assert (found.arrays["obs"] == 7).all()
    assert found.arrays["valid"].all()
    assert learner.lanes[1].peek() is None
    assert learner.lanes[1].begin()["obs"].shape == (5, 1, 3)


def test_nobody_begins_before_it_may(made):
    actors, learner = made(spec_of(slots=3))
    lane, read = actors.lanes[0], learner.lanes[0]
    assert not lane.may_begin
    read.grant(1)
    for number in (1, 2):
        assert lane.may_begin
        write(lane, number)
    assert not lane.may_begin
    read.consume()
    assert not lane.may_begin  # the slot is free, the next policy isn't there yet
    read.grant(1)
    assert lane.may_begin
    read.grant(99)  # never more than there are slots
    for number in (3, 4):
        write(lane, number)
    assert not lane.may_begin


def test_what_is_read_stays_until_it_is_consumed(made):
    actors, learner = made(spec_of())
    lane, read = actors.lanes[0], learner.lanes[0]
    read.grant(1)
    write(lane, 1)
    write(lane, 2)
    assert read.peek().serial == read.peek().serial == 1
    successor = learner.lanes[0]  # a learner that died had consumed nothing
    assert successor.peek().serial == 1
    successor.consume()
    assert (successor.peek().serial, successor.waiting) == (2, 1)


def test_a_half_unroll_is_dropped_and_counted_and_serials_go_on(made):
    actors, learner = made(spec_of(slots=1))
    lane, read = actors.lanes[0], learner.lanes[0]
    lane.started()
    read.grant(0)
    assert not lane.enter()
    write(lane, 1)
    read.consume()
    read.grant(0)
    lane.begin()["obs"][:] = 666  # and dies
    lane.started()
    assert read.peek() is None
    assert lane.enter()
    assert (lane.torn, lane.lives, lane.committed) == (1, 2, 1)
    write(lane, 2)
    found = read.peek()
    assert (found.serial, found.life) == (2, 2)
    assert (found.arrays["obs"] == 2).all()
    assert not lane.enter()
    assert (lane.env_steps, lane.episodes) == (8, 2)


@given(st.lists(st.sampled_from(["write", "read", "die", "grant"]), max_size=60))
def test_every_unroll_that_was_committed_is_read_once_in_order(script):
    spec = spec_of(shares=(1,), slots=2)
    region = SharedRegion.create(spec.nbytes, "test")
    lane = UnrollRing(region, spec).lanes[0]
    written, read, deaths = 0, [], 0
    for word in script:
        if word == "write" and lane.may_begin:
            written += 1
            write(lane, written)
        elif word == "die" and lane.may_begin:
            lane.begin()["obs"][:] = -1
            deaths += lane.enter()
        elif word == "grant":
            lane.grant(1)
        elif word == "read" and (found := lane.peek()) is not None:
            read.append((found.serial, float(found.arrays["obs"][0, 0, 0])))
            lane.consume()
    assert read == [(number, float(number)) for number in range(1, len(read) + 1)]
    assert written - len(read) <= 2
    assert lane.torn == deaths
    region.close()


def test_concurrent_writers_never_show_a_torn_unroll(made):
    """Each writer fills its arrays with one number: an unroll of two numbers would be a torn one."""
    actors, learner = made(UnrollSpec(ITEMS, (64, 64, 64), 2))
    rounds = 100

    def act(lane):
        for number in range(1, rounds + 1):
            while not lane.may_begin:
                pass
            write(lane, number)

    threads = [threading.Thread(target=act, args=(lane,), daemon=True) for lane in actors.lanes]
    for thread in threads:
        thread.start()
    seen = [0, 0, 0]
    while min(seen) < rounds:
        for number, lane in enumerate(learner.lanes):
            lane.grant(1)
            found = lane.peek()
            if found is None:
                continue
            seen[number] += 1
            assert found.serial == seen[number]
            assert (found.arrays["obs"] == seen[number]).all()
            lane.consume()
    for thread in threads:
        thread.join()


KILLED = """
import os, sys
import msgspec
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.unroll_ring import UnrollRing, UnrollSpec
spec = UnrollSpec.from_wire(msgspec.json.decode(sys.argv[2]))
lane = UnrollRing(SharedRegion.attach(int(sys.argv[1]), spec.nbytes), spec).lanes[0]
lane.enter()
number = lane.committed
while True:
    while not lane.may_begin:
        pass
    number += 1
    arrays = lane.begin()
    arrays["obs"][:] = number
    lane.commit(policy_version=number, episodes=0, env_steps=1)
"""


def test_writers_that_are_killed_leave_only_whole_unrolls():
    spec = UnrollSpec((UnrollItem("obs", "float32", (1000, -1)),), (8,), 2)
    region = SharedRegion.create(spec.nbytes, "test")
    lane = UnrollRing(region, spec).lanes[0]
    read = 0
    for _ in range(3):
        arguments = [
            sys.executable,
            "-c",
            KILLED,
            str(region.fd),
            msgspec.json.encode(spec.to_wire()).decode(),
        ]
        child = subprocess.Popen(arguments, pass_fds=[region.fd])
        target = read + 200
        while read < target:
            lane.grant(1)
            found = lane.peek()
            if found is not None:
                read += 1
                assert found.serial == read
                assert (found.arrays["obs"] == read).all()
                lane.consume()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert lane.committed - read <= 2
    region.close()


def test_the_spec_travels():
    spec = UnrollSpec((*ITEMS, UnrollItem("actions", "int64", (4, -1), choices=3)), (2, 1, 1), 2, remote=2)
    assert spec.local == 1
    again = UnrollSpec.from_wire(msgspec.json.decode(msgspec.json.encode(spec.to_wire())))
    assert again == spec
    assert again.nbytes == spec.nbytes


@pytest.mark.parametrize(
    "wire",
    [
        None,
        {"items": [], "shares": [1], "slots": 1},
        {"items": 3, "shares": [1], "slots": 1, "remote": 0},
        {"items": [["obs", "float32", [2.5, -1], 0]], "shares": [1], "slots": 1, "remote": 0},
        {"items": [["obs", "float32", [2, -1], 0]], "shares": ["x"], "slots": 1, "remote": 0},
        {"items": [["obs", "float32", [-2, -1], 0]], "shares": [1], "slots": 1, "remote": 0},
        {"items": [["obs", "int64", [2, -1], "x"]], "shares": [1], "slots": 1, "remote": 0},
        {"items": [["obs", "int64", [2, -1], 0]], "shares": [1], "slots": 1, "remote": None},
    ],
)
def test_what_is_no_spec_is_refused(wire):
    with pytest.raises(WireError):
        UnrollSpec.from_wire(wire)


@pytest.mark.parametrize(
    ("items", "shares", "slots"),
    [
        ((), (1,), 1),
        ((ITEMS[0], ITEMS[0]), (1,), 1),
        ((UnrollItem("x", "float16", (2, -1)),), (1,), 1),
        ((UnrollItem("x", "bool", (2, 3)),), (1,), 1),
        ((UnrollItem("x", "bool", (-1, -1)),), (1,), 1),
        (ITEMS, (), 1),
        (ITEMS, (1, 0), 1),
        (ITEMS, (1,), 0),
    ],
)
def test_what_cant_be_a_spec_is_refused(items, shares, slots):
    with pytest.raises(LayoutMismatchError):
        UnrollSpec(items, shares, slots)


def test_a_region_that_is_too_small_is_refused():
    region = SharedRegion.create(64, "test")
    with pytest.raises(LayoutMismatchError):
        UnrollRing(region, spec_of())
    region.close()


@pytest.mark.parametrize(
    ("environments", "actors", "shares"), [(8, 1, (8,)), (8, 3, (3, 3, 2)), (2, 2, (1, 1))]
)
def test_environments_are_shared_out_as_equally_as_can_be(environments, actors, shares):
    assert shares_of(environments, actors) == shares


@pytest.mark.parametrize("remote", [-1, 2])
def test_no_more_lanes_are_for_other_nodes_than_there_are(remote):
    with pytest.raises(LayoutMismatchError):
        UnrollSpec(ITEMS, (1,), 1, remote=remote)


def test_an_unroll_of_another_node_arrives_with_the_environments_that_it_has(made):
    spec = spec_of(shares=(3,), slots=2)
    _, learner = made(spec)
    _, elsewhere = made(spec_of(shares=(2,), slots=2))
    their_lane, lane = elsewhere.lanes[0], learner.lanes[0]
    their_lane.grant(0)
    lane.grant(0)
    write(their_lane, 7)
    sent = their_lane.peek()
    lane.fill(2)[:] = sent.content
    assert lane.waiting_environments == 0
    lane.commit(policy_version=70, episodes=1, env_steps=4, environments=2)
    found = lane.peek()
    assert lane.waiting_environments == found.environments == 2
    for name, array in found.arrays.items():
        assert array.shape[1] == 2
        assert (array == sent.arrays[name]).all()


def test_an_assignment_is_read_as_it_was_written(made):
    daemon, actors = made(spec_of(shares=(8, 4)))
    assert actors.lanes[0].assignment is None
    for assignment in (Assignment(8, 0, 8), Assignment(1, 15, 16), Assignment(3, 2**20, 2**21 - 1)):
        daemon.lanes[0].assign(assignment)
        assert actors.lanes[0].assignment == assignment
    assert actors.lanes[1].assignment is None
    for wrong in ((9, 0, 9), (0, 0, 4), (2, 7, 8), (2, -1, 8), (1, 0, 2**21)):
        with pytest.raises(LayoutMismatchError):
            daemon.lanes[0].assign(Assignment(*wrong))
    assert actors.lanes[0].assignment == assignment


@pytest.mark.parametrize(
    ("shares", "rank", "nodes", "expected"),
    [
        ((8,), 0, 1, [(8, 0, 8)]),
        ((4, 4), 0, 1, [(4, 0, 8), (4, 4, 8)]),
        ((8,), 2, 4, [(2, 4, 8)]),
        ((8,), 1, 3, [(3, 3, 8)]),
        ((8,), 2, 3, [(2, 6, 8)]),
        ((8,), 15, 16, [(1, 15, 16)]),
        ((4, 4), 1, 4, [(1, 2, 8), (1, 3, 8)]),
        ((3, 3, 2), 1, 2, [(2, 4, 8), (1, 6, 8), (1, 7, 8)]),
        ((1, 1), 3, 4, [(1, 6, 8), (1, 7, 8)]),
    ],
)
def test_nodes_that_act_together_share_out_environments(shares, rank, nodes, expected):
    assert assignments(shares, rank, nodes) == [Assignment(*one) for one in expected]


def test_what_was_half_filled_is_filled_again(made):
    _, learner = made(spec_of(shares=(3,), slots=2))
    lane = learner.lanes[0]
    lane.grant(0)
    lane.fill(3)[:] = b"x" * spec_of().content_nbytes(3)
    lane.fill(1)[:] = bytes(spec_of().content_nbytes(1))
    lane.commit(policy_version=1, episodes=0, env_steps=0, environments=1)
    assert (lane.peek().arrays["obs"] == 0).all()


@pytest.mark.parametrize(
    ("name", "value"), [("r", np.nan), ("r", np.inf), ("a", -1), ("a", 3), ("n", -1), ("v", 2)]
)
def test_numbers_that_cant_be_are_found(name, value):
    spec = UnrollSpec(
        (
            UnrollItem("r", "float32", (2, -1)),
            UnrollItem("a", "int64", (2, -1), choices=3),
            UnrollItem("n", "int64", (2, -1)),
            UnrollItem("v", "bool", (2, -1)),
            UnrollItem("o", "uint8", (2, -1)),
        ),
        (2,),
        1,
    )
    arrays = spec.views(memoryview(bytearray(spec.content_nbytes(2))), 2)
    arrays["a"][:], arrays["n"][:], arrays["o"][:] = 2, 10**12, 255
    spec.check(arrays)
    raw = arrays[name].view(np.uint8) if name == "v" else arrays[name]
    raw[1, 1] = value
    with pytest.raises(PoisonedVectorError, match=f"^{name} of an unroll"):
        spec.check(arrays)
