"""Pipelines over torch.distributed: their gradients, steps and failures."""

from __future__ import annotations

import itertools

import pytest

from . import torch_world
from .pipelines import MODELS, ROWS

BOUNDS = {"float64": 1e-12, "float32": 1e-5}
MICROBATCHES = (1, 2, 4, 8)
LAYOUTS = [
    *[("gpipe", ranks, ranks) for ranks in (2, 3, 4)],
    *[("1f1b", ranks, ranks) for ranks in (2, 3, 4)],
    ("interleaved", 4, 2),
    ("interleaved", 6, 3),
]


def check(rounds):
    by_rank, said = torch_world.run(torch_world.agreement, max(ranks for ranks, _ in rounds), rounds=rounds)
    assert said == ""
    for rank, found in by_rank.items():
        assert set(found) == {case for ranks, cases in rounds for case in cases if rank < ranks}
        for case, deviation in found.items():
            assert deviation < BOUNDS[case[2]], (rank, case)


def by_ranks(cases):
    rounds = {}
    for ranks, case in cases:
        rounds.setdefault(ranks, []).append(case)
    return sorted(rounds.items(), reverse=True)


def test_gradients_and_steps_are_the_full_batchs():
    cases = [
        (ranks, ("gradients", "mlp", "float64", schedule, stages, microbatches, ROWS))
        for schedule, stages, ranks in LAYOUTS
        if ranks < 4 and stages < 6
        for microbatches in MICROBATCHES
    ]
    cases += [
        (2, ("gradients", "lstm", "float32", "interleaved", 4, 2, ROWS)),
        (3, ("gradients", "lstm", "float64", "1f1b", 3, 4, ROWS)),
        (2, ("gradients", "cnn", "float32", "1f1b", 2, 4, 8)),
        (3, ("gradients", "mlp", "float64", "1f1b", 3, 8, 2)),
        (3, ("steps", "lstm", "float64", "1f1b", 3, 4, ROWS)),
        (2, ("steps", "mlp", "float64", "interleaved", 4, 4, ROWS)),
    ]
    check(by_ranks(cases))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_full_batchs_everywhere(name):
    cases = [
        (ranks, (kind, name, dtype, schedule, stages, microbatches, ROWS))
        for (schedule, stages, ranks), kind, dtype, microbatches in itertools.product(
            LAYOUTS, ("gradients", "steps"), BOUNDS, MICROBATCHES
        )
        if stages <= len(MODELS) and not (kind == "steps" and dtype == "float32")
    ]
    check(by_ranks(cases))


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        pytest.param("gpipe", marks=pytest.mark.slow),
        pytest.param("interleaved", marks=pytest.mark.slow),
    ],
)
def test_who_freezes_or_dies_in_mid_step_is_noticed_and_the_others_go_on(schedule):
    by_rank, _ = torch_world.run(torch_world.failures, 3, frozen=(1,), schedule=schedule, timeout_s=2.0)
    (first, second), (one,) = by_rank[0], by_rank[2]
    assert {first[0], one[0]} <= {"PeerTimeoutError", "PeerUnreachableError"}
    assert "PeerTimeoutError" in {first[0], one[0]}
    assert max(first[1], one[1]) < 2.0 + 1.0
    assert second[0] == "PeerUnreachableError"
    assert second[1] < 1.0
    assert first[2] == second[2] == 1
