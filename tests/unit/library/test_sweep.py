"""A sweep over trainings that the test makes up: what is tried, ended early, kept, and gone on with."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.errors import ConfigError, UsageError, WorkerError
from p2pdrl.library.sweep import CurvePoint, Sweep, make_plan, require_optuna

needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="wants p2pdrl[sweep]")
RATE = "task.algorithm.learning_rate"
RANGE = f"{RATE}=loguniform(1e-5, 1e-1)"
STEPS = 1000


class FakeTrainings:
    """Curves whose height follows from the settings; remembers what was asked, and how it ended."""

    def __init__(self, height=lambda sets, seed: 100.0):
        self.height = height
        self.asked = []
        self.ended = []
        self.mutex = threading.Lock()

    def __call__(self, number, seed, sets):
        given = dict(one.split("=", 1) for one in sets)
        with self.mutex:
            self.asked.append((number, seed, given))
        steps = 0
        try:
            while steps < STEPS:
                steps += 50
                height = self.height(given, seed)
                if isinstance(height, Exception):
                    raise height
                yield CurvePoint(steps, height * steps / STEPS, None)
        finally:
            with self.mutex:
                self.ended.append((number, seed, steps))


def near_a_thousandth(given, seed):
    """Best where the learning rate is a thousandth."""
    import math

    return 100.0 - 20.0 * abs(math.log10(float(given[RATE])) + 3.0) + seed


def plan_of(*settings, **given):
    return make_plan(["cartpole"], settings or [RANGE], **{"steps": STEPS, **given})


@pytest.fixture
def sweep_of(tmp_path):
    made = []

    def make(plan, train, **given):
        made.append(Sweep(plan, tmp_path / "sweep", train, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(sweep, trials, jobs=1):
    sweep.run(trials, jobs, lambda: None, every_s=0.05)


@needs_optuna
def test_the_best_settings_are_found_and_kept_as_a_configuration(sweep_of, tmp_path):
    trainings = FakeTrainings(near_a_thousandth)
    sweep = sweep_of(
        plan_of(RANGE, "task.network.hidden=choice([16], [32, 32])", "task.env.num_envs=4"), trainings
    )
    run(sweep, 25)
    best = sweep.best
    assert 10**-3.5 < float(best.params[RATE]) < 10**-2.5
    assert best.value == max(row.value for row in sweep.rows.values() if row.state == "done")
    found = resolve(files=[str(tmp_path / "sweep" / "best.toml")]).config
    sets = ["task.env.num_envs=4", *(f"{key}={value}" for key, value in best.params.items())]
    assert found == resolve(files=["cartpole"], sets=sets).config
    assert all(given["task.env.num_envs"] == "4" for *_, given in trainings.asked)


@needs_optuna
def test_who_is_below_the_median_ends_early(sweep_of):
    trainings = FakeTrainings(near_a_thousandth)
    sweep = sweep_of(plan_of(), trainings)
    run(sweep, 20)
    pruned = {number for number, row in sweep.rows.items() if row.state == "pruned"}
    assert pruned
    assert not pruned & set(range(5)), "the first are what others are compared with"
    steps = {number: steps for number, _, steps in trainings.ended}
    assert all(STEPS / 4 <= steps[number] < STEPS for number in pruned)
    assert all(steps[number] == STEPS for number in set(steps) - pruned)


@needs_optuna
def test_without_pruning_all_are_trained_to_their_end(sweep_of):
    trainings = FakeTrainings(near_a_thousandth)
    run(sweep_of(plan_of(), trainings, prune=False), 12)
    assert [steps for *_, steps in trainings.ended] == [STEPS] * 12


@needs_optuna
def test_a_trial_s_value_is_the_mean_over_its_seeds(sweep_of):
    sweep = sweep_of(plan_of(seeds=3), FakeTrainings(lambda given, seed: 10.0 * seed))
    run(sweep, 2)
    assert [row.values for row in sweep.rows.values()] == [[0.0, 10.0, 20.0]] * 2
    assert [row.value for row in sweep.rows.values()] == [10.0] * 2


@needs_optuna
def test_the_area_favours_who_learns_early(sweep_of):
    def late_or_early(given, seed):
        return 100.0

    sweep = sweep_of(plan_of(objective="area"), FakeTrainings(late_or_early))
    run(sweep, 1)
    assert sweep.best.value == pytest.approx(52.5)  # of a straight line up to a hundred, in twenty steps


@needs_optuna
def test_it_goes_on_where_it_was_ended(sweep_of, tmp_path):
    first = FakeTrainings(near_a_thousandth)
    sweep = sweep_of(plan_of(), first)
    run(sweep, 4)
    sweep.close()
    again = FakeTrainings(near_a_thousandth)
    resumed = sweep_of(plan_of(), again)
    assert [row.state for row in resumed.rows.values()] == ["done"] * 4
    assert resumed.best.value == sweep.best.value
    run(resumed, 7)
    assert len(again.asked) == 3
    rates = {given[RATE] for *_, given in first.asked} | {given[RATE] for *_, given in again.asked}
    assert len(rates) == 7, "nothing is tried twice"


@needs_optuna
def test_a_trial_that_was_cut_is_made_again(sweep_of):
    began = threading.Event()

    def interrupted(given, seed):
        began.set()
        return 1.0

    slow = FakeTrainings(interrupted)
    sweep = sweep_of(plan_of(), slow)

    def end():
        if began.is_set():
            raise KeyboardInterrupt

    class Slow(FakeTrainings):
        def __call__(self, number, seed, sets):
            for point in super().__call__(number, seed, sets):
                yield point
                threading.Event().wait(0.02)

    sweep._train = slow = Slow(interrupted)  # noqa: SLF001 - one that takes longer
    with pytest.raises(KeyboardInterrupt):
        sweep.run(5, 2, end, every_s=0.05)
    cut = [given[RATE] for *_, given in slow.asked]
    assert len(slow.ended) == len(cut) == 2, "both trainings were ended"
    sweep.close()
    again = FakeTrainings()
    resumed = sweep_of(plan_of(), again)
    assert not resumed.rows
    run(resumed, 3)
    assert {given[RATE] for *_, given in again.asked} >= set(cut)


@needs_optuna
def test_some_may_fail_and_are_told(sweep_of):
    def some(given, seed):
        return WorkerError("the learner died") if float(given[RATE]) > 1e-2 else 5.0

    sweep = sweep_of(plan_of(), FakeTrainings(some))
    run(sweep, 10)
    failed = [row for row in sweep.rows.values() if row.state == "failed"]
    assert failed
    assert {row.why for row in failed} == {"the learner died"}
    assert float(sweep.best.params[RATE]) <= 1e-2
    sweep.close()
    assert len([row for row in sweep_of(plan_of(), FakeTrainings()).rows.values() if row.why]) == len(failed)


@needs_optuna
def test_when_all_fail_it_is_given_up(sweep_of, tmp_path):
    trainings = FakeTrainings(lambda given, seed: ConfigError("no such device"))
    with pytest.raises(WorkerError, match="first 3 trials all failed; the last one said: no such device"):
        run(sweep_of(plan_of(), trainings), 10)
    assert len(trainings.asked) == 3
    assert not (tmp_path / "sweep" / "best.toml").exists()


@needs_optuna
def test_a_training_without_an_evaluation_fails_where_those_count(sweep_of):
    sweep = sweep_of(plan_of(objective="evaluation"), FakeTrainings())
    run(sweep, 1)
    assert "no evaluation was made within 1,000 steps" in sweep.rows[0].why


@needs_optuna
def test_jobs_run_at_the_same_time(sweep_of):
    together = threading.Barrier(3)

    def meets(given, seed):
        together.wait(10)
        return 1.0

    run(sweep_of(plan_of(), FakeTrainings(meets), prune=False), 3, jobs=3)
    assert not together.broken


@needs_optuna
def test_a_folder_of_another_sweep_and_one_in_use_are_refused(sweep_of):
    sweep = sweep_of(plan_of(), FakeTrainings())
    with pytest.raises(UsageError, match="another sweep works in"):
        sweep_of(plan_of(), FakeTrainings())
    sweep.close()
    with pytest.raises(UsageError, match=r"holds another sweep \(steps, seeds differ\)"):
        sweep_of(plan_of(steps=7, seeds=2), FakeTrainings())


def test_what_can_not_be_searched_is_said_before_anything_starts():
    with pytest.raises(UsageError, match="nothing to search"):
        plan_of("task.env.num_envs=4")
    with pytest.raises(UsageError, match="give --steps"):
        plan_of(steps=None)
    with pytest.raises(ConfigError, match=r"task.algorithm.learning_rat\b.*did you mean"):
        plan_of("task.algorithm.learning_rat=loguniform(1e-5, 1e-1)")
    with pytest.raises(ConfigError, match=r"task.algorithm.discount"):
        plan_of("task.algorithm.discount=uniform(0.9, 1.5)")
    with pytest.raises(UsageError, match=r"set task\.evaluation\.every"):
        plan_of(RANGE, "task.evaluation.every=0", objective="evaluation")
    with pytest.raises(UsageError, match=r"leave out node\.peers"):
        plan_of(RANGE, 'node.peers=["127.0.0.1:7700"]')
    with pytest.raises(UsageError, match="regression"):
        plan_of("task.algorithm.learning_rate=uniform(0.1, 0.2)", "task.algorithm.name=regression")


def test_the_stop_condition_of_the_task_is_the_default():
    assert plan_of(RANGE, "task.stop.env_steps=4321", steps=None).steps == 4321


def test_without_optuna_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[sweep\]'"):
        require_optuna()
