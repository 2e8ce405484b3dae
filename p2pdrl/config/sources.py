"""Where a configured value came from. Made by `loader`, shown by ``p2pdrl config show --origin``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal

import msgspec

from p2pdrl.config.presets import is_preset_name, preset_names, preset_path
from p2pdrl.config.schema import Path
from p2pdrl.config.values import coerce, coerce_text, parse_text
from p2pdrl.errors import ConfigError

__all__ = [
    "Kind",
    "Layer",
    "SourceValue",
    "ValueOrigin",
    "read_environ",
    "read_file",
    "read_flags",
    "read_sets",
]

Kind = Literal["flag", "set", "env", "file", "default"]
"""The sources, strongest first."""


class ValueOrigin(msgspec.Struct, frozen=True):
    """The source of one value.

    Attributes:
        kind: which sort of source.
        where: ``FILE:LINE`` of a file, ``preset NAME:LINE`` of a preset, the name of an environment
            variable; empty for the others.
    """

    kind: Kind
    where: str = ""

    def __str__(self) -> str:
        """The words for a table: ``file my.toml:3``, ``env P2PDRL_NODE__NAME``, ``flag``."""
        return f"{self.kind} {self.where}".rstrip()

    def phrase(self) -> str:
        """The words for a sentence: ``in my.toml:3``, ``in --set``."""
        match self.kind:
            case "file":
                return f"in {self.where}"
            case "env":
                return f"in the variable {self.where}"
            case "set":
                return "in --set"
            case "flag":
                return "on the command line"
            case "default":
                return "by default"


ENV_PREFIX = "P2PDRL_"

_HEADER = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"""\s*((?:[A-Za-z0-9_.\s-]|"[^"]*"|'[^']*')+?)\s*=""")


class SourceValue(msgspec.Struct, frozen=True):
    """A value as its source holds it.

    Attributes:
        value: typed, or text.
        origin: the source.
        read_as: ``typed`` (a file), ``text`` that may be TOML (variables, ``--set``), or ``flag``:
            typed if it fits, else text.
    """

    value: Any
    origin: ValueOrigin
    read_as: Literal["typed", "text", "flag"] = "typed"

    def coerce(self, annotation: Any) -> Any:
        """The value that ``annotation`` describes.

        Raises:
            ValueError: if there is none; the message says what is allowed.
        """
        if self.read_as == "text":
            return coerce_text(self.value, annotation)
        try:
            return coerce(self.value, annotation)
        except ValueError:
            if self.read_as == "flag" and isinstance(self.value, str):
                return coerce_text(self.value, annotation)
            raise


Layer = dict[Path, SourceValue]
"""What one source gives, by path."""


def read_file(name: str) -> Layer:
    """Read a TOML file, given by its path or by the name of a preset.

    Raises:
        ConfigError: if it can't be read, or isn't TOML.
    """
    is_preset = is_preset_name(name) and (name in preset_names() or not FilePath(name).is_file())
    path = preset_path(name) if is_preset else FilePath(name)
    label = f"preset {name}" if is_preset else name
    try:
        text = path.read_text("utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"can't read the configuration file {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label} isn't UTF-8 text (byte {error.start}); is it a TOML file?") from error
    except RecursionError as error:
        raise ConfigError(f"{label} nests brackets too deep") from error
    except ValueError as error:  # TOMLDecodeError, a number of too many digits, a path with a null byte
        raise ConfigError(f"{label} isn't valid TOML: {error}") from error
    lines = _lines(text)
    layer = {}
    for key, value in _flatten(document):
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        layer[key] = SourceValue(value, ValueOrigin("file", label if line is None else f"{label}:{line}"))
    return layer


def read_environ(environ: Mapping[str, str]) -> Layer:
    """Take ``P2PDRL_TASK__ENV__ID`` and the like out of the environment.

    Two underscores stand for a dot. Variables without them (``P2PDRL_TOKEN``) aren't configuration.
    """
    layer = {}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and "__" in variable:
            path = tuple(variable.removeprefix(ENV_PREFIX).lower().split("__"))
            layer.update(_from_text(path, environ[variable], ValueOrigin("env", variable)))
    return layer


def read_sets(sets: Sequence[str]) -> Layer:
    """Take ``a.b=c`` apart; of two for one key the later counts.

    Raises:
        ConfigError: if one isn't written so.
    """
    layer: Layer = {}
    for text in sets:
        key, equals, value = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise ConfigError(f"--set {text!r} isn't written KEY=VALUE, as in --set task.env.id=CartPole-v1")
        layer.update(_from_text(path, value, ValueOrigin("set")))
    return layer


def read_flags(flags: Mapping[str, Any]) -> Layer:
    """Take flags by their dotted keys; None means that the flag wasn't given."""
    layer: Layer = {}
    for key, value in flags.items():
        path = tuple(key.split("."))
        if isinstance(value, Mapping):
            layer.update(
                {
                    (*path, *rest): SourceValue(inner, ValueOrigin("flag"), "flag")
                    for rest, inner in _flatten(value)
                }
            )
        elif value is not None:
            layer[path] = SourceValue(value, ValueOrigin("flag"), "flag")
    return layer


def _from_text(path: Path, text: str, origin: ValueOrigin) -> Layer:
    """One value of text, or several when it is an inline table: ``{a = 1, b = 2}``."""
    table = parse_text(text) if text.lstrip().startswith("{") else None
    if isinstance(table, dict):
        return {(*path, *rest): SourceValue(value, origin) for rest, value in _flatten(table)}
    return {path: SourceValue(text, origin, "text")}


def _flatten(table: Mapping[str, Any], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*at, key))
        else:
            yield (*at, key), value


def _lines(text: str) -> dict[Path, int]:
    """The line of each key and table of a TOML text that is known to be valid; best effort."""
    found: dict[Path, int] = {}
    table: Path = ()
    inside: str | None = None  # the quotes of the multi-line string that we are in
    for number, line in enumerate(text.splitlines(), start=1):
        if inside is not None:
            inside = None if inside in line else inside
            continue
        if header := _HEADER.match(line):
            table = _key(header[1])
            found.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            found.setdefault((*table, *_key(assignment[1])), number)
        inside = next((quotes for quotes in ('"""', "'''") if line.count(quotes) % 2), None)
    return found


def _key(text: str) -> Path:
    """Split a written key into its parts."""
    try:
        document: Any = tomllib.loads(f"{text} = 0")
    except ValueError:
        return (text,)
    path: Path = ()
    while isinstance(document, dict):
        part, document = next(iter(document.items()))
        path = (*path, part)
    return path
