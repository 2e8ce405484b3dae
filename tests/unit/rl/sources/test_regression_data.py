"""Made-up rows: reproducible, distributed as said, and cut into batches by the formula."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.sources.rows import EVALUATION_ROWS, make_rows, sequence_batch, shard_batch

BIG = RegressionConfig(rows=20_000, features=16, noise=0.5)


def test_a_seed_gives_the_same_rows_everywhere_and_another_gives_others():
    one, again, other = make_rows(BIG, 3), make_rows(BIG, 3), make_rows(BIG, 4)
    for mine, same, different in zip(one, again, other, strict=True):
        np.testing.assert_array_equal(mine.inputs_RF, same.inputs_RF)
        np.testing.assert_array_equal(mine.targets_R, same.targets_R)
        assert not np.array_equal(mine.inputs_RF, different.inputs_RF)


def test_least_squares_has_the_moments_it_says():
    train, evaluation = make_rows(BIG, 0)
    assert train.inputs_RF.shape == (20_000, 16)
    assert evaluation.inputs_RF.shape == (EVALUATION_ROWS, 16)
    truth, *_ = np.linalg.lstsq(evaluation.inputs_RF, evaluation.targets_R, rcond=None)
    np.testing.assert_allclose(evaluation.inputs_RF @ truth, evaluation.targets_R, atol=1e-5)
    residuals = train.targets_R - train.inputs_RF @ truth
    assert residuals.std() == pytest.approx(0.5, rel=0.03)
    assert train.inputs_RF.std() == pytest.approx(1.0, rel=0.02)
    # w* is drawn, so x·w* has deviation 1 on average over seeds
    signal = [make_rows(BIG, seed)[1].targets_R.std() for seed in range(30)]
    assert np.mean(signal) == pytest.approx(1.0, abs=0.15)


def test_sparse_rows_have_as_many_entries_as_asked_for():
    config = RegressionConfig(rows=2000, features=200, density=0.05)
    train, evaluation = make_rows(config, 0)
    assert np.mean(train.inputs_RF != 0) == pytest.approx(0.05, rel=0.05)
    assert np.mean([make_rows(config, seed)[1].targets_R.std() for seed in range(10)]) == pytest.approx(
        1.0, abs=0.15
    )
    assert evaluation.inputs_RF.dtype == train.targets_R.dtype == np.float32


def test_clusters_lie_around_centres_of_length_one():
    config = RegressionConfig(kind="classifier", rows=20_000, features=8, classes=4, noise=0.3)
    train, evaluation = make_rows(config, 0)
    assert train.targets_R.dtype == np.int64
    assert set(train.targets_R.tolist()) == {0, 1, 2, 3}
    for label in range(4):
        rows = train.inputs_RF[train.targets_R == label]
        assert np.linalg.norm(rows.mean(axis=0)) == pytest.approx(1.0, abs=0.03)
        assert rows.std(axis=0) == pytest.approx([0.3] * 8, rel=0.05)
        other = evaluation.inputs_RF[evaluation.targets_R == label]
        np.testing.assert_allclose(other.mean(axis=0), rows.mean(axis=0), atol=0.1)


def test_small_data_has_a_small_evaluation():
    assert len(make_rows(RegressionConfig(rows=10), 0)[1].targets_R) == 10


@pytest.mark.parametrize(("rows", "batch"), [(64, 4), (50, 4), (7, 5), (3, 8)])
def test_workers_batches_put_together_are_the_big_workers_batch(rows, batch):
    workers = 3
    config = RegressionConfig(rows=rows, batch_size=batch, workers=workers, sample="sequence")
    big = RegressionConfig(rows=rows, batch_size=batch * workers, sample="sequence")
    for update in range(20):
        parts = [sequence_batch(config, seed, update) for seed in range(workers)]
        np.testing.assert_array_equal(np.concatenate(parts), sequence_batch(big, 7, update))
        expected = np.arange(update * batch * workers, (update + 1) * batch * workers) % rows
        np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_one_worker_means_that_all_seeds_share_the_rows():
    config = RegressionConfig(rows=64, batch_size=64, sample="sequence")
    for seed in (0, 5):
        np.testing.assert_array_equal(sequence_batch(config, seed, 11), np.arange(64))


def test_a_worker_of_any_seed_has_a_place():
    config = RegressionConfig(rows=64, batch_size=4, workers=3, sample="sequence")
    np.testing.assert_array_equal(sequence_batch(config, 3_000_000_001, 2), sequence_batch(config, 1, 2))
    assert sequence_batch(config, 1, 1 << 60).max() < 64


@pytest.mark.parametrize("learners", [1, 2, 3, 5, 7, 9])
def test_shards_of_all_learners_are_the_data_set_each_row_once(learners):
    config = RegressionConfig(rows=100, shards=7, sample="shards", batch_size=100)
    own = [shard_batch(config, rank, learners, 4).tolist() for rank in range(learners)]
    assert sorted(row for rows in own for row in rows) == list(range(100))
    assert sum(not rows for rows in own) == max(learners - 7, 0)
    assert {len(shard_batch(config, rank, 7, 0)) for rank in range(7)} == {14, 15}


def test_minibatches_of_shards_are_the_same_rows_for_any_number_of_learners():
    config = RegressionConfig(rows=100, shards=7, sample="shards", batch_size=4)
    seen = np.zeros(100)
    for update in range(30):
        whole = sorted(shard_batch(config, 0, 1, update).tolist())
        assert len(set(whole)) == 28
        seen[whole] += 1
        for learners in (2, 3, 8):
            parts = [shard_batch(config, rank, learners, update).tolist() for rank in range(learners)]
            assert sorted(row for rows in parts for row in rows) == whole
    assert seen.min() >= 7
    assert seen.max() <= 10


def trainer(**options):
    algorithm = RegressionConfig(rows=60, features=5, shards=4, sample="shards", batch_size=60, **options)
    return build_trainer(TaskConfig(algorithm=algorithm), seed=1, device="cpu")


def test_a_learner_takes_the_shards_that_it_is_told():
    learner = trainer()
    assert learner.step().env_steps == 60
    learner.source.share(1, 3, 1 / 3)
    stats = learner.step()
    assert stats.env_steps == 15
    assert stats.metrics["shards"] == 1.0
    learner.source.share(0, 3, 1 / 3)
    assert learner.step().env_steps == 30


def test_a_learner_beyond_the_shards_changes_nothing_by_itself():
    learner = trainer(optimizer="adam")
    learner.source.share(4, 5, 1 / 5)
    before = learner.flat.copy()
    stats = learner.step()
    assert stats.env_steps == 0
    assert stats.metrics["shards"] == stats.metrics["loss"] == 0.0
    np.testing.assert_array_equal(learner.flat, before)
