"""What trainers give is what their algorithms then bring."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig, RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import WholeBatch
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.messages import RowSpec
from p2pdrl.rl.pipeline.parts import policy_parts
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.sequential import chain
from p2pdrl.tensors.optimizers import Adam

from ..policies import POLICIES
from .pipelines import CPU, MODELS, PPO, Pipeline, Pipes, framed_ring, make_case, make_plan, step_with
from .test_model_split import TASKS


@pytest.mark.parametrize("name", [*TASKS, "least_squares"])
def test_batches_are_as_promised(name):
    task = TASKS.get(name, TaskConfig(algorithm=RegressionConfig()))
    trainer = build_trainer(task, 1, "cpu")
    parts = trainer.parts()
    checked = []

    class Checking:
        def __init__(self, inner):
            self._inner = inner

        def gradients(self, batch, objective):
            parts.check(batch)
            assert type(objective) is type(parts.objective)
            assert set(batch.targets) == set(parts.targets)
            checked.append(len(batch.inputs))
            return self._inner.gradients(batch, objective)

        def metrics(self):
            return {}

    trainer.engine = Checking(trainer.engine)
    for _ in range(2):
        trainer.step()
    trainer.close()
    assert checked
    assert max(checked) <= parts.most_rows


@pytest.mark.parametrize("name", MODELS)
def test_outputs_look_as_they_are_said_to(name):
    case, parts = make_case(name)
    x = case.batch.inputs
    for block, spec in zip(parts.blocks, parts.outputs, strict=True):
        x = block(x, case.batch.context)
        spec.check(x, "an output")
    torch.testing.assert_close(
        parts.unpack(parts.blocks[-1], x).values, case.module.values(case.batch.inputs, case.batch.context)
    )
    torch.testing.assert_close(x, chain(parts.blocks, case.batch.inputs, case.batch.context))


def test_pictures_are_bytes_and_actions_have_bounds():
    _, parts = make_case("cnn")
    assert parts.targets["actions"] == RowSpec((), torch.int64, 6)
    task = TaskConfig(env=EnvConfig(num_envs=2), network=NetworkConfig(hidden=(4,)))
    trainer = build_trainer(task, 1, "cpu")
    assert trainer.parts().inputs == RowSpec((4,), torch.float32)
    trainer.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_longest_message_is_known(name):
    case, parts = make_case(name, torch.float32)
    longest = []

    class Watching(Pipes):
        def send(self, way, message, tensors):
            longest.append(sum(map(len, tensors)))
            super().send(way, message, tensors)

    with Pipeline(parts, make_plan(parts, 3, 1), lambda ranks: framed_ring(ranks, Watching)) as pipeline:
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)
        activation = max(longest)
        pipeline.head.collect(state=True, spread=True)
    assert activation <= parts.activation_nbytes < 4 * activation
    assert max(longest) <= parts.longest_nbytes
    assert parts.longest_nbytes < 4 * max(longest)


def test_a_share_is_a_copy():
    case, parts = make_case("mlp", torch.float32)
    share = StageParameters(parts, PipelinePlan(len(parts.blocks), (3,), "1f1b", 1, 2), 1, CPU)
    before = case.flat.parameters_D.clone()
    share.gradients_P.fill_(1.0)
    share.step(1.0, 0.1, 10.0)
    assert torch.equal(case.flat.parameters_D, before)
    assert not case.flat.gradients_D.any()
    WholeBatch(case.flat, case.forward).gradients(case.batch, case.objective)
    assert (share.gradients_P == 1.0).all()


def test_a_rank_without_parameters_is_refused():
    spec, network = POLICIES["lstm on nothing"]
    policy = ActorCritic(spec, network, 0)
    flat = FlatModule(policy, CPU)
    adam = Optimizer(Adam(), flat)
    parts = policy_parts(policy, PPO, adam, steps=5, most_rows=4)
    with pytest.raises(ConfigError, match="rank 0 has no parameters"):
        StageParameters(parts, PipelinePlan(len(parts.blocks), (1,), "1f1b", 1, 2), 0, CPU)
