"""Questions about the schema: which keys there are, what each takes, where the alternatives lie.

The structs in `root`, `task` and `node` are the one place where keys are declared; `loader`,
`describe` and the tests read them through these functions. A *path* is a key as a tuple:
``("task", "env", "id")`` is written ``task.env.id``. A *section* is a struct, written as a TOML
table. A field of several tagged structs (``task.algorithm``) is a section whose key ``name`` picks
the variant. A dict field (``task.env.kwargs``) is *open*: it takes any keys.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import msgspec.structs

__all__ = [
    "TAG",
    "Field",
    "Path",
    "allowed",
    "choices",
    "default_tag",
    "dotted",
    "fields",
    "find",
    "leaves",
    "open_value",
    "quoted",
    "section",
    "sequence_item",
    "takes_none",
    "unions",
    "variants",
]

Path = tuple[str, ...]
TAG = "name"
"""The key that picks the variant in every section that has variants."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Field(msgspec.Struct, frozen=True):
    """One field of a section: its name, its type annotation, and its default."""

    name: str
    annotation: Any
    default: Any


def dotted(path: Path) -> str:
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
    structs = [struct for choice in choices(annotation) if (struct := section(choice)) is not None]
    if len(structs) < 2:
        return {}
    return {str(struct.__struct_config__.tag): struct for struct in structs}


def default_tag(field: Field) -> str:
    """The variant that a field with variants takes when nobody picks one."""
    return str(type(field.default).__struct_config__.tag)


def open_value(annotation: Any) -> Any:
    """What the values of an open section are annotated with, or None for anything else."""
    return get_args(annotation)[1] if get_origin(annotation) is dict else None


def sequence_item(annotation: Any) -> Any:
    """What the items of a sequence field are annotated with, or None for anything else."""
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def takes_none(annotation: Any) -> bool:
    """Tell whether the field may be without a value."""
    return type(None) in choices(annotation)


def choices(annotation: Any) -> tuple[Any, ...]:
    """The types that a union is made of; anything else is its own only choice."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def find(root: type[msgspec.Struct], path: Path, tags: Mapping[Path, str]) -> Any:
    """What the schema declares at ``path``, under the variants that ``tags`` picks.

    Returns:
        the annotation, or None when the schema has no such key.
    """
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


def unions(struct: type[msgspec.Struct], at: Path = ()) -> Iterator[tuple[Path, Field]]:
    """The paths of all sections with variants, with their fields."""
    for field in fields(struct).values():
        if variants(field.annotation):
            yield (*at, field.name), field
        elif (inner := section(field.annotation)) is not None:
            yield from unions(inner, (*at, field.name))


def leaves(config: msgspec.Struct, at: Path = ()) -> Iterator[tuple[Path, Any]]:
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


def allowed(annotation: Any) -> str:
    """What a field takes, in words: ``an integer ≥ 1, or none``."""
    types_ = choices(annotation)
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
    if (item := sequence_item(annotation)) is not None:
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
