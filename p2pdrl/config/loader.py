"""Reads all sources of configuration, merges them into one `Config`, and remembers each value's origin.

Called once per command, by the command line; nothing is read from files or the environment
afterwards. Strongest first: flags, ``--set``, ``P2PDRL_A__B`` variables, files (a later one over
an earlier one), the defaults of the schema. A file is given by its path or by the name of a preset:
an installed wheel carries presets in ``p2pdrl/config/presets``, a checkout in ``config`` at its root.

A layer that picks another variant of a section (``task.algorithm.name = "a2c"`` over a PPO preset)
drops what weaker layers set in that section: it was meant for the other variant. The flags and
``--set`` of one command line count as one layer here, for a person writes them together.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from p2pdrl.config import schema, suggest
from p2pdrl.config.checks import problems
from p2pdrl.config.root import Config
from p2pdrl.config.schema import TAG, KeyPath, coerce, coerce_text, dotted, parse_text, shown
from p2pdrl.errors import ConfigError, did_you_mean

__all__ = [
    "Kind",
    "Layer",
    "Resolved",
    "SourceValue",
    "ValueOrigin",
    "is_preset_name",
    "preset_about",
    "preset_names",
    "preset_path",
    "preset_summary",
    "read_environ",
    "read_file",
    "read_flags",
    "read_sets",
    "resolve",
]


class Resolved(msgspec.Struct, frozen=True):
    """A configuration with the origin of every value.

    Attributes:
        origins: by dotted key, for every value of ``config``; an empty open section
            (``task.env.kwargs``) has one for itself, a filled one has one per entry.
    """

    config: Config
    origins: dict[str, ValueOrigin]

    def given(self, prefix: str = "") -> set[str]:
        """The dotted keys at and under ``prefix`` that anything but a default has set."""
        return {
            key
            for key, origin in self.origins.items()
            if origin.kind != "default" and (not prefix or key == prefix or key.startswith(f"{prefix}."))
        }


def resolve(
    *,
    files: Sequence[str] = (),
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge all sources.

    Args:
        files: paths of TOML files, or names of presets; a later one counts over an earlier one.
        sets: ``key=value`` texts; the value is read as TOML, then as plain text.
        flags: values by dotted key; None stands for a flag that wasn't given.
        environ: the environment; none is an empty one.

    Raises:
        ConfigError: if a source can't be read, or holds unknown keys or bad values; the message
            names every one of them.
    """
    layers = [read_file(name) for name in files]
    layers.append(read_environ(environ or {}))
    layers.append(read_sets(sets) | read_flags(flags or {}))
    merge = _Merge()
    for layer in layers:
        merge.add(layer)
    return merge.finish()


class _Merge:
    """Layers on top of each other, weakest first."""

    def __init__(self) -> None:
        self._values: dict[KeyPath, Any] = {}
        self._origins: dict[KeyPath, ValueOrigin] = {}
        self._unions = dict(schema.unions(Config))
        self._tags = {path: schema.default_tag(field) for path, field in self._unions.items()}
        self._complaints: list[str] = []

    def add(self, layer: Layer) -> None:
        """Put one layer on top."""
        for union in self._unions:
            if (*union, TAG) in layer:
                self._pick(union, layer[(*union, TAG)])
        for path, given in layer.items():
            annotation = schema.find(Config, path, self._tags)
            if annotation is None:
                self._complaints.append(self._unknown(path, given.origin))
            elif schema.section(annotation) or schema.variants(annotation) or schema.open_value(annotation):
                self._complaints.append(self._not_a_table(path, given, annotation))
            else:
                self._store(path, given, annotation)

    def _pick(self, union: KeyPath, given: SourceValue) -> None:
        """Take the variant that a layer names; forget what weaker layers set for another one."""
        try:
            tag = given.coerce(schema.find(Config, (*union, TAG), self._tags))
        except ValueError:
            return  # complained about where it is stored
        if tag == self._tags[union]:
            return
        self._tags[union] = tag
        for path in [path for path in self._values if path[: len(union)] == union]:
            del self._values[path], self._origins[path]

    def _store(self, path: KeyPath, given: SourceValue, annotation: Any) -> None:
        try:
            value = given.coerce(annotation)
        except ValueError as error:
            near = suggest.value(dotted(path), given.value, schema.choices(annotation))
            said = f"{dotted(path)} = {shown(given.value)} {given.origin.phrase()}: {error}"
            self._complaints.append(f"{said}; {near}" if near else said)
            return
        self._values[path] = value
        self._origins[path] = given.origin

    def finish(self) -> Resolved:
        """Build and check the configuration."""
        self._complain()
        tree: dict[str, Any] = {}
        tags = {(*union, TAG): tag for union, tag in self._tags.items()}
        for path, value in {**self._values, **tags}.items():
            table = tree
            for part in path[:-1]:
                table = table.setdefault(part, {})
            table[path[-1]] = value
        try:
            config = msgspec.convert(tree, Config)
        except msgspec.ValidationError as error:  # every value passed alone: a rule between fields
            raise ConfigError(f"bad configuration: {error}") from error
        origins = {
            dotted(path): self._origins.get(path, ValueOrigin("default")) for path, _ in schema.leaves(config)
        }
        self._complaints = [
            f"{problem.key} ({origins[problem.key].phrase()}): {problem.message}"
            for problem in problems(config)
        ]
        self._complain()
        return Resolved(config, origins)

    def _complain(self) -> None:
        if len(self._complaints) == 1:
            raise ConfigError(self._complaints[0])
        if self._complaints:
            lines = "".join(f"\n  {complaint}" for complaint in self._complaints)
            raise ConfigError(f"{len(self._complaints)} problems in the configuration:{lines}")

    def _not_a_table(self, path: KeyPath, given: SourceValue, annotation: Any) -> str:
        key = dotted(path)
        start = f"{key} = {shown(given.value)} {given.origin.phrase()}: {key} is a section"
        if schema.variants(annotation):
            return f"{start}; did you mean {key}.{TAG}?"
        return f"{start} that holds keys, not a value"

    def _unknown(self, path: KeyPath, origin: ValueOrigin) -> str:
        start = f"unknown key {dotted(path)} {origin.phrase()}"
        for union, tag in self._tags.items():
            here = schema.variants(self._unions[union].annotation)
            others = [
                name for name in here if schema.find(Config, path, {**self._tags, union: name}) is not None
            ]
            if path[: len(union)] == union and others:
                where = dotted((*union, TAG))
                said = f"{start}: it belongs to {where} = {' or '.join(others)}, but {where} is {tag} here"
                instead = [key for key in suggest.meant(path, self._here()) if key != path]
                return f"{said}, which has {dotted(instead[0])}" if instead else said
        return f"{start}; {suggest.hint(path, self._here(), _all_paths())}"

    def _here(self) -> list[KeyPath]:
        """Every key under the variants that are picked."""
        return [path for path in _all_paths() if schema.find(Config, path, self._tags) is not None]


def _all_paths() -> list[KeyPath]:
    """Every key of the schema, those of all variants included."""
    found = [path for path, _ in schema.leaves(Config())]
    for union, field in schema.unions(Config):
        for struct in schema.variants(field.annotation).values():
            found += [path for path, _ in schema.leaves(struct(), union)]
    return list(dict.fromkeys(found))


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def _folder() -> Path | None:
    here = Path(__file__).resolve().parent
    if (here / "presets").is_dir():
        return here / "presets"
    root = here.parent.parent
    # The project file tells a checkout from a site-packages folder that happens to hold a "config".
    if (root / "pyproject.toml").is_file() and (root / "config").is_dir():
        return root / "config"
    return None


def is_preset_name(text: str) -> bool:
    """Tell whether ``text`` is written as a preset's name is: no dot, no slash."""
    return _NAME.fullmatch(text) is not None


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    folder = _folder()
    return sorted(path.stem for path in folder.glob("*.toml")) if folder else []


def preset_path(name: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: if there is none of that name; the message names the nearest.
    """
    names = preset_names()
    folder = _folder()
    if folder is not None and name in names:
        return folder / f"{name}.toml"
    hint = did_you_mean(name, names, f"the presets are: {', '.join(names) or 'none'}.")
    raise ConfigError(f"no preset is named {name!r}; {hint} A file of your own wants its ending: {name}.toml")


def preset_summary(name: str) -> str:
    """What a preset is, in one line: the comment at the top of its file.

    Raises:
        ConfigError: if there is no such preset.
    """
    return preset_about(name).partition("\n")[0]


def preset_about(name: str) -> str:
    """The whole comment at the top of a preset's file: what it is, its paper, what it was seen to reach.

    Raises:
        ConfigError: if there is no such preset.
    """
    lines = preset_path(name).read_text("utf-8").splitlines()
    top = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.removeprefix("#").strip() for line in top)


Kind = Literal["flag", "set", "env", "file", "default"]
"""The sources, strongest first."""


class ValueOrigin(msgspec.Struct, frozen=True):
    """The source of one value.

    Attributes:
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


Layer = dict[KeyPath, SourceValue]
"""What one source gives, by path."""


def read_file(name: str) -> Layer:
    """Read a TOML file, given by its path or by the name of a preset.

    Raises:
        ConfigError: if it can't be read, or isn't TOML.
    """
    is_preset = is_preset_name(name) and (name in preset_names() or not Path(name).is_file())
    path = preset_path(name) if is_preset else Path(name)
    label = f"preset {name}" if is_preset else name
    try:
        text = path.read_text("utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"can't read the configuration file {name}: {error.strerror or error}; `p2pdrl presets` lists "
            f"the presets, `p2pdrl config init {name}` writes a file of all keys"
        ) from error
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


def _from_text(path: KeyPath, text: str, origin: ValueOrigin) -> Layer:
    """One value of text, or several when it is an inline table: ``{a = 1, b = 2}``."""
    table = parse_text(text) if text.lstrip().startswith("{") else None
    if isinstance(table, dict):
        return {(*path, *rest): SourceValue(value, origin) for rest, value in _flatten(table)}
    return {path: SourceValue(text, origin, "text")}


def _flatten(table: Mapping[str, Any], at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*at, key))
        else:
            yield (*at, key), value


def _lines(text: str) -> dict[KeyPath, int]:
    """The line of each key and table of a TOML text that is known to be valid; best effort."""
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
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


def _key(text: str) -> KeyPath:
    """Split a written key into its parts."""
    try:
        document: Any = tomllib.loads(f"{text} = 0")
    except ValueError:
        return (text,)
    path: KeyPath = ()
    while isinstance(document, dict):
        part, document = next(iter(document.items()))
        path = (*path, part)
    return path
