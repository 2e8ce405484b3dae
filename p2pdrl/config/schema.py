"""The schema: which keys there are, what each takes, and how a source's value becomes that.

The structs in `root`, `task` and `node` are the one place where keys are declared; `loader`,
`describe` and the tests read them through these functions. A *path* is a key as a tuple:
``("task", "env", "id")`` is written ``task.env.id``. A *section* is a struct, written as a TOML
table. A field of several tagged structs (``task.algorithm``) is a section whose key ``name`` picks
the variant. A dict field (``task.env.kwargs``) is *open*: it takes any keys.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import msgspec.structs

__all__ = [
    "TAG",
    "Field",
    "KeyPath",
    "allowed",
    "choices",
    "coerce",
    "coerce_text",
    "default_tag",
    "dotted",
    "fields",
    "find",
    "leaves",
    "open_value",
    "parse_text",
    "quoted",
    "section",
    "shown",
    "unions",
    "variants",
]

KeyPath = tuple[str, ...]
TAG = "name"
"""The key that picks the variant in every section that has variants."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Field(msgspec.Struct, frozen=True):
    """One field of a section."""

    name: str
    annotation: Any
    default: Any


def dotted(path: KeyPath) -> str:
    """Write a path as TOML does: dots between, quotes around what isn't a bare key."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else quoted(part) for part in path)


def quoted(part: str) -> str:
    """Write text as a TOML string."""
    escaped = part.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'


@functools.cache
def fields(struct: type[msgspec.Struct]) -> Mapping[str, Field]:
    """The fields of a section, in the order of their declaration; the tag isn't among them."""
    found = {}
    for info in msgspec.structs.fields(struct):
        default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
        found[info.name] = Field(info.name, info.type, default)
    return found


def section(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct of a section without variants, or None."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return None


def variants(annotation: Any) -> dict[str, type[msgspec.Struct]]:
    """The structs of a section with variants by tag; empty for anything else."""
    structs = [struct for choice in _choices(annotation) if (struct := section(choice)) is not None]
    if len(structs) < 2:
        return {}
    return {str(struct.__struct_config__.tag): struct for struct in structs}


def default_tag(field: Field) -> str:
    """The variant that a field with variants takes when nobody picks one."""
    return str(type(field.default).__struct_config__.tag)


def open_value(annotation: Any) -> Any:
    """The annotation of an open section's values, or None for anything else."""
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def _sequence_item(annotation: Any) -> Any:
    """The annotation of a sequence's items, or None for anything else."""
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The types that a union is made of; anything else is its own only choice."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def find(root: type[msgspec.Struct], path: KeyPath, tags: Mapping[KeyPath, str]) -> Any:
    """The annotation at ``path`` under the variants that ``tags`` picks; None without such a key."""
    annotation: Any = root
    for depth, part in enumerate(path):
        if (inner := open_value(annotation)) is not None:
            annotation = inner
            continue
        if structs := variants(annotation):
            if part == TAG:
                annotation = Literal[tuple(structs)]
                continue
            struct: type[msgspec.Struct] | None = structs[tags[path[:depth]]]
        else:
            struct = section(annotation)
        if struct is None or part not in fields(struct):
            return None
        annotation = fields(struct)[part].annotation
    return annotation


def unions(struct: type[msgspec.Struct], at: KeyPath = ()) -> Iterator[tuple[KeyPath, Field]]:
    """The paths of all sections with variants, with their fields."""
    for field in fields(struct).values():
        if variants(field.annotation):
            yield (*at, field.name), field
        elif (inner := section(field.annotation)) is not None:
            yield from unions(inner, (*at, field.name))


def leaves(config: msgspec.Struct, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of a configuration with its path, tags included, in the order of declaration.

    A filled open section gives its entries one by one; an empty one gives itself.
    """
    tag = config.__struct_config__.tag
    if tag is not None:
        yield (*at, TAG), tag
    for name in fields(type(config)):
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            yield from leaves(value, (*at, name))
        elif isinstance(value, dict) and value:
            yield from (((*at, name, key), entry) for key, entry in value.items())
        else:
            yield (*at, name), value


def choices(annotation: Any) -> list[str]:
    """The words that a field takes, its items or one of its types; empty where there are none."""
    inner = _sequence_item(annotation)
    return [
        str(word)
        for choice in _choices(annotation if inner is None else inner)
        if get_origin(choice) is Literal
        for word in get_args(choice)
    ]


def allowed(annotation: Any) -> str:
    """What a field takes, in words: ``an integer ≥ 1, or none``."""
    types_ = _choices(annotation)
    words = [_allowed_one(choice) for choice in types_ if choice is not type(None)]
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    return f"{text}, or none" if type(None) in types_ else text


def _allowed_one(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *metas = get_args(annotation)
        return f"{_allowed_one(base)} {' and '.join(bound for meta in metas for bound in _bounds(meta))}"
    if origin is Literal:
        words = ", ".join(str(choice) for choice in get_args(annotation))
        return f"one of {words}" if len(get_args(annotation)) > 1 else words
    if (item := _sequence_item(annotation)) is not None:
        return f"a list, each {allowed(item)}"
    if (value := open_value(annotation)) is not None:
        return f"a table, each value {allowed(value)}"
    if section(annotation) is not None:
        return "a section"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(
        annotation, "a value"
    )


def _bounds(meta: msgspec.Meta) -> list[str]:
    signs = (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
    return [
        f"{sign} {bound:g}" if isinstance(bound, float) or abs(bound) < 1e6 else f"{sign} {bound}"
        for sign, bound in signs
        if bound is not None
    ]


NONE = "none"
"""How a source writes None, where a key may be without a value: TOML has no word for it."""

_INT64 = 2**63


def coerce(value: Any, annotation: Any) -> Any:
    """Turn a typed value into what ``annotation`` says.

    ``"none"`` stands for none, an integral float (1e6) may stand for an integer.

    Raises:
        ValueError: if it can't be; the message says what is allowed.
    """
    if value in (None, NONE) and type(None) in _choices(annotation):
        return None
    _check_plain(value)
    try:
        return msgspec.convert(value, annotation)
    except (msgspec.ValidationError, OverflowError):
        pass
    if isinstance(value, float) and value.is_integer():
        try:
            return msgspec.convert(int(value), annotation)
        except msgspec.ValidationError:
            pass
    raise ValueError(f"must be {allowed(annotation)}")


def coerce_text(text: str, annotation: Any) -> Any:
    """Turn text into what ``annotation`` says.

    Text for a list may leave the brackets out: ``64,64``. 1 and 0 stand for true and false.

    Raises:
        ValueError: if it can't be; the message says what is allowed.
    """
    _check_plain(text)
    parsed = parse_text(text)
    try:
        return coerce(parsed, annotation)
    except ValueError:
        item = _sequence_item(annotation)
        if item is not None and not isinstance(parsed, list):
            parts = parsed.split(",") if isinstance(parsed, str) else [text]
            return tuple(coerce_text(part.strip(), item) for part in parts if part.strip())
        if len(_choices(annotation)) > 2:
            raise  # a value of an open section: what TOML says, it is
        try:
            # Lax conversion: a node named 123, 1 and True for true.
            value = msgspec.convert(text, annotation, strict=False)
            _check_plain(value)
        except msgspec.ValidationError:
            pass
        else:
            return value
        raise


def parse_text(text: str) -> Any:
    """Read text as a TOML value; text that isn't one comes back unchanged."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # bad TOML, a number of too many digits, brackets nested too deep
        return text
    return document["value"] if len(document) == 1 else text


def _check_plain(value: Any) -> None:
    """Refuse what can't travel or be hashed: NaN, infinity, integers beyond 64 bits, broken text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise ValueError("must fit in 64 bits")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid UTF-8") from None
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)


def shown(value: Any, limit: int = 80) -> str:
    """Write a value for a message: as TOML would, bounded, without control characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
