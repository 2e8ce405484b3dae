"""One process, a thread for each device: whole trainings go as they go in one piece."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch

from p2pdrl.config.task import (
    A2CConfig,
    EnvConfig,
    GradientsConfig,
    NetworkConfig,
    PPOConfig,
    RegressionConfig,
    TaskConfig,
)
from p2pdrl.errors import ConfigError, PeerUnreachableError
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.pipeline import model_split
from p2pdrl.rl.pipeline.links import ring
from p2pdrl.rl.pipeline.model_split import ModelSplit
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.registry import build_trainer

from .pipelines import CPU, even_cuts, make_case, make_plan

ENV = EnvConfig(num_envs=4)
PPO = PPOConfig(unroll_steps=32, epochs=2, minibatches=3)
TASKS = {
    "ppo": TaskConfig(env=ENV, algorithm=PPO),
    "ppo-transformer": TaskConfig(
        env=ENV, network=NetworkConfig(kind="transformer", layers=1, heads=2, width=8), algorithm=PPO
    ),
    "ppo-lstm": TaskConfig(
        env=ENV,
        network=NetworkConfig(hidden=(8, 8), core="lstm", core_size=8),
        algorithm=PPOConfig(unroll_steps=32, epochs=2, minibatches=2),
    ),
    "a2c-control": TaskConfig(
        env=EnvConfig(id="Pendulum-v1", num_envs=4, normalize_observations=True), algorithm=A2CConfig()
    ),
    "classifier": TaskConfig(algorithm=RegressionConfig(kind="classifier", hidden=(16, 8))),
}
LAYOUTS = [("1f1b", 2, 2), ("gpipe", 3, 3), ("interleaved", 2, 1)]


def train(task, updates, layout=None, checkpoint=False):
    trainer = build_trainer(task, 3, "cpu")
    split = None
    if layout is not None:
        schedule, stages, ranks = layout
        parts = trainer.parts()
        plan = PipelinePlan(len(parts.blocks), even_cuts(len(parts.blocks), stages), schedule, 2, ranks)
        split = ModelSplit(parts, plan, [CPU] * ranks, checkpoint_activations=checkpoint)
        trainer.engine = trainer.stepper = split
    try:
        curve = [trainer.step().metrics for _ in range(updates)]
    finally:
        trainer.close()
        if split is not None:
            split.close()
    return trainer, curve


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_the_same_curve_with_and_without_the_pipeline(name):
    whole, curve = train(TASKS[name], 3)
    for layout in LAYOUTS:
        split, other_curve = train(TASKS[name], 3, layout, checkpoint=layout[0] == "gpipe")
        np.testing.assert_allclose(split.flat, whole.flat, rtol=1e-4, atol=1e-5)
        for key, array in whole.sidecar().items():
            np.testing.assert_allclose(split.sidecar()[key], array, rtol=1e-3, atol=1e-5, err_msg=key)
        for metrics, others in zip(curve, other_curve, strict=True):
            metrics.pop("gradient_noise_scale", None)  # it takes whole gradients
            assert set(others) - set(metrics) == {
                "microbatches",
                "stages",
                "bubble",
                "activation_bytes",
                "step_s",
            }
            for key, value in metrics.items():
                assert others[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


class Slots:
    """A clock for each thread, which only computing moves: each forward and each backward takes a slot."""

    def __init__(self):
        self._own = threading.local()

    def now(self):
        return getattr(self._own, "now", 0.0)

    def compute(self, *_):
        self._own.now = self.now() + 1.0

    def wait(self, until):
        self._own.now = max(self.now(), until)

    def shares(self):
        """Parts of a model that take their slots."""
        slots = self

        class Share(StageParameters):
            def forward(self, *args, **options):
                output = super().forward(*args, **options)
                slots.compute()
                output.register_hook(slots.compute)
                return output

        return Share

    def ring(self, ranks):
        """Links over which nothing takes time; who waits for a message is as late as it is."""
        down, up = ([queue.SimpleQueue() for _ in range(ranks)] for _ in range(2))
        return [
            Timed(
                links,
                self,
                {"down": down[rank - 1], "up": up[(rank + 1) % ranks]},
                {"down": down[rank], "up": up[rank]},
            )
            for rank, links in enumerate(ring(ranks))
        ]


class Timed:
    """Links beside which the senders' times travel, message by message."""

    def __init__(self, links, slots, incoming, outgoing):
        self._links, self._slots, self._incoming, self._outgoing = links, slots, incoming, outgoing
        self.close = links.close

    def send(self, way, *message):
        self._outgoing[way].put(self._slots.now())
        self._links.send(way, *message)

    def receive(self, way, *args):
        message = self._links.receive(way, *args)
        self._slots.wait(self._incoming[way].get_nowait())
        return message


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "microbatches"),
    [
        ("1f1b", 2, 2, 4),
        ("1f1b", 2, 2, 1),
        ("1f1b", 3, 3, 4),
        ("1f1b", 4, 4, 8),
        ("1f1b", 1, 1, 4),
        ("gpipe", 2, 2, 4),
        ("interleaved", 4, 2, 4),
    ],
)
def test_a_step_takes_as_many_slots_as_the_pipeline_is_long(
    schedule, stages, ranks, microbatches, monkeypatch
):
    """M + S − 1 forwards and as many backwards, where one device has S · M of each to compute.

    A rank with several stages computes M for each of them, and waits no longer than with one.
    """
    slots = Slots()
    monkeypatch.setattr(model_split, "ring", slots.ring)
    case, parts = make_case("mlp")
    plan = make_plan(parts, stages, microbatches, schedule, ranks)
    split = ModelSplit(parts, plan, [CPU] * ranks, clock=slots.now, make_share=slots.shares())
    computed = microbatches * stages // ranks
    for _ in range(3):
        split.gradients(case.batch, case.objective)
        split.step(parts.optimizer, learning_rate=0.1, max_grad_norm=1.0, samples=11, left=1)
        metrics = split.metrics()
        assert metrics["step_s"] == 2 * (computed + ranks - 1)
        assert metrics["bubble"] == pytest.approx((ranks - 1) / (computed + ranks - 1))
    split.close()


def test_in_bf16_it_learns_as_well():
    task = TaskConfig(
        algorithm=RegressionConfig(kind="classifier", hidden=(16, 8)),
        gradients=GradientsConfig(precision="bf16"),
    )
    _, curve = train(task, 60)
    _, other_curve = train(task, 60, ("1f1b", 3, 3))
    assert other_curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    assert other_curve[-1]["loss"] == pytest.approx(curve[-1]["loss"], rel=0.05)


def test_an_error_in_a_thread_is_raised_where_the_trainer_runs():
    case, parts = make_case("mlp")
    split = ModelSplit(parts, make_plan(parts, 3, 2), [CPU] * 3)
    case.batch.targets["actions"][4] = 99  # an index out of bounds, which this process didn't check
    with pytest.raises((IndexError, RuntimeError), match=r"index 99|out of bounds"):
        split.gradients(case.batch, case.objective)
    with pytest.raises((IndexError, RuntimeError, PeerUnreachableError)):
        split.gradients(case.batch, case.objective)
    split.close()


def test_closing_twice_and_using_it_then():
    case, parts = make_case("mlp")
    split = ModelSplit(parts, make_plan(parts, 2, 2), [CPU] * 2)
    split.gradients(case.batch, case.objective)
    split.step(parts.optimizer, learning_rate=0.1, max_grad_norm=1.0, samples=11, left=0)
    assert split.metrics()["stages"] == 2.0
    split.close()
    split.close()
    with pytest.raises(PeerUnreachableError, match="has ended"):
        split.gradients(case.batch, case.objective)


def test_every_rank_needs_a_device():
    _, parts = make_case("mlp")
    with pytest.raises(ConfigError, match="over 3 devices"):
        ModelSplit(parts, make_plan(parts, 3, 2), [CPU] * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no GPU")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lstm"])
def test_on_gpus(name, precision):
    """Two of them where there are two; else one that does the work of both."""
    devices = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(2)]
    results = []
    for where in ([CPU] * 2, devices):
        case, parts = make_case(name, torch.float32, precision=precision)
        split = ModelSplit(parts, make_plan(parts, 2, 4), where)
        for _ in range(3):
            terms = split.gradients(case.batch, case.objective)
            split.step(parts.optimizer, learning_rate=1e-3, max_grad_norm=1.0, samples=11, left=0)
        results.append((terms, case.flat.numpy()))
        split.close()
    (terms, flat), (other_terms, other_flat) = results
    bound = 1e-3 if precision == "float32" else 5e-2
    torch.testing.assert_close(other_terms, terms, rtol=bound, atol=bound)
    np.testing.assert_allclose(other_flat, flat, rtol=0, atol=5e-3)
