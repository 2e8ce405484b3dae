"""The policy that actors read while the learner writes it."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import (
    MOST_DIFFERENCES,
    ActingPolicy,
    PolicyCopies,
    PolicyImage,
    SharedPolicy,
)


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


WIDE = 10_000
"""Parameters: three rows of int8."""


def content_of(version, vector):
    """The bytes of a policy, as they lie in memory that a learner wrote."""
    region = SharedRegion.create(SharedPolicy.nbytes_of(vector.size, (3,)), "policy")
    SharedPolicy(region, vector.size, (3,)).write(vector, policy_of(version))
    found = PolicyCopies(region, vector.size, 3).read()
    region.close()
    return found


def training(rng, updates):
    """Yield the bytes and the vector of each of some policies, each an update after the one before."""
    vector = rng.normal(size=WIDE).astype(np.float32)
    for version in range(1, updates + 1):
        yield content_of(version, vector), vector
        vector = vector + rng.normal(scale=1e-3, size=WIDE).astype(np.float32)


def test_who_adds_the_differences_has_the_same_bits_however_many_policies_were_between():
    held, image = {}, None
    for content, vector in training(np.random.default_rng(1), 40):
        before = None if image is None else image.vector_D.copy()
        image = PolicyImage.first(content, WIDE, 3) if image is None else image.then(content)
        if before is not None:
            change = np.abs(vector - before)
            bounds = np.repeat([change[at : at + 4096].max() for at in range(0, WIDE, 4096)], 4096)[:WIDE]
            assert (np.abs(image.vector_D - vector) <= bounds / 254 + 1e-6).all()
        # one that takes each policy, one each third, one each fifth, which is beyond what is kept
        for every in (1, 3, 5):
            if image.version % every:
                continue
            found = image.since(held[every].version) if every in held else None
            assert (found is None) == (every == 5 or every not in held)
            if found is None:
                held[every] = PolicyImage.first(image.whole.copy(), WIDE, 3)
            else:
                begins, message = found
                assert len(begins) == every
                assert len(message) < 0.27 * every * image.whole.nbytes
                there = PolicyImage.after(
                    held[every].whole, begins, np.frombuffer(message, np.uint8), size=WIDE, features=3
                )
                assert (there.version, there.checksum) == (image.version, image.checksum)
                assert there.whole.tobytes() == image.whole.tobytes()
                held[every] = there


def test_what_one_has_of_the_differences_is_passed_over():
    contents = [content for content, _ in training(np.random.default_rng(2), 4)]
    images = [PolicyImage.first(contents[0], WIDE, 3)]
    for content in contents[1:]:
        images.append(images[-1].then(content))
    begins, message = images[3].since(1)
    assert begins == (1, 2, 3)
    for held in images[:3]:
        there = PolicyImage.after(held.whole, begins, np.frombuffer(message, np.uint8), size=WIDE, features=3)
        assert there.checksum == images[3].checksum


@pytest.mark.parametrize("why", ["older", "same", "not finite", "after what wasn't finite"])
def test_what_isnt_the_next_policy_goes_whole(why):
    (one, _), (two, vector), (three, _) = training(np.random.default_rng(3), 3)
    image = PolicyImage.first(one, WIDE, 3).then(two)
    if why == "not finite":
        vector = vector.copy()
        vector[77] = np.nan
        three = content_of(3, vector)
    if why == "after what wasn't finite":
        vector = vector.copy()
        vector[77] = np.inf
        image = image.then(content_of(2, vector))
    following = {"older": one, "same": two}.get(why, three)
    after = image.then(following)
    assert after.whole.tobytes() == following.tobytes()
    assert all(after.since(held) is None for held in range(4))


@pytest.mark.parametrize("why", ["short", "long", "of another", "too many", "scale"])
def test_differences_that_are_malformed_are_refused(why):
    (one, _), (two, _) = training(np.random.default_rng(4), 2)
    image = PolicyImage.first(one, WIDE, 3)
    begins, message = image.then(two).since(1)
    content = np.frombuffer(message, np.uint8).copy()
    if why == "short":
        content = content[:-1]
    if why == "long":
        content = np.concatenate([content, content[:1]])
    if why == "of another":
        begins = (2,)
    if why == "too many":
        begins = tuple(range(MOST_DIFFERENCES + 1))
    if why == "scale":
        content[64 + 16 * 3 :][:4] = np.frombuffer(np.float32(-1).tobytes(), np.uint8)
    with pytest.raises(WireError):
        PolicyImage.after(image.whole, begins, content, size=WIDE, features=3)


def test_a_small_policy_goes_whole():
    one, two = (content_of(version, np.full(4000, version, np.float32)) for version in (1, 2))
    image = PolicyImage.first(one, 4000, 3).then(two)
    assert image.since(1) is None
    assert image.whole.tobytes() == two.tobytes()
