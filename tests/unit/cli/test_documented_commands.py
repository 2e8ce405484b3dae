"""Every command that README and docs tell people to type is one that there is, with options that it takes.

`tests/integration/test_documented_commands.py` types them.
"""

from __future__ import annotations

import re

import click
import pytest

from p2pdrl.cli.main import cli
from p2pdrl.config.loader import resolve

from ...documented import NOT_RUN, PAGES, ROOT, RUNS, commands, documented


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


def test_what_is_said_of_how_they_are_run_is_of_commands_that_are_documented():
    assert not {*RUNS, *NOT_RUN} - documented().keys()
    assert not RUNS.keys() & NOT_RUN.keys()
    foreign = {text for text, words in documented().items() if words[0] not in {"p2pdrl", "curl"}}
    assert not {text for text in foreign - {*RUNS, *NOT_RUN} if not text.startswith("scripts/")}
