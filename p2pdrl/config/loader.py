"""Merges all sources of configuration into one `Config`, and remembers where each value came from.

Called once per command, by the command line; nothing is read from files or the environment
afterwards. Strongest first: flags, ``--set``, ``P2PDRL_A__B`` variables, files (a later one over
an earlier one), the defaults of the schema.

A layer that picks another variant of a section (``task.algorithm.name = "a2c"`` over a PPO preset)
drops what weaker layers set in that section: it was meant for the other variant. The flags and
``--set`` of one command line count as one layer here, for a person writes them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from p2pdrl.config import schema
from p2pdrl.config.checks import problems
from p2pdrl.config.root import Config
from p2pdrl.config.schema import TAG, Path, dotted
from p2pdrl.config.sources import (
    Layer,
    SourceValue,
    ValueOrigin,
    read_environ,
    read_file,
    read_flags,
    read_sets,
)
from p2pdrl.config.values import shown
from p2pdrl.errors import ConfigError

__all__ = ["Resolved", "resolve"]


class Resolved(msgspec.Struct, frozen=True):
    """A configuration with the origin of every value.

    Attributes:
        config: what is to be used.
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
        self._values: dict[Path, Any] = {}
        self._origins: dict[Path, ValueOrigin] = {}
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

    def _pick(self, union: Path, given: SourceValue) -> None:
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

    def _store(self, path: Path, given: SourceValue, annotation: Any) -> None:
        try:
            value = given.coerce(annotation)
        except ValueError as error:
            self._complaints.append(f"{dotted(path)} = {shown(given.value)} {given.origin.phrase()}: {error}")
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

    def _not_a_table(self, path: Path, given: SourceValue, annotation: Any) -> str:
        key = dotted(path)
        start = f"{key} = {shown(given.value)} {given.origin.phrase()}: {key} is a section"
        if schema.variants(annotation):
            return f"{start}; did you mean {key}.{TAG}?"
        return f"{start} that holds keys, not a value"

    def _unknown(self, path: Path, origin: ValueOrigin) -> str:
        start = f"unknown key {dotted(path)} {origin.phrase()}"
        for union, tag in self._tags.items():
            here = schema.variants(self._unions[union].annotation)
            others = [
                name for name in here if schema.find(Config, path, {**self._tags, union: name}) is not None
            ]
            if path[: len(union)] == union and others:
                where = dotted((*union, TAG))
                return f"{start}: it belongs to {where} = {' or '.join(others)}, but {where} is {tag} here"
        known = [dotted(key) for key in _all_paths()]
        return f"{start}; {_nearest(dotted(path), known)}"


def _all_paths() -> list[Path]:
    """Every key of the schema, those of all variants included."""
    found = [path for path, _ in schema.leaves(Config())]
    for union, field in schema.unions(Config):
        for struct in schema.variants(field.annotation).values():
            found += [path for path, _ in schema.leaves(struct(), union)]
    return list(dict.fromkeys(found))


def _nearest(key: str, known: Sequence[str]) -> str:
    """A guess at what was meant: a key that lacks its section, or one that is spelled alike."""
    ends = [candidate for candidate in known if candidate.endswith(f".{key}")]
    if not ends:
        import difflib

        ends = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if ends:
        return f"did you mean {' or '.join(ends[:3])}?"
    parent = key.rpartition(".")[0]
    siblings = [k.removeprefix(f"{parent}.") for k in known if k.startswith(f"{parent}.")]
    if parent and siblings:
        return f"{parent} has {', '.join(siblings)}"
    return "see p2pdrl config show for all keys"
