"""Every command that README and docs tell people to type is one that there is, with options that it takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from p2pdrl.cli.main import cli
from p2pdrl.config.loader import resolve

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(console|sh|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:p2pdrl|scripts/\w+\.py|python scripts/\w+\.py|make) [^`\n]+)`")


def commands(page):
    """Each command of a page once: of its blocks, and those in a line."""
    text, found = page.read_text(), []
    for kind, block in BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        found += prompted if kind == "console" else lines
    found += [one for one in INLINE.findall(BLOCK.sub("", text)) if "…" not in one and "[" not in one]
    for line in dict.fromkeys(found):
        for part in re.split(r"\s(?:&&|\|)\s", re.split(r"  #| > ", line)[0].rstrip(" &")):
            words = shlex.split(part, comments=True)
            while words and (re.match(r"^[A-Z_]+=", words[0]) or words[0] in {"sudo", "nice", "python"}):
                words = words[1:]
            if words:
                yield words


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
