"""The policy that actors read while the learner writes it."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, PolicyCopies, SharedPolicy


@pytest.fixture
def region():
    made = SharedRegion.create(SharedPolicy.nbytes_of(500, (3,)), "policy")
    yield made
    made.close()


def policy_of(number):
    return ActingPolicy(number, number / 10, np.full(3, float(number)), np.full(3, 2.0 * number))


def test_what_was_written_is_read(region):
    writer, reader = SharedPolicy(region, 500, (3,)), SharedPolicy(region, 500, (3,))
    out = np.zeros(500, np.float32)
    assert reader.read(out) is None
    for number in (1, 2, 3):
        writer.write(np.full(500, number, np.float32), policy_of(number))
        found = reader.read(out)
        assert (found.version, found.exploration) == (number, number / 10)
        assert (out == number).all()
        assert (found.mean_X == number).all()
        assert (found.scale_X == 2 * number).all()


def test_readers_cant_write(region):
    SharedPolicy(region, 500, (3,)).write(np.ones(500, np.float32), policy_of(1))
    mapped = SharedRegion.attach(os.dup(region.fd), region.nbytes, writable=False)
    reader = SharedPolicy(mapped, 500, (3,))
    out = np.zeros(500, np.float32)
    assert reader.read(out).version == 1
    with pytest.raises(ValueError, match="read-only"):
        reader.write(out, policy_of(2))
    mapped.close()


def test_a_reader_never_sees_two_policies_at_once(region):
    writer, reader = SharedPolicy(region, 500, (3,)), SharedPolicy(region, 500, (3,))
    writer.write(np.ones(500, np.float32), policy_of(1))
    going = True

    def write():
        number = 1
        while going:
            number += 1
            writer.write(np.full(500, number, np.float32), policy_of(number))

    thread = threading.Thread(target=write)
    thread.start()
    out = np.zeros(500, np.float32)
    try:
        for _ in range(2000):
            found = reader.read(out)
            if found is not None:
                assert (out == found.version).all()
                assert (found.mean_X == found.version).all()
    finally:
        going = False
        thread.join()


def test_a_policy_without_normalised_observations():
    region = SharedRegion.create(SharedPolicy.nbytes_of(2, (0,)), "policy")
    policy = SharedPolicy(region, 2, (0,))
    policy.write(np.ones(2, np.float32), ActingPolicy(1, 0.0, np.zeros(0), np.zeros(0)))
    assert policy.read(np.zeros(2, np.float32)).mean_X.shape == (0,)
    with pytest.raises(LayoutMismatchError):
        SharedPolicy(region, 100, (0,))
    region.close()


@pytest.fixture
def elsewhere():
    made = SharedRegion.create(SharedPolicy.nbytes_of(500, (3,)), "policy")
    yield made
    made.close()


def test_a_policy_is_carried_to_another_node_as_it_is(region, elsewhere):
    here, there = PolicyCopies(region, 500, 3), PolicyCopies(elsewhere, 500, 3)
    assert here.version is None
    assert here.read() is None
    reader, out = SharedPolicy(elsewhere, 500, (3,)), np.zeros(500, np.float32)
    for number in (1, 2, 3):
        SharedPolicy(region, 500, (3,)).write(np.full(500, number, np.float32), policy_of(number))
        assert here.version == number
        assert there.write(here.read()) == number
        found = reader.read(out)
        assert (found.version, found.exploration) == (number, number / 10)
        assert (out == number).all()
        assert (found.scale_X == 2 * number).all()


@pytest.mark.parametrize("where", ["vector", "mean", "exploration"])
def test_a_policy_that_isnt_finite_is_refused(region, elsewhere, where):
    vector, policy = np.ones(500, np.float32), policy_of(1)
    if where == "vector":
        vector[-1] = np.nan
    if where == "mean":
        policy.mean_X[0] = np.inf
    if where == "exploration":
        policy = policy._replace(exploration=np.nan)
    SharedPolicy(region, 500, (3,)).write(vector, policy)
    there = PolicyCopies(elsewhere, 500, 3)
    with pytest.raises(PoisonedVectorError):
        there.write(PolicyCopies(region, 500, 3).read())
    assert there.version is None


def test_a_policy_of_another_length_is_refused(region):
    with pytest.raises(LayoutMismatchError):
        PolicyCopies(region, 500, 3).write(np.zeros(7, np.uint8))
    with pytest.raises(LayoutMismatchError):
        PolicyCopies(region, 600, 3)
