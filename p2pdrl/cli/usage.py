"""What is said of a wrong command line: in our words, with what to write instead.

The parser that we use knows what is wrong; how it says so changes with its releases, and its words for types
(``integer range``) mean little to people. `explain` reads the error and says what the option takes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from p2pdrl.errors import did_you_mean

__all__ = ["explain", "pointer"]


def explain(error: click.ClickException) -> str:
    """Say what is wrong in one line.

    Example:
        >>> option = click.Option(["--count"], type=click.IntRange(1, 64))
        >>> explain(click.BadParameter("'x' is not a valid integer range.", param=option))
        "--count takes a whole number from 1 to 64, not 'x'"
    """
    if isinstance(error, click.MissingParameter):
        return _missing(error.param)
    if isinstance(error, click.BadParameter):
        return _bad(error)
    if isinstance(error, click.NoSuchOption):
        near = did_you_mean(error.option_name, _options(error.ctx), f"{_help_of(error.ctx)} lists them")
        return f"there is no option {error.option_name}; {near}"
    if isinstance(error, click.BadOptionUsage):
        return _without_value(error)
    name = getattr(error, "command_name", None)  # of a class that older releases of the parser lack
    if name is not None and isinstance(error, click.UsageError):
        return no_such_command(str(name), _commands(error.ctx), _help_of(error.ctx))
    text = error.message
    if found := re.match(r"Got unexpected extra arguments? \((.*)\)", text):
        return f"{found[1]!r} is more than this command takes"
    if text.startswith("Missing command") and isinstance(error, click.UsageError):
        return f"say what to do: {', '.join(_commands(error.ctx))}"
    return text


def no_such_command(name: str, known: Sequence[str], help_: str) -> str:
    """Say that there is no such command, and which one is meant."""
    return f"there is no command {name[:60]!r}; {did_you_mean(name, known, f'{help_} lists them')}"


def pointer(error: click.ClickException) -> str:
    """The line below: how the command is written, and where more is said; empty if that isn't known."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return ""
    return f"{context.get_usage()}\n{_help_of(context)} says more"


def _help_of(context: click.Context | None) -> str:
    return f"`{context.command_path if context else 'p2pdrl'} --help`"


def _options(context: click.Context | None) -> list[str]:
    found = [] if context is None else context.command.get_params(context)
    return [name for one in found if isinstance(one, click.Option) for name in one.opts]


def _commands(context: click.Context | None) -> list[str]:
    command = None if context is None else context.command
    return command.list_commands(context) if context and isinstance(command, click.Group) else []


def _name(param: click.Parameter) -> str:
    """``--count``, or the word that stands for an argument."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.metavar or (param.name or "").upper()


def _missing(param: click.Parameter | None) -> str:
    if param is None:
        return "something is missing"
    if not isinstance(param, click.Option):
        return f"{_name(param)} is missing"
    meaning = (param.help or "").partition(";")[0].rstrip(".")
    says = f": {meaning[0].lower()}{meaning[1:]}" if meaning else ""
    return f"{_name(param)} {param.metavar or 'VALUE'} is missing{says}"


def _without_value(error: click.BadOptionUsage) -> str:
    if "does not take" in error.message:
        return f"{error.option_name} takes no value: write it alone"
    return f"{error.option_name} wants a value behind it"


def _bad(error: click.BadParameter) -> str:
    param = error.param
    if param is None:
        return error.message
    if not isinstance(param.type, click.FloatRange) and not type(param.type).__module__.startswith("click."):
        return f"{_name(param)}: {error.message}"
    found = re.match(r"(?:\w+ )?('.*'|\S+) (?:is|does) not|(?:\w+ )('.*') is a", error.message, re.DOTALL)
    given = (found[1] or found[2]) if found else ""
    given = given[1:-1] if given[:1] in "'\"" else given
    if isinstance(param.type, click.Path):
        return f"{_name(param)}: {_path(error.message, given)}"
    said = f"{_name(param)} takes {_words(param.type)}" + (f", not {given[:60]!r}" if found else "")
    if isinstance(param.type, click.Choice) and (near := did_you_mean(given, map(str, param.type.choices))):
        return f"{said}; {near}"
    return said


def _path(message: str, given: str) -> str:
    if "does not exist" in message:
        return f"there is no {given}"
    if "is a directory" in message:
        return f"{given} is a folder; name a file"
    if "is a file" in message:
        return f"{given} is a file; name a folder"
    if "writable" in message:
        return f"you may not write to {given}; name another file"
    return f"you may not read {given}; mend its permissions"


def _words(kind: click.ParamType[Any]) -> str:
    """What a type takes, in words."""
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))}"
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return {"integer": "a whole number", "float": "a number"}.get(kind.name, f"a {kind.name}")
    whole = "a whole number" if isinstance(kind, click.IntRange) else "a number"
    low, high = kind.min, kind.max
    if low is not None and high is not None and not kind.min_open and not kind.max_open:
        return f"{whole} from {low:g} to {high:g}"
    bounds = [] if low is None else [f"{'greater than' if kind.min_open else 'of at least'} {low:g}"]
    bounds += [] if high is None else [f"{'smaller than' if kind.max_open else 'at most'} {high:g}"]
    return f"{whole} {' and '.join(bounds)}"
