"""Pipelines over torch.distributed: their gradients, steps and failures."""

from __future__ import annotations

import itertools

import pytest

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError
from p2pdrl.rl.pipeline.torch_runner import peer_error

from . import torch_processes, torch_world
from .pipelines import MODELS, ROWS, make_case

BOUNDS = {"float64": 1e-12, "float32": 1e-5}
ROUNDED = {"bf16": 0.1}
MICROBATCHES = (1, 2, 4, 8)
GROUP_TIMEOUT_S = 2.0
TORCH_BARRIER_S = 10.0
"""torch's barrier, which ends a meeting, waits so long before it looks at its timeout; ours are no less."""
LAYOUTS = [
    *[("gpipe", ranks, ranks) for ranks in (2, 3, 4)],
    *[("1f1b", ranks, ranks) for ranks in (2, 3, 4)],
    ("interleaved", 4, 2),
    ("interleaved", 6, 3),
]


def by_ranks(cases):
    rounds = {}
    for ranks, case in cases:
        rounds.setdefault(ranks, []).append(case)
    return sorted(rounds.items(), reverse=True)


QUICK = by_ranks(
    [
        *[
            (ranks, ("gradients", "mlp", "float64", schedule, stages, microbatches, ROWS))
            for schedule, stages, ranks, numbers in [
                ("gpipe", 2, 2, (1, 4)),
                ("gpipe", 3, 3, (2, 8)),
                ("1f1b", 2, 2, (2,)),
                ("1f1b", 3, 3, (1, 2, 8)),  # the first two have fewer microbatches than stages
                ("interleaved", 4, 2, (1, 2, 8)),
            ]
            for microbatches in numbers
        ],
        (2, ("gradients", "lstm", "float32", "interleaved", 4, 2, ROWS)),
        (3, ("gradients", "lstm", "float64", "1f1b", 3, 4, ROWS)),
        (2, ("gradients", "cnn", "float32", "1f1b", 2, 4, 8)),
        (3, ("gradients", "mlp", "float64", "1f1b", 3, 8, 2)),
        (3, ("gradients", "mlp", "bf16", "1f1b", 3, 4, ROWS)),
        (3, ("anew", "lstm", "float64", "gpipe", 3, 4, ROWS)),
        (3, ("anew", "mlp", "float64", "1f1b", 3, 4, ROWS)),
        (3, ("steps", "lstm", "float64", "1f1b", 3, 4, ROWS)),
        (2, ("steps", "mlp", "float64", "interleaved", 4, 4, ROWS)),
    ]
)


@pytest.fixture(scope="module")
def world():
    """What three processes find that do it all one after another: they take longest to begin."""
    return torch_processes.run(
        torch_world.both, 3, frozen=(1,), rounds=QUICK, schedule="1f1b", timeout_s=GROUP_TIMEOUT_S
    )


def check_agreement(found_by_rank, rounds):
    for rank, found in found_by_rank.items():
        assert set(found) == {case for ranks, cases in rounds for case in cases if rank < ranks}
        for case, deviation in found.items():
            assert deviation < (BOUNDS | ROUNDED)[case[2]], (rank, case)


def test_gradients_and_steps_are_the_full_batchs(world):
    by_rank, _ = world
    check_agreement({rank: yielded[0] for rank, yielded in by_rank.items()}, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_full_batchs_everywhere(name):
    rounds = by_ranks(
        [
            (ranks, (kind, name, dtype, schedule, stages, microbatches, ROWS))
            for (schedule, stages, ranks), kind, dtype, microbatches in itertools.product(
                LAYOUTS, ("gradients", "steps"), BOUNDS, MICROBATCHES
            )
            if stages <= len(make_case(name)[1].blocks) and not (kind == "steps" and dtype == "float32")
        ]
    )
    by_rank, said = torch_processes.run(torch_world.agreement, 4, rounds=rounds)
    assert not said
    check_agreement({rank: yielded[0] for rank, yielded in by_rank.items()}, rounds)


def check_failures(by_rank):
    """One rank froze, later the last of the others died."""
    (first, second), (one,) = (yielded for yielded in by_rank.values() if yielded)
    assert {first[0], one[0]} <= {"PeerTimeoutError", "PeerUnreachableError"}
    assert "PeerTimeoutError" in {first[0], one[0]}
    assert max(first[1], one[1]) < GROUP_TIMEOUT_S + 1.0
    assert second[0] == "PeerUnreachableError"
    assert second[1] < 1.0
    assert [error[2] for error in (first, one, second)] == [1, 1, 1]
    assert second[3] in {"next", None}  # None where torch noticed before the pipe did


def test_who_freezes_or_dies_in_mid_step_is_noticed_and_the_others_go_on(world):
    by_rank, _ = world
    check_failures({rank: yielded[1:] for rank, yielded in by_rank.items()})


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_failures_of_other_ranks_under_other_schedules(schedule, frozen):
    by_rank, _ = torch_processes.run(
        torch_world.failures, 3, (frozen,), schedule=schedule, timeout_s=GROUP_TIMEOUT_S, frozen_rank=frozen
    )
    check_failures(by_rank)


@pytest.mark.slow
@pytest.mark.parametrize("wanted_s", [None, 0.1])
@pytest.mark.parametrize("phase", ["opened", "come", "joined", "met"])
def test_a_frozen_host_of_the_store_keeps_nobody_longer_than_its_timeout(phase, wanted_s):
    """However far the meeting was; and not that long where the daemon wants something else."""
    timeout_s = GROUP_TIMEOUT_S if wanted_s is None else 20.0
    by_rank, _ = torch_processes.run(
        torch_world.frozen_host, 3, (0,), phase=phase, timeout_s=timeout_s, wanted_s=wanted_s
    )
    for how, seconds in (by_rank[rank][0] for rank in (1, 2)):
        print(phase, wanted_s, how, round(seconds, 2))
        assert phase in {"joined", "met"} or how != "met"
        bound_s = timeout_s if wanted_s is None else wanted_s
        if wanted_s is None and phase == "joined":
            bound_s = max(bound_s, TORCH_BARRIER_S)  # who is in it just then
        assert seconds < bound_s + 2.0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (
            "[/x/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation",
            "late",
        ),
        (
            "[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:3. This is typically",
            "gone",
        ),
        ("Application timeout caused pair closure", "gone"),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", None),
        ("CUDA out of memory", None),
    ],
)
def test_what_torch_says_of_others_is_told_from_errors_of_our_own(text, meant):
    found = peer_error(RuntimeError(text))
    expected = {"late": PeerTimeoutError, "gone": PeerUnreachableError, None: type(None)}[meant]
    assert type(found) is expected
    assert found is None or not str(found).startswith("[")
