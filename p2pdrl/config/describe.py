"""What every key means, taken from the docstrings below the schema's fields.

Serves ``p2pdrl config init`` (a commented file of all keys), ``config show`` (a plain one) and the
reference in the documentation. Reads the source of the schema's modules, which a wheel carries;
where there is none, meanings are empty and everything else works.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from p2pdrl.config import schema
from p2pdrl.config.root import Config
from p2pdrl.config.schema import TAG, KeyPath, dotted

__all__ = ["KeyDoc", "all_keys", "field_docs", "render_toml", "section_doc", "toml_value"]

_WIDTH = 100


class KeyDoc(msgspec.Struct, frozen=True):
    """One key of the schema.

    Attributes:
        key: dotted.
        takes: what is allowed, in words.
        default: as TOML writes it.
        doc: the meaning, in one line.
        variant: the value of the section's ``name`` that the key belongs to; empty for all others.
    """

    key: str
    takes: str
    default: str
    doc: str
    variant: str = ""


@functools.cache
def _documented(module_name: str) -> Mapping[str, tuple[str, dict[str, str]]]:
    """By class: its docstring, and the docstrings below its fields."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    except (OSError, TypeError):  # a module without source
        return {}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            docs = {}
            for statement, following in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    docs[statement.target.id] = _text_of(following)
            found[node.name] = (_plain(ast.get_docstring(node) or ""), docs)
    return found


def _text_of(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return _plain(str(statement.value.value))
    return ""


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def section_doc(struct: type[msgspec.Struct]) -> str:
    """The meaning of a section, in one line."""
    return _documented(struct.__module__).get(struct.__name__, ("", {}))[0]


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The meaning of each field that has one, inherited ones included, in one line each."""
    docs: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, msgspec.Struct):
            docs |= _documented(base.__module__).get(base.__name__, ("", {}))[1]
    return {name: doc for name, doc in docs.items() if doc}


def all_keys() -> list[KeyDoc]:
    """Every key of the schema in the order of declaration, those of all variants included."""
    return list(_keys(Config(), ()))


def _keys(config: msgspec.Struct, at: KeyPath, variant: str = "") -> Iterator[KeyDoc]:
    docs = field_docs(type(config))
    for field in schema.fields(type(config)).values():
        path = (*at, field.name)
        if choices := schema.variants(field.annotation):
            tag = toml_value(schema.default_tag(field))
            yield KeyDoc(dotted((*path, TAG)), f"one of {', '.join(choices)}", tag, "Which variant.")
            for name, struct in choices.items():
                yield from _keys(struct(), path, name)
        elif (struct_ := schema.section(field.annotation)) is not None:
            yield from _keys(struct_(), path)
        else:
            takes, default = schema.allowed(field.annotation), toml_value(field.default)
            yield KeyDoc(dotted(path), takes, default, docs.get(field.name, ""), variant)


def toml_value(value: Any) -> str:
    """Write a value as TOML; none is the text ``"none"``, which the loader understands."""
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return '"none"'
        case str():
            return schema.quoted(value)
        case dict():
            inside = ", ".join(f"{dotted((key,))} = {toml_value(entry)}" for key, entry in value.items())
            return f"{{{inside}}}"
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)


def render_toml(config: Config | None = None, *, docs: bool = True, active: bool = False) -> str:
    """Write a configuration as a TOML file, every key of it.

    Args:
        config: whose values; none takes the defaults.
        docs: with meanings as comments, and the variants that were not picked.
        active: keys count; else they are commented out (``#seed = 0``) and stand as a reference.
    """
    writer = _Writer(docs, active)
    if docs:
        writer.comment(
            "Configuration of a p2pdrl node: [task] is the same on every node of a swarm, [node] is this"
        )
        writer.comment("machine's own. A key that is commented out stands at the value that is shown.")
    writer.section(config or Config(), ())
    return "\n".join(writer.lines).strip() + "\n"


class _Writer:
    """Collects the lines of a TOML file."""

    def __init__(self, docs: bool, active: bool) -> None:
        self.lines: list[str] = []
        self._docs = docs
        self._active = active

    def section(self, config: msgspec.Struct, path: KeyPath) -> None:
        """Write the table of ``config``, then the tables inside it."""
        struct = type(config)
        inner = [name for name in schema.fields(struct) if isinstance(getattr(config, name), msgspec.Struct)]
        if path:
            self.lines.append("")
            self.comment(section_doc(struct))
            self.lines.append(f"[{dotted(path)}]")
        self._body(config, skip=inner, active=self._active)
        for name in inner:
            field, value = schema.fields(struct)[name], getattr(config, name)
            self.section(value, (*path, name))
            for tag, other in schema.variants(field.annotation).items():
                if self._docs and tag != value.__struct_config__.tag:
                    self.lines.append("")
                    self.comment(f"Or, in its place: {section_doc(other)}")
                    self.lines.append(f"#[{dotted((*path, name))}]")
                    self._body(other(), skip=[], active=False)

    def _body(self, config: msgspec.Struct, skip: list[str], active: bool) -> None:
        sign = "" if active else "#"
        tag = config.__struct_config__.tag
        if tag is not None:
            self.lines.append(f"{sign}{TAG} = {toml_value(tag)}")
        docs = field_docs(type(config))
        for field in schema.fields(type(config)).values():
            if field.name not in skip:
                self.comment(f"{docs.get(field.name, '')} Takes {schema.allowed(field.annotation)}.")
                self.lines.append(f"{sign}{field.name} = {toml_value(getattr(config, field.name))}")

    def comment(self, text: str) -> None:
        """Write wrapped comment lines, if there are to be any."""
        if self._docs and text:
            self.lines += textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
