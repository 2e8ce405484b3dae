"""Every command that README and docs tell people to type is one that there is, with options that it takes.

`tests/integration/test_documented_commands.py` types them.
"""

from __future__ import annotations

import os
import re

import click
import pytest

from p2pdrl.cli.main import cli
from p2pdrl.config.loader import resolve

from ...documented import NOT_RUN, PAGES, ROOT, RUNS, blocks, commands, documented, typed_as_programs


def cases():
    for page in PAGES:
        for words in commands(page):
            if words[0] in {"p2pdrl", "make"} or words[0].startswith("scripts/"):
                yield pytest.param(words, id=f"{page.name}: {' '.join(words)}")


STANDS_FOR = {"HOURS": "24", "CHECKPOINT": __file__}
"""What placeholders that click would refuse stand for."""


def parse(words):
    """Have click read a command as if it was typed, without doing what it says; return its parameters."""
    command, context = cli, None
    words = [STANDS_FOR.get(word, word) for word in words]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        context = click.Context(command, parent=context, info_name=command.name)
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
    try:
        return command.make_context(command.name, words, parent=context).params
    except click.exceptions.Exit:  # --help, --version
        return {}


@pytest.mark.parametrize("words", list(cases()))
def test_it_is_a_command(words):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0].startswith("scripts/"):
        source = (ROOT / words[0]).read_text() + "".join(
            path.read_text() for path in (ROOT / "scripts" / "support").glob("*.py")
        )
        for word in words[1:]:
            if word.startswith("--"):
                assert f'"{word.partition("=")[0]}"' in source, f"{words[0]} has no {word}"
    else:
        params = parse(words[1:])
        files = [name for name in params.get("files", ()) if not name.endswith(".toml")]
        if files:
            resolve(files=files, sets=params.get("sets", ()), environ={})


def test_there_are_many():
    assert len(list(cases())) > 40


def test_each_is_run_or_there_is_a_reason():
    assert {*RUNS, *NOT_RUN} == documented().keys()
    assert not RUNS.keys() & NOT_RUN.keys()
    assert not [text for text, run in RUNS.items() if not (run.says or run.logs or run.until)]
    named = {path for why in NOT_RUN.values() for path in re.findall(r"(?:tests|scripts)/[\w/]+\.py", why)}
    assert not [path for path in named if not (ROOT / path).exists()]


def test_scripts_that_are_typed_without_python_can_be():
    programs = {path for path in (ROOT / "scripts").glob("*.py") if os.access(path, os.X_OK)}
    assert {ROOT / name for name in typed_as_programs()} <= programs
    assert all(path.read_text().startswith("#!/usr/bin/env python3\n") for path in programs)


def test_no_block_is_of_a_kind_that_no_test_reads():
    """`test_own_code`, `test_library` and the integration test of commands run Python."""
    kinds = {(page.name, kind) for page in PAGES for kind in blocks(page)}
    assert {kind for _, kind in kinds} <= {"console", "sh", "python", "text"}
    assert {name for name, kind in kinds if kind == "python"} == {"README.md", "api.md", "own_code.md"}
