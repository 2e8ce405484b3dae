"""Options that all commands share, asked of every command that there is."""

from __future__ import annotations

import json

import click
import pytest

from p2pdrl.cli.main import LazyGroup, cli

ALONE = {
    "node", "swarm up", "doctor", "pipeline plan", "keygen", "key rotate", "key show", "presets",
    "presets show", "config show", "config validate", "config init", "config presets",
    "config presets show", "completion", "sweep", "swarm down",
}  # fmt: skip
"""Commands that talk to no running node, or to peers by other options."""
NO_JSON = {"node", "completion", "config init"}
"""Those that print a log, a script, a TOML file."""


def commands(group=None, path=()):
    """Every command that can be run, by its words."""
    group = group or LazyGroup()
    for word in group.list_commands(click.Context(cli)):
        found = group.get_command(click.Context(cli), word)
        if isinstance(found, click.Group):
            yield from commands(found, (*path, word))
        if not isinstance(found, click.Group) or found.invoke_without_command:
            yield " ".join((*path, word)), found


def options(command):
    return {name: one for one in command.params for name in (*one.opts, *one.secondary_opts)}


FOUND = dict(commands())
GROUPS = {words: found for words, found in FOUND.items() if isinstance(found, click.Group)}


def test_names_above_are_commands():
    assert FOUND.keys() >= ALONE | NO_JSON


@pytest.mark.parametrize("words", FOUND)
def test_who_talks_to_a_node_is_told_which(words):
    found = options(FOUND[words])
    assert ("--api" in found) == (words not in ALONE)
    if "--api" not in found:
        return
    assert {"--swarm-key-file", "--data-dir"} <= found.keys()
    assert found["--api"].envvar == "P2PDRL_API"
    assert found["--api"].metavar == "HOST:PORT"
    assert found["--swarm-key-file"].envvar == "P2PDRL_SWARM_KEY_FILE"


@pytest.mark.parametrize("words", FOUND)
def test_every_command_has_json(words):
    found = options(FOUND[words])
    assert ("--json" in found) == (words not in NO_JSON)
    if "--json" in found:
        assert found["--json"].is_flag
        assert found["--json"].name == "as_json"


@pytest.mark.parametrize("words", FOUND)
def test_every_option_has_a_meaning_and_a_word_for_its_value(words):
    for one in FOUND[words].params:
        if isinstance(one, click.Option) and not one.hidden:
            assert one.help, one.opts
            assert one.is_flag or one.count or one.metavar or isinstance(one.type, click.Choice), one.opts


RANGED = {
    f"{words} {name}": one.type
    for words, command in FOUND.items()
    for name, one in options(command).items()
    if isinstance(one.type, click.FloatRange)
}


@pytest.mark.parametrize("words", RANGED)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_in_a_range_are_finite(words, text):
    with pytest.raises(click.BadParameter):
        RANGED[words].convert(text, None, None)


def test_there_are_numbers_in_a_range():
    assert RANGED.keys() >= {
        "wait --timeout", "status --interval", "top --interval", "leave --timeout", "mode set --wait",
        "roles set --wait", "pipeline trace --seconds", "key rotate --overlap",
    }  # fmt: skip


@pytest.mark.parametrize("words", GROUPS)
def test_options_of_a_group_are_refused_before_its_subcommands(p2pdrl, words):
    """They would have no effect there."""
    for subcommand in GROUPS[words].commands:
        result = p2pdrl(*words.split(), "--json", subcommand, "x")
        assert result.exit_code == 2
        assert f"write the options behind `{subcommand}`" in result.stderr
        assert result.stdout == ""


def test_nobody_is_banned_in_another_swarm_than_the_one_that_was_named(p2pdrl, served, monkeypatch):
    monkeypatch.setenv("P2PDRL_API", served.address)
    assert p2pdrl("peers", "--api", "127.0.0.1:1", "ban", "node-2").exit_code == 2
    assert served.node.done == []
    # what the environment says, the subcommand reads itself
    assert p2pdrl("peers", "ban", "node-2").exit_code == 0


ACTING = [
    (["pause"], {"paused": True, "scope": "node"}),
    (["resume"], {"paused": False, "scope": "node"}),
    (["pause", "--swarm"], {"paused": True, "scope": "swarm"}),
    (["halt", "--reason", "enough"], {"halted": True, "reason": "enough"}),
    (["checkpoint"], {}),
    (["leave", "--timeout", "0"], {"left": False}),
    (["stop", "set", "env_steps=1000"], {}),
    (["roles", "set", "actor", "--wait", "0"], {"roles": ["actor"], "at_work": False}),
    (["mode", "set", "local", "--no-wait"], {"mode": "local", "epoch": 2, "followed": False}),
    (["peers", "ban", "node-2", "--reason", "lies"], {"name": "node-2", "banned": True, "reason": "lies"}),
]


@pytest.mark.parametrize(("arguments", "told"), ACTING, ids=lambda one: " ".join(one) if one else "")
def test_what_acts_tells_programs_what_it_did(p2pdrl, served, arguments, told):
    result = p2pdrl(*arguments, "--json", "--api", served.address)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert told.items() <= document.items()
    if arguments[0] == "stop":
        assert document["stop"]["env_steps"] == 1000
    if arguments[0] == "checkpoint":
        assert document["path"].endswith("last.safetensors")
    assert served.node.done


def test_an_unbanned_node_and_a_made_key_are_json_too(p2pdrl, served, tmp_path):
    served.node.members[1]["state"] = "banned"
    told = json.loads(p2pdrl("peers", "unban", "node-2", "--json", "--api", served.address).stdout)
    assert (told["name"], told["banned"]) == ("node-2", False)
    file = str(tmp_path / "k")
    told = json.loads(p2pdrl("keygen", file, "--json").stdout)
    assert told == {"swarm_key_file": file, "operator_file": f"{file}.operator"}
    other = str(tmp_path / "o")
    told = json.loads(p2pdrl("keygen", other, "--operator-only", "--name", "eve", "--json").stdout)
    assert told["operator"].endswith(":eve")


def test_a_policy_may_come_from_the_node_that_the_environment_names(p2pdrl, served, monkeypatch, tmp_path):
    monkeypatch.setenv("P2PDRL_API", served.address)
    assert p2pdrl("eval", "--history").exit_code == 0
    # a checkpoint counts over it
    missing = p2pdrl("eval", str(tmp_path / "none.safetensors"))
    assert (missing.exit_code, "there is no checkpoint" in missing.stderr) == (2, True)
    both = p2pdrl("eval", str(tmp_path / "none.safetensors"), "--api", served.address)
    assert "either a CHECKPOINT" in both.stderr
