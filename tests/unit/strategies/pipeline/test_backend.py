"""What carries activations: every reason against torch counts, of every rank; a failure counts for good."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.pipeline.plan import StageNews
from p2pdrl.strategies.pipeline.backend import LONGEST, BackendFallback, Choice, chosen
from p2pdrl.strategies.pipeline.forming import generation_of
from p2pdrl.strategies.pipeline.generation import Generation
from p2pdrl.strategies.pipeline.messages import RankOffer
from p2pdrl.testing.virtual_swarm import FakeSwarm

from .forms import make_form

GOOD = RankOffer("aa", 0, 0, b"", 0, 0.1, 6, "cuda:0", True, gpu="G0", direct=True)


def ranks(count: int = 3, **of_rank: dict[str, object]) -> list[tuple[str, RankOffer]]:
    """Ranks n0, n1, … with all that torch needs, but for what is said of some."""
    offers = {f"n{one}": msgspec.structs.replace(GOOD, gpu=f"G{one}") for one in range(count)}
    for name, changes in of_rank.items():
        offers[name] = msgspec.structs.replace(offers[name], **changes)
    return list(offers.items())


def test_torch_where_nothing_speaks_against_it():
    backend, why = chosen("auto", ranks())
    assert (backend, why.startswith("it runs over torch, for all trust")) == ("torch", True)


@pytest.mark.parametrize("rank", ["n0", "n1", "n2"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trusted": False}, "{} doesn't trust its network"),
        ({"gpu": "", "device": "cpu"}, "{} computes on cpu, where NCCL doesn't reach"),
        ({"gpu": ""}, "{} computes on cuda:0, where NCCL doesn't reach"),
        ({"gpu": "", "device": ""}, "{} computes on nothing"),
        ({"direct": False}, "{} isn't reached at any port"),
    ],
)
def test_one_rank_is_enough_to_speak_against_it(rank: str, changes, why: str):
    choice = chosen("auto", ranks(**{rank: changes}))
    assert choice.backend == "stream"
    assert choice.why.startswith(f"it runs over stream, for {why.format(rank)}")


def test_two_on_one_gpu_cant_use_nccl():
    choice = chosen("auto", ranks(n2={"gpu": "G0"}))
    assert choice == Choice("stream", "it runs over stream, for n0 and n2 share a GPU")


def test_what_failed_before_isnt_chosen_again():
    choice = chosen("auto", ranks(), "generation 3 broke")
    assert choice == Choice("stream", "it runs over stream, for generation 3 broke")
    assert "trust" in chosen("auto", ranks(n1={"trusted": False}), "generation 3 broke").why, (
        "what is true now"
    )


@pytest.mark.parametrize("wanted", ["stream", "torch"])
@pytest.mark.parametrize("failed", ["", "generation 3 broke"])
def test_what_is_configured_counts_whatever_speaks_against_it(wanted, failed: str):
    assert chosen(wanted, ranks(n0={"trusted": False, "gpu": ""}), failed) == Choice(wanted)


def test_one_alone_sends_nothing():
    assert chosen("auto", ranks(1)) == Choice("stream")


def test_who_says_nothing_of_gpus_has_none():
    """Defaults of the message: a rank of another release."""
    silent = RankOffer("aa", 0, 0, b"", 0, 0.1, 6, "cuda:0", True)
    assert chosen("auto", [("n0", GOOD), ("n1", silent)]).backend == "stream"


FORM = make_form(backend="torch")


def ended(*said: StageNews, rank: int = 0, **changes: object) -> tuple[Generation, StageNews]:
    generation = generation_of(PipelineConfig(), msgspec.structs.replace(FORM, **changes), rank, "10.0.0.1")
    for news in said:
        generation.hear(news)
    return generation, said[-1]


def news(what, version: int = 0) -> StageNews:
    return StageNews(9, what, why="no NCCL here" if what == "broken" else "", policy_version=version)


READY = news("ready", 40)


@pytest.mark.parametrize(
    ("said", "fails"),
    [
        ((READY, news("broken", 40)), True),
        ((READY, news("broken", 41)), False),
        ((READY, news("copied", 50), news("broken", 52)), False),
        ((READY, news("broken", 0)), True),  # its learner died, which tells no version
        ((READY, news("copied", 50), news("broken", 0)), False),
        ((news("broken", 40),), True),
        ((READY, news("over", 40)), False),
    ],
)
async def test_it_fails_by_breaking_before_the_first_update(said, fails: bool):
    swarm = FakeSwarm("a")
    fallback = BackendFallback(swarm, counts=True)
    fallback.ended(*ended(*said))
    assert bool(fallback.failed) == fails
    assert [kind for kind, _ in swarm.told] == ["pipeline-backend"] * fails
    if fails:
        assert fallback.failed == "generation 9 broke over torch before its first update: no NCCL here"
        assert "run over stream" in swarm.told[0][1]


async def test_only_of_pipelines_over_torch_that_we_coordinate():
    fallback = BackendFallback(FakeSwarm("a"), counts=True)
    fallback.ended(*ended(READY, news("broken", 40), backend="stream"))
    fallback.ended(*ended(READY, news("broken", 40), rank=1))
    assert not fallback.failed


async def test_ranks_that_dont_meet_fail_too_and_the_first_failure_is_told():
    swarm = FakeSwarm("a")
    fallback = BackendFallback(swarm, counts=True)
    fallback.unmet(3, "x" * 1000)
    fallback.unmet(4, "later")
    assert fallback.failed == "the ranks of generation 3 couldn't meet over torch: " + "x" * LONGEST
    assert len(swarm.told) == 1


async def test_what_people_asked_for_is_tried_again_and_again():
    swarm = FakeSwarm("a")
    fallback = BackendFallback(swarm, counts=False)
    fallback.unmet(3, "no NCCL")
    fallback.ended(*ended(READY, news("broken", 40)))
    assert (fallback.failed, swarm.told) == ("", [])
