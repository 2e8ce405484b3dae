"""A run that begins from a checkpoint: what comes along, and what must fit."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.config.node import NodeConfig
from p2pdrl.config.task import EnvConfig, NetworkConfig, TaskConfig
from p2pdrl.errors import ConfigError, UsageError
from p2pdrl.ids import new_lineage
from p2pdrl.node.accounting.progress_tracker import MOST_PRIOR_SAMPLES
from p2pdrl.node.bootstrap.first_state import first_state
from p2pdrl.node.bootstrap.joining import SwarmOrigin
from p2pdrl.node.bootstrap.starting_point import StartingPoint, read_starting_point
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.checkpoint import Checkpoint, to_bytes
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

from ..signing import tracker_of

TASK = TaskConfig(env=EnvConfig(normalize_observations=True))
SPACES = {"observation": "4 of float32", "action": "one of 2"}


def spec_of(inputs: int) -> BoardSpec:
    moments = [
        SidecarItem(f"observations.{part}", () if part == "count" else (inputs,), "float64", "moments")
        for part in ("count", "mean", "m2")
    ]
    layout = Layout((TensorEntry("actor.weight", (2, inputs)), TensorEntry("critic.weight", (1, inputs))))
    return BoardSpec(layout, SidecarLayout((SidecarItem("adam.m", (layout.size,)), *moments)))


SPEC = spec_of(4)


def checkpoint(*, task: TaskConfig = TASK, spec: BoardSpec = SPEC, count: float = 3e6) -> Checkpoint:
    inputs = spec.layout.entries[0].shape[1]
    others = Moments(count, np.full(inputs, 4.0), np.full(inputs, 2.0 * count))
    meta = {
        "layout": spec.layout.to_wire(),
        "sidecar_layout": spec.sidecar.to_wire(),
        "task": msgspec.to_builtins(task),
        "spaces": SPACES,
        "policy_version": 77,
        "env_steps": 123_456,
        "lineage": "old",
        "others_moments": base64.b64encode(
            msgspec.msgpack.encode({"observations": msgspec.msgpack.encode(others.to_wire())})
        ).decode(),
    }
    sidecar = {
        "adam.m": np.ones(spec.layout.size, np.float32),
        "observations.count": np.array(count),
        "observations.mean": np.full(inputs, 2.0),
        "observations.m2": np.full(inputs, 2.0 * count),
    }
    return Checkpoint(np.arange(spec.layout.size, dtype=np.float32), sidecar, meta)


def training_of(task: TaskConfig = TASK, spec: BoardSpec = SPEC, spaces: dict[str, str] = SPACES):
    return SimpleNamespace(spec=spec, task=task, supervisor=SimpleNamespace(spaces=spaces), lineage="")


def refusal(found: Checkpoint, **training) -> str:
    with pytest.raises(ConfigError) as refused:
        StartingPoint("old.safetensors", found).check(training_of(**training))
    return str(refused.value)


async def test_a_founder_begins_with_parameters_and_normalisation_and_nothing_else(context, kinds):
    start = StartingPoint("old.safetensors", checkpoint())
    context.progress_tracker.open_streams(SPEC.sidecar)
    origin = SwarmOrigin("founded", TASK, None)
    state, lineage = await first_state(context, training_of(), origin, None, start)
    assert state.vector.tolist() == list(range(SPEC.layout.size))
    assert (state.sidecar, state.head.policy_version) == (None, 0)
    assert lineage not in ("", "old")
    assert context.progress_tracker.total().env_steps == 0
    assert kinds() == ["started-from"]
    told = msgspec.msgpack.decode(context.progress_tracker.others_moments()["observations"])
    moments = Moments.from_wire(told)
    assert moments.count == MOST_PRIOR_SAMPLES  # of six million, of two halves that differ
    assert moments.mean.tolist() == [3.0] * 4
    assert moments.var == pytest.approx(np.full(4, 3.0))


async def test_members_of_its_lineage_take_the_normalisation_that_a_founder_began_with(context):
    context.progress_tracker.open_streams(SPEC.sidecar)
    StartingPoint("old", checkpoint()).begin(training_of(), context.progress_tracker)
    context.progress_tracker.sign()
    peer = tracker_of(2)
    peer.open_streams(SPEC.sidecar)
    peer.follow("another lineage")
    assert peer.merge_moments(context.progress_tracker.moments_since({})) == 0, "no steps are behind them"
    peer.follow(new_lineage(context.membership.public_key))
    assert peer.merge_moments(context.progress_tracker.moments_since({})) == 1
    moments = Moments.from_wire(msgspec.msgpack.decode(peer.others_moments()["observations"]))
    assert (moments.count, moments.mean.tolist()) == (MOST_PRIOR_SAMPLES, [3.0] * 4)


async def test_who_has_a_checkpoint_of_its_own_goes_on_from_that(context, training, kinds):
    own = checkpoint()
    training.spec = SPEC
    origin = SwarmOrigin("founded", TASK, None)
    state, _ = await first_state(
        context, training, origin, own, StartingPoint("gone", None, UsageError("gone"))
    )
    assert state.head.policy_version == 77
    assert "start-not-needed" in kinds()


def test_other_spaces_and_shapes_are_named():
    told = refusal(
        checkpoint(),
        spec=spec_of(8),
        spaces={"observation": "8 of float32", "action": "one of 2"},
        task=msgspec.structs.replace(TASK, env=EnvConfig(id="LunarLander-v3", normalize_observations=True)),
    )
    assert "an observation is 4 of float32 there, 8 of float32 here" in told
    assert "actor.weight is 2 x 4 there, 2 x 8 here" in told
    assert "task.env.id = 'CartPole-v1'" in told


def test_the_same_shapes_with_another_meaning_are_refused_too():
    assert "an action is one of 2 there, 2 switches here" in refusal(
        checkpoint(), spaces={**SPACES, "action": "2 switches"}
    )
    raw = msgspec.structs.replace(TASK, env=EnvConfig())
    assert "task.env.normalize_observations is True there, False here" in refusal(checkpoint(), task=raw)
    other = msgspec.structs.replace(TASK, network=NetworkConfig(activation="relu"))
    assert "task.network.activation is tanh there, relu here" in refusal(checkpoint(), task=other)


def test_another_environment_reward_and_algorithm_of_alike_spaces_are_fine():
    task = resolve(
        sets=[
            "task.env.id=My/Pole-v0",
            "task.env.normalize_observations=true",
            "task.env.kwargs={gravity = 3.0}",
            "task.algorithm.name=a2c",
        ]
    ).config.task
    StartingPoint("old", checkpoint()).check(training_of(task))


def test_what_can_not_be_read_is_told_before_anything_starts(tmp_path):
    (tmp_path / "half.safetensors").write_bytes(to_bytes(checkpoint())[:-9])
    for name in ("nothing", "half.safetensors"):
        with pytest.raises(UsageError, match=f"--from .*{name}: "):
            read_starting_point(NodeConfig(start_from=str(tmp_path / name), data_dir=str(tmp_path / "new")))
    assert read_starting_point(NodeConfig()) is None


def test_a_restarted_node_needs_the_file_no_more(tmp_path):
    kept = tmp_path / "data" / "checkpoints" / "0123456789ab"
    kept.mkdir(parents=True)
    (kept / "last.safetensors").write_bytes(to_bytes(checkpoint()))
    start = read_starting_point(NodeConfig(start_from="gone", data_dir=str(tmp_path / "data")))
    assert start is not None
    start.check_if_needed(training_of(), kept)
    with pytest.raises(UsageError, match="gone"):  # but for another task it is needed
        start.check_if_needed(training_of(), tmp_path / "data" / "checkpoints" / "ba9876543210")


def test_a_node_s_folder_is_read(tmp_path):
    (tmp_path / "last.safetensors").write_bytes(to_bytes(checkpoint()))
    start = read_starting_point(NodeConfig(start_from=str(tmp_path)))
    assert "CartPole-v1, 123,456 steps" in start.words
