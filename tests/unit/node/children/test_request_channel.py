from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.errors import TensorError
from p2pdrl.node.children.supervisor import LearnerRequestChannel
from p2pdrl.strategies.learner_requests import RequestQueue
from p2pdrl.tensors.shared_memory import GradientRing, SharedVector
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.workers.protocol import PostedRequest, RequestAnswer

SIZE = 5


@pytest.fixture
def place():
    made = LearnerRequestChannel()
    yield made
    made.close()


def posted(number: int, epoch: int = 1, slot: int = 0) -> PostedRequest:
    return PostedRequest(number, epoch, "gradients", slot, 100 + number, 8)


async def test_a_gradient_comes_with_its_slot(place):
    work, (region,) = place.arrange(LearnerMode("gradients", ahead=1), 1, SIZE)
    assert (work.epoch, work.ring_nbytes, work.shared_nbytes) == (1, region.nbytes, 0)
    learner = GradientRing(region, 2, SIZE)
    learner.slot(1)[:] = 2.5
    place.posted(posted(4, slot=1))
    post = await place.next_request()
    assert (post.kind, post.policy_version, post.samples) == ("gradients", 104, 8)
    post.vector[0] = -1.0
    assert learner.slot(1).tolist() == [-1.0, 2.5, 2.5, 2.5, 2.5]
    assert place.answered(post, "replace", 0) == RequestAnswer(4, 1, "replace")
    assert place.answered(post, "none", 0) is None


async def test_a_round_of_parameters_takes_no_memory(place):
    work, regions = place.arrange(LearnerMode("parameters", every=4), 2, SIZE)
    assert (work.ring_nbytes, list(regions)) == (0, [])
    place.posted(PostedRequest(1, 2, "parameters", -1, 50, 0))
    post = await place.next_request()
    assert (post.kind, post.vector) == ("parameters", None)
    assert place.answered(post, "set", 12) == RequestAnswer(1, 2, "set", 12)


async def test_the_place_in_the_update_goes_one_way_and_its_end_the_other(place):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    place.posted(msgspec.structs.replace(posted(1), left=15))
    post = await place.next_request()
    assert post.left == 15
    expected = RequestAnswer(1, 1, "replace", 0, 0.5, end_update=True)
    assert place.answered(post, "replace", 0, 0.5, end_update=True) == expected


async def test_what_an_earlier_mode_posted_is_void(place):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    place.posted(posted(1))
    post = await place.next_request()
    place.posted(posted(2))
    place.arrange(LearnerMode("gradients"), 2, SIZE)
    place.posted(posted(3, epoch=1))
    place.posted(posted(4, epoch=2))
    assert place.answered(post, "replace", 0) is None
    assert (await place.next_request()).policy_version == 104


async def test_what_a_dead_learner_posted_is_void_and_its_slot_is_nobodys(place):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    place.posted(posted(1))
    old = await place.next_request()
    work, (region,) = place.renew(SIZE)
    assert (work.learner_mode, work.epoch) == (LearnerMode("gradients"), 1)
    place.posted(posted(1))  # the successor counts from one again
    new = await place.next_request()
    assert new.number == old.number == 1  # so that a strategy sees that another one posts
    assert place.answered(old, "replace", 0) is None
    old.vector[:] = np.nan  # a thread that hadn't heard of the death yet
    assert GradientRing(region, 1, SIZE).slot(0).tolist() == [0.0] * SIZE
    assert place.answered(new, "replace", 0) == RequestAnswer(1, 1, "replace")


@pytest.mark.parametrize("why", ["died", "alone"])
async def test_a_strategy_in_lockstep_sees_that_its_learner_lost_step(place, why):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    learner = SimpleNamespace(next_request=place.next_request, answer=lambda post, kind, _rate, **_: None)
    requests = RequestQueue(learner, SystemClock(), grace_s=60.0)
    following = asyncio.create_task(requests.follow())
    for number in (1, 2):
        place.posted(posted(number))
        requests.answer(await requests.next(), "replace")
    assert not requests.restarted
    if why == "died":
        place.renew(SIZE)
    place.posted(msgspec.structs.replace(posted(1), alone=why == "alone"))
    await requests.next()
    assert requests.restarted
    following.cancel()
    await asyncio.wait([following])


async def test_giving_up_the_wait_for_a_post_loses_none(place):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    waiting = asyncio.create_task(place.next_request())
    await asyncio.sleep(0)
    place.posted(posted(1))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    async with asyncio.timeout(1.0):
        assert (await place.next_request()).policy_version == 101


def test_several_learners_share_a_vector(place):
    work, (region,) = place.arrange(LearnerMode(learners=3), 1, SIZE)
    assert place.shared is region
    assert work.shared_nbytes == SharedVector.nbytes_of(SIZE)
    assert place.renew(SIZE)[1] == [region]  # it outlives a learner
    assert place.arrange(FREE, 2, SIZE)[1] == []
    assert place.shared is None


def test_they_may_share_their_optimizers_state_too(place):
    items = (SidecarItem("optimizer.v", (SIZE,)), SidecarItem("optimizer.steps", (), "int64"))
    sidecar = SidecarLayout((*items, SidecarItem("target.q", (SIZE,))))
    work, (region,) = place.arrange(LearnerMode(learners=2, shared_statistics=True), 1, SIZE, sidecar)
    vector = SharedVector(region, SIZE, SidecarLayout(items))
    assert work.shared_nbytes == region.nbytes == SharedVector.nbytes_of(SIZE, SidecarLayout(items))
    vector.vector[:] = 1.0
    assert {name: array.tolist() for name, array in vector.statistics.items()} == {
        "optimizer.v": [0.0] * SIZE,
        "optimizer.steps": 0,
    }
    plain, _ = place.arrange(LearnerMode(learners=2), 2, SIZE, sidecar)
    assert plain.shared_nbytes == SharedVector.nbytes_of(SIZE)


def test_a_learner_that_names_what_there_isnt(place):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    with pytest.raises(TensorError, match="no 1"):
        place.posted(posted(1, slot=1))


async def test_one_epoch_may_have_two_modes(place):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    place.posted(posted(1))
    old = await place.next_request()
    place.arrange(FREE, 1, SIZE)  # its strategy couldn't be started: the learner trains alone
    place.posted(posted(2))  # it hadn't heard of that yet
    assert place.answered(old, "replace", 0) is None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(place.next_request(), 0.01)


async def test_a_learner_that_went_on_alone_counts_as_another_one(place):
    place.arrange(LearnerMode("gradients"), 1, SIZE)
    for number in (1, 2):
        place.posted(posted(number))
        late = await place.next_request()
    assert place.answered(late, "replace", 0) == RequestAnswer(2, 1, "replace")
    place.posted(PostedRequest(3, 1, "gradients", 0, 110, 8, alone=True))
    place.posted(posted(4))
    posts = [await place.next_request() for _ in range(2)]
    assert [post.number for post in posts] == [1, 2]
    assert [place.answered(post, "none", 0) for post in (late, *posts)] == [
        None,
        RequestAnswer(3, 1, "none"),
        RequestAnswer(4, 1, "none"),
    ]


def test_only_a_learner_that_collects_for_its_next_request_is_preempted(place):
    work, (region,) = place.arrange(LearnerMode("gradients", preempted=True), 1, SIZE)
    ring = GradientRing(region, 1, SIZE)
    place.preempt()
    assert ring.preempted == 0  # nobody knows yet how it counts
    place.posted(PostedRequest(7, 1, "gradients", 0, 0, 4))
    place.preempt()
    assert ring.preempted == 0  # it waits itself
    request = asyncio.run(place.next_request())
    place.answered(request, "replace", 0)
    place.preempt()
    assert ring.preempted == 8
    assert work.learner_mode.preempted
