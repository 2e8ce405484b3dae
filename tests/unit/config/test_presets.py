"""Every preset loads, says what it is, and is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdrl.config import loader, mode
from p2pdrl.config.loader import is_preset_name, preset_names, preset_path, preset_summary, resolve
from p2pdrl.config.mode import protocol_of
from p2pdrl.config.strategy import AdpsgdConfig, PipelineConfig
from p2pdrl.config.task import A2CConfig, ImpalaConfig, PPOConfig
from p2pdrl.errors import ConfigError

SYSTEMS = {
    "mapreduce_sync": "server_sync",
    "ddp": "grad_average",
    "ddppo": "grad_average",
    "downpour": "server_async",
    "amb_pp": "pipeline",
    "amb_pp_impala": "pipeline",
}
"""Presets that have the name of a system instead of their strategy's."""
STRATEGIES = SYSTEMS | {name: name for name in mode.STRATEGIES if name in preset_names()}

ANY_MACHINES = {"node.learner.microbatches", "node.learner.split_devices"}
"""What a preset may say of a node: keys whose value suits every machine (``auto``, the processor)."""


def test_the_presets_are_there() -> None:
    assert {"cartpole", "ppo", "a2c", "impala", "accumulate", "model_split", *STRATEGIES} <= set(
        preset_names()
    )


@pytest.mark.parametrize(("name", "strategy"), STRATEGIES.items())
def test_each_strategys_preset_is_a_whole_task(name: str, strategy: str) -> None:
    resolved = resolve(files=[name])
    task = resolved.config.task
    assert protocol_of(task.strategy) == strategy
    assert task.env.id == "CartPole-v1"
    assert task.stop.env_steps
    assert {"task.env.id", "task.algorithm.name", "task.strategy.name"} <= resolved.given("task")


def test_every_strategy_has_a_preset() -> None:
    assert set(STRATEGIES.values()) == set(mode.STRATEGIES)


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_loads_and_says_what_it_is(name: str) -> None:
    resolved = resolve(files=[name])
    assert resolved.given()
    assert not resolved.given("node") - ANY_MACHINES, "a preset is the swarm's half only"
    assert 20 < len(preset_summary(name)) < 140


def test_presets_are_what_their_names_say() -> None:
    cartpole = resolve(files=["cartpole"]).config.task
    assert cartpole.env.id == "CartPole-v1"
    assert cartpole.stop.mean_return == 475
    assert isinstance(cartpole.algorithm, PPOConfig)
    assert isinstance(resolve(files=["ppo"]).config.task.algorithm, PPOConfig)
    assert isinstance(resolve(files=["a2c"]).config.task.algorithm, A2CConfig)
    assert isinstance(resolve(files=["impala"]).config.task.algorithm, ImpalaConfig)
    assert resolve(files=["adpsgd"]).config.task.strategy == AdpsgdConfig()
    pipeline = PipelineConfig(microbatches="auto", backend="stream")
    assert resolve(files=["amb_pp"]).config.task.strategy == pipeline
    assert resolve(files=["accumulate"]).config.node.learner.microbatches == "auto"
    assert resolve(files=["model_split"]).config.node.learner.split_devices == ("cpu", "cpu")


@pytest.mark.parametrize("name", ["../ppo", "ppo.toml", "/etc/passwd", "", "."])
def test_paths_are_not_presets(name: str) -> None:
    assert not is_preset_name(name)
    with pytest.raises(ConfigError):
        preset_path(name)


def test_a_wheel_carries_its_presets_beside_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "p2pdrl" / "config" / "presets"
    folder.mkdir(parents=True)
    (folder / "one.toml").write_text("# The one.\n")
    (tmp_path / "config").mkdir()  # somebody else's
    monkeypatch.setattr(loader, "__file__", str(folder.parent / "presets.py"))
    assert preset_names() == ["one"]
    assert preset_summary("one") == "The one."


def test_a_foreign_config_folder_holds_no_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "theirs.toml").write_text("")
    monkeypatch.setattr(loader, "__file__", str(tmp_path / "p2pdrl" / "config" / "presets.py"))
    assert preset_names() == []
    with pytest.raises(ConfigError, match="none"):
        preset_path("theirs")
