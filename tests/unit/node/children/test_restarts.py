"""How learners died, how long to wait after it, and when to give up."""

from __future__ import annotations

import signal

import pytest

from p2pdrl.config.node import LearnerConfig
from p2pdrl.node.children.restarts import Death, RestartPolicy, death_of
from p2pdrl.workers.protocol import Crashed

CRASH = Crashed("ValueError", "bad action", "/envs/mine.py:12 in step", "Traceback …")
BY_ERROR = death_of(1, crash=CRASH)
BY_ANOTHER = death_of(1, crash=Crashed("ValueError", "bad action", "/envs/mine.py:40 in reset", "…"))
KILLED = death_of(-signal.SIGKILL)


def test_each_end_is_told_in_words():
    assert BY_ERROR.how == "died of ValueError: bad action (at /envs/mine.py:12 in step)"
    assert BY_ERROR.document == {
        "type": "ValueError",
        "message": "bad action",
        "where": "/envs/mine.py:12 in step",
        "traceback": "Traceback …",
    }
    assert KILLED.how == "was killed by signal 9 (SIGKILL)"
    assert KILLED.document is None
    assert death_of(-40).how == "was killed by signal 40 (a real-time one)"
    assert death_of(5).how == "ended with code 5"
    assert death_of(-9, late=True).how == "hung up and didn't end, and was killed"
    assert death_of(-9, stood_still="it slept").how == "was killed because it slept"
    assert death_of(1, failed="no such layout").how == "failed: no such layout"


def test_the_error_is_told_even_where_the_process_had_to_be_killed():
    assert death_of(-9, crash=CRASH, late=True).cause == BY_ERROR.cause


def test_waits_double_up_to_a_bound():
    policy = RestartPolicy(LearnerConfig(restart_min_s=0.5, restart_max_s=30.0))
    waits = [policy.backoff_s]
    for _ in range(100):
        policy.died(KILLED, 1.0)
        waits.append(policy.backoff_s)
    assert waits[:8] == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(waits[8:]) == {30.0}
    for _ in range(5000):
        policy.failed_to_start()
    assert policy.backoff_s == 30.0


def test_a_long_life_forgives_earlier_deaths():
    policy = RestartPolicy(LearnerConfig())
    for lived_s, in_a_row in [(1.0, 1), (59.0, 2), (60.0, 0), (5.0, 1)]:
        policy.died(KILLED, lived_s)
        assert policy.in_a_row == in_a_row


@pytest.mark.parametrize("death", [BY_ERROR, death_of(5), death_of(-signal.SIGSEGV), death_of(-9, late=True)])
def test_after_enough_deaths_alike_another_is_in_vain(death):
    policy = RestartPolicy(LearnerConfig(give_up_after=3))
    for _ in range(2):
        policy.died(death, 1.0)
        assert policy.give_up_reason is None
    policy.died(death, 1.0)
    assert "3 times in a row" in policy.give_up_reason
    assert death.how in policy.give_up_reason
    assert "start this node again" in policy.give_up_reason


@pytest.mark.parametrize("death", [KILLED, death_of(-signal.SIGTERM), death_of(-9, stood_still="it slept")])
def test_what_came_from_outside_may_be_over(death):
    policy = RestartPolicy(LearnerConfig(give_up_after=1))
    for _ in range(100):
        policy.died(death, 0.1)
    assert policy.give_up_reason is None


@pytest.mark.parametrize(("between", "lived_s"), [(BY_ANOTHER, 1.0), (KILLED, 1.0), (BY_ERROR, 60.0)])
def test_another_death_or_a_long_life_between_counts_anew(between: Death, lived_s: float):
    policy = RestartPolicy(LearnerConfig(give_up_after=3))
    for _ in range(5):
        policy.died(BY_ERROR, 1.0)
        assert policy.give_up_reason is None
        policy.died(between, lived_s)
        assert policy.give_up_reason is None


def test_one_death_may_be_enough():
    policy = RestartPolicy(LearnerConfig(give_up_after=1))
    policy.died(BY_ERROR, 1.0)
    assert policy.give_up_reason.startswith("the learner died of ValueError: bad action (at ")


def test_nought_never_gives_up():
    policy = RestartPolicy(LearnerConfig(give_up_after=0))
    for _ in range(100):
        policy.died(BY_ERROR, 0.1)
    assert policy.give_up_reason is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MemoryError", ""),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 7.45 GiB"),
        ("ImportError", "libtorch_cpu.so: failed to map segment from shared object"),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B",
        ),
        ("OSError", "[Errno 12] Cannot allocate memory"),
    ],
)
def test_want_of_memory_is_told_in_words(kind, message):
    death = death_of(1, crash=Crashed(kind, message, "torch/__init__.py:445 in <module>", "Traceback …"))
    assert death.how.startswith(f"died of want of memory, by {kind}")
    policy = RestartPolicy(LearnerConfig(give_up_after=1))
    policy.died(death, 0.0)
    for advice in ("`ulimit -v`", "task.algorithm.buffer_size", "node.actors.count"):
        assert advice in policy.give_up_reason
    assert "the environment" not in policy.give_up_reason
