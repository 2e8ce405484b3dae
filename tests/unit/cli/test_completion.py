"""What the shell completes."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from click.shell_completion import ShellComplete

from p2pdrl.cli.main import COMMANDS, cli, run_command
from p2pdrl.config.loader import preset_names


def completed(words, begun):
    found = ShellComplete(cli, {}, "p2pdrl", "_P2PDRL_COMPLETE").get_completions(words, begun)
    return [item.value for item in found], {item.type for item in found}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_can_read_its_script(shell, capfd):
    assert run_command(cli, "p2pdrl", ["completion", shell]) == 0
    script = capfd.readouterr().out
    assert "_P2PDRL_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=20)


def test_commands_options_and_presets_are_completed():
    assert set(completed([], "")[0]) == set(COMMANDS)
    assert completed(["node"], "--pee")[0] == ["--peers"]
    assert completed(["node", "--config"], "lun")[0] == [n for n in preset_names() if n.startswith("lun")]
    assert completed(["node", "--config"], "./my")[1] == {"file"}


def test_another_shell_is_refused_in_words(capfd):
    assert run_command(cli, "p2pdrl", ["completion", "tcsh"]) == 2
    assert "bash" in capfd.readouterr().err
