"""``p2pdrl config`` and the options of ``p2pdrl node``."""

from __future__ import annotations

import errno
import json
import os
import sys
import tomllib
import types

import pytest


def test_show_is_toml_that_gives_the_same_again(p2pdrl, tmp_path):
    shown = p2pdrl("config", "show", "--set", "task.env.num_envs=3").stdout
    assert tomllib.loads(shown)["task"]["env"]["num_envs"] == 3
    path = tmp_path / "again.toml"
    path.write_text(shown)
    assert p2pdrl("config", "show", "--config", str(path)).stdout == shown


def test_show_origin_and_json(p2pdrl):
    lines = p2pdrl("config", "show", "--origin", "--set", "node.name=bob").stdout.splitlines()
    assert any(line.startswith('node.name = "bob"') and line.endswith(" set") for line in lines)
    document = json.loads(p2pdrl("config", "show", "--origin", "--json", "--set", "node.name=bob").stdout)
    assert document["config"]["node"]["name"] == "bob"
    assert document["origins"]["node.name"] == "set"


def test_validate(p2pdrl, tmp_path):
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[task.env]\nid = 'CartPole-v1'\n")
    bad.write_text("[task.env]\nidd = 'CartPole-v1'\n")
    assert p2pdrl("config", "validate", str(good)).exit_code == 0
    result = p2pdrl("config", "validate", str(bad))
    assert result.exit_code == 2
    assert "task.env.idd" in result.stderr
    assert json.loads(p2pdrl("config", "validate", "--json", str(good)).stdout)["valid"] is True
    result = p2pdrl("config", "validate", "--json", str(bad))
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert (document["valid"], "task.env.idd" in document["error"]) == (False, True)


def test_init_writes_a_valid_file_once(p2pdrl, tmp_path):
    path = tmp_path / "mine.toml"
    assert p2pdrl("config", "init", str(path)).exit_code == 0
    assert p2pdrl("config", "validate", str(path)).exit_code == 0
    assert p2pdrl("config", "init", str(path)).exit_code == 2
    assert p2pdrl("config", "init", str(tmp_path / "no" / "x.toml")).exit_code == 2
    assert tomllib.loads(p2pdrl("config", "init").stdout) is not None


def test_init_on_a_full_disk_leaves_nothing_behind(p2pdrl, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "mine.toml"
    monkeypatch.setattr(os, "fsync", full)
    result = p2pdrl("config", "init", str(path))
    assert result.exit_code == 1
    assert result.stderr == f"p2pdrl: can't write {path}: the disk is full: free some space\n"
    assert list(tmp_path.iterdir()) == []


def test_a_preset_is_shown_with_its_story_and_all_of_its_task(p2pdrl):
    shown = p2pdrl("presets", "show", "cartpole").stdout
    assert "until the swarm's policy balances it" in shown
    assert "* task.stop.mean_return = 475.0" in shown
    assert "  task.algorithm.clip = 0.2" in shown
    assert "task.algorithm.discount" in shown
    assert "node." not in shown.partition("file:")[2].partition("use:")[2].partition("\n")[2]
    found = json.loads(p2pdrl("presets", "show", "accumulate", "--json").stdout)
    assert "node.learner.microbatches" in found["given"]
    assert found["config"]["node"]["learner"]["microbatches"] == "auto"
    assert found["about"].startswith("PPO with large minibatches")


def test_an_unknown_preset_names_the_nearest(p2pdrl):
    wrong = p2pdrl("presets", "show", "cartpol")
    assert (wrong.exit_code, "did you mean cartpole?" in wrong.stderr) == (2, True)


def test_presets_are_listed(p2pdrl):
    assert p2pdrl("presets").stdout == p2pdrl("config", "presets").stdout
    assert "cartpole" in p2pdrl("config", "presets").stdout
    assert "CartPole" in json.loads(p2pdrl("config", "presets", "--json").stdout)["cartpole"]


@pytest.fixture
def daemon(monkeypatch):
    """Stands in for the daemon; returns the configurations it was run with."""
    runs = []
    module = types.ModuleType("p2pdrl.node.daemon")
    module.run = lambda resolved, _invite: runs.append(resolved) or 0
    monkeypatch.setitem(sys.modules, "p2pdrl.node.daemon", module)
    return runs


def test_flags_of_node_reach_the_daemon(p2pdrl, daemon, tmp_path):
    result = p2pdrl(
        "node", "--peers", "a:1,b:2", "--peers", "c:3", "--name", "x", "--listen", "127.0.0.1:0",
        "--device", "cpu", "--from", "old.safetensors",
        "--data-dir", str(tmp_path), "--log-level", "debug", "--keep-running", "--set", "task.env.num_envs=2",
        "--config", "cartpole",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    node = daemon[0].config.node
    assert node.peers == ("a:1", "b:2", "c:3")
    assert (node.name, node.listen, node.learner.device) == ("x", "127.0.0.1:0", "cpu")
    assert node.start_from == "old.safetensors"
    assert (node.log.level, node.keep_running, node.insecure) == ("debug", True, False)
    assert daemon[0].config.task.env.num_envs == 2
    assert daemon[0].origins["node.name"].kind == "flag"
    assert "node.insecure" not in daemon[0].given("node")


@pytest.mark.parametrize("given", [[""], [","], [" , "], ["", ""]])
def test_peers_that_name_nobody_found_no_swarm(p2pdrl, daemon, given):
    """As ``--peers "$SEEDS"`` where that isn't set."""
    for command in ("node", "doctor"):
        result = p2pdrl(command, *(word for value in given for word in ("--peers", value)))
        assert result.exit_code == 2
        assert "--peers names nobody: write HOST:PORT" in result.stderr
    assert daemon == []
    assert p2pdrl("node", "--peers", "", "--peers", ",a:1").exit_code == 0
    assert daemon[0].config.node.peers == ("a:1",)


def test_the_daemons_code_is_the_commands(p2pdrl, daemon):
    sys.modules["p2pdrl.node.daemon"].run = lambda _resolved, _invite: 4
    assert p2pdrl("node").exit_code == 4


def test_a_bad_key_never_reaches_the_daemon(p2pdrl, daemon):
    result = p2pdrl("node", "--set", "task.env.idd=x")
    assert result.exit_code == 2
    assert "did you mean task.env.id" in result.stderr
    assert daemon == []


def test_the_matrix_is_shown_and_given(p2pdrl):
    shown = p2pdrl("presets", "--matrix").stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert "✓" in shown
    assert "take a strategy that exchanges parameters" in " ".join(shown.split())
    cells = json.loads(p2pdrl("presets", "--matrix", "--json").stdout)
    assert set(cells[0]) == {"algorithm", "strategy", "placement", "possible", "reason"}
    assert all(cell["possible"] == (not cell["reason"]) for cell in cells)
    found = {(cell["algorithm"], cell["strategy"], cell["placement"]): cell["possible"] for cell in cells}
    assert found["ppo", "pipeline", "stages"]
    assert not found["sac", "grad_average", "inline"]
