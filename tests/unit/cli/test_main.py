"""The command's frame: summaries, laziness, exit codes."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import click
import pytest

from p2pdrl.cli.main import COMMANDS, LazyGroup, cli, run_command


@pytest.mark.parametrize("name", COMMANDS)
def test_each_summary_is_the_first_line_of_the_commands_own_help(name):
    command = LazyGroup().get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name or name == "eval"
    assert COMMANDS[name][1] == command.help.splitlines()[0]


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from p2pdrl.cli import main\n"
        "assert main.run_command(main.cli, 'p2pdrl', ['--help']) == 0\n"
        "heavy = {'rich', 'aiohttp', 'numpy', 'torch', 'msgspec', 'cryptography'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout


def test_the_first_help_keeps_its_columns(p2pdrl):
    lines = p2pdrl("--help").stdout.splitlines()
    assert "    p2pdrl node --peers HOST:7700        on every other" in lines
    assert not any("\\b" in line for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_within_100_columns(p2pdrl, name):
    result = p2pdrl(name, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_module_runs_too():
    done = subprocess.run(
        [sys.executable, "-m", "p2pdrl", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("p2pdrl ")


@pytest.mark.parametrize("args", [["stats"], ["status", "--nonsense"], ["wait"], ["wait", "--healthy", "x"]])
def test_a_bad_command_line_ends_with_2(p2pdrl, args):
    result = p2pdrl(*args)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_a_mistyped_command_gets_a_guess(p2pdrl):
    assert "did you mean status?" in p2pdrl("stauts").stderr


def test_interrupting_ends_with_130(p2pdrl, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("p2pdrl.cli.main.cli.main", interrupted)
    assert p2pdrl("status").exit_code == 130


def test_output_into_a_closed_pipe_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m p2pdrl config init | head -c 10", shell=True, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr


def shell(line):
    return subprocess.run(
        f"{sys.executable} -m p2pdrl {line}",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("line", ["config init", "presets --json", "presets", "presets --help"])
def test_output_that_cant_be_written_is_told_in_one_line(line):
    done = shell(f"{line} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "p2pdrl: can't write to standard output: no space left on device\n"


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&-"])
def test_a_closed_output_takes_all(closed):
    done = shell(f"presets {closed}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_errors_of_other_files_are_not_taken_for_those_of_the_output():
    @click.command()
    def broken():
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sys.stdout
    with pytest.raises(OSError, match="No space left"):
        run_command(broken, "broken", [])
    assert sys.stdout is before
