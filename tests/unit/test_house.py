"""The house: what every change to the package must keep, read from its source alone.

Each test lists all that breaks its rule, with where it is, so that one run tells what to mend.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import p2pdrl
from p2pdrl.config import describe

ROOT = Path(p2pdrl.__file__).parent

DEAD_WORDS = frozenset(
    [
        "agenda",
        "conduct",
        "courier",
        "crew",
        "desk",
        "door",
        "editions",
        "engagement",
        "farewell",
        "giving",
        "holdings",
        "joints",
        "judgement",
        "ledger",
        "lending",
        "lockstep",
        "occasions",
        "office",
        "recruit",
        "regime",
        "repeating",
        "rumour",
        "rumours",
        "seats",
        "staging",
        "tally",
        "telling",
        "workplace",
    ]
)
"""Metaphors that the field's terms replaced; as a whole word of an identifier or a module none comes back."""


class Source(NamedTuple):
    """One module: its dotted name, file, syntax tree, and every node of that."""

    name: str
    path: Path
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


@functools.cache
def sources() -> dict[str, Source]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["p2pdrl", *path.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = Source(name, path, tree, tuple(ast.walk(tree)))
    return found


def listed(lines: Iterable[str]) -> str:
    """All of it: pytest would cut a long list."""
    return "\n".join(["", *lines])


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those of functions, nor for types alone."""
    for statement in body:
        yield statement
        match statement:
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                yield from at_import(statement.orelse)
            case ast.If():
                yield from at_import([*statement.body, *statement.orelse])
            case ast.Try():
                handlers = [inner for handler in statement.handlers for inner in handler.body]
                yield from at_import([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
            case ast.With() | ast.ClassDef():
                yield from at_import(statement.body)


def imported(statements: Iterator[ast.stmt] | Iterator[ast.AST]) -> Iterator[str]:
    """The modules of the package that import statements name."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name in sources())
        elif isinstance(statement, ast.ImportFrom) and (statement.module or "") in sources():
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                yield inner if inner in sources() else str(statement.module)


def test_no_class_name_stands_for_two_things() -> None:
    places = defaultdict(list)
    for source in sources().values():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{source.name}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_modules_import_each_other_in_no_circle() -> None:
    waiting = {
        name: set(imported(at_import(source.tree.body))) - {name} for name, source in sources().items()
    }
    while ready := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        for name in ready:
            del waiting[name]
    # Those that remain lie on a circle or above one; peeled from the top only circles are left.
    while unneeded := waiting.keys() - set().union(*waiting.values()):
        for name in unneeded:
            del waiting[name]
    assert {name: sorted(needs & waiting.keys()) for name, needs in waiting.items()} == {}


def test_packages_themselves_import_nothing() -> None:
    """So that importing one module doesn't load its neighbours: the command line must stay quick."""
    packages = [source for source in sources().values() if source.is_package]
    assert {p.name: found for p in packages if (found := sorted(imported(iter(p.nodes))))} == {}


def test_every_module_says_what_it_is() -> None:
    assert [source.name for source in sources().values() if not ast.get_docstring(source.tree)] == []


def test_metaphors_that_were_replaced_stay_away() -> None:
    found = defaultdict(set)
    for source in sources().values():
        for identifier in {source.name.rpartition(".")[2], *identifiers(source.name)}:
            for word in words_of(identifier) & DEAD_WORDS:
                found[word].add(f"{source.name}: {identifier}")
    assert not found, listed(f"{word}: {places}" for word, names in found.items() for places in sorted(names))


@functools.cache
def identifiers(module: str) -> frozenset[str]:
    """Every name that the module gives to something or uses."""
    names = set()
    for node in sources()[module].nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names |= {*name.split("."), asname or ""}
            case ast.keyword(arg=str(name)):
                names.add(name)
    return frozenset(names)


@functools.cache
def words_of(identifier: str) -> frozenset[str]:
    """``_RoundCollector_of`` consists of ``round``, ``collector`` and ``of``."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", identifier))


DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")
SINGLE = re.compile(r"`([A-Za-z_]\w*)(?:\(\))?`")
FILES = (".csv", ".db", ".json", ".key", ".safetensors", ".toml")


def docstrings(source: Source) -> Iterator[tuple[str, str]]:
    """Where each docstring of a module stands, and its text; those below fields and constants too."""
    for node in source.nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                yield f"{source.name}:{line}", text


@functools.cache
def names_in(module: str) -> frozenset[str]:
    named = p2pdrl.__all__ if module == "p2pdrl" else ()  # imported when they are first used
    return frozenset({*identifiers(module), *named})


@functools.cache
def arguments_in(module: str) -> frozenset[str]:
    return frozenset(node.arg for node in sources()[module].nodes if isinstance(node, ast.arg))


@functools.cache
def classes() -> dict[str, tuple[str, ast.ClassDef]]:
    """Every class of the package by its name, with its module."""
    return {
        node.name: (source.name, node)
        for source in sources().values()
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }


def members(name: str) -> set[str]:
    """What a class of the package defines or gives to itself, its bases in the package included."""
    _, definition = classes()[name]
    found = set()
    for node in ast.walk(definition):
        match node:
            case ast.FunctionDef(name=member) | ast.AsyncFunctionDef(name=member) | ast.ClassDef(name=member):
                found.add(member)
            case ast.Name(id=member, ctx=ast.Store()) | ast.Attribute(attr=member, ctx=ast.Store()):
                found.add(member)
    for base in definition.bases:
        inherited = re.split(r"[.\[]", ast.unparse(base))
        found |= set().union(*(members(part) for part in inherited if part in classes() and part != name))
    return found


def resolves(reference: str, source: Source) -> bool:
    """Whether a dotted reference in a docstring of ``source`` means something that exists.

    It is a module, or something in one, counted from the package of the docstring or from one above it; a
    member of a class of the package; a configuration key; an attribute of a name that the module itself uses
    (``batch.rows``); something outside of the package that Python or the module imports; or a file.
    """
    head, *rest = reference.split(".")
    if head in classes():
        return rest[0] in members(head)
    around = source.package.split(".")
    near_a_module = False
    for depth in range(len(around), -1, -1):
        start = [*around[:depth], head]
        if ".".join(start) in sources():
            near_a_module = True
            if in_module(start, rest):
                return True
    if reference in config_keys() or reference.endswith(FILES) or head in arguments_in(source.name):
        return True
    outside = sys.stdlib_module_names | {"torch", "np"}
    return not near_a_module and (head in names_in(source.name) or head in outside)


def in_module(start: list[str], rest: list[str]) -> bool:
    while rest and ".".join([*start, rest[0]]) in sources():
        start, rest = [*start, rest[0]], rest[1:]
    return all(part in names_in(".".join(start)) for part in rest)


@functools.cache
def config_keys() -> frozenset[str]:
    """Every key of the configuration, with the sections that hold them."""
    keys = {key.key for key in describe.all_keys()}
    return frozenset(keys | {key[:at] for key in keys for at in range(len(key)) if key[at] == "."})


def test_dotted_references_in_docstrings_mean_something() -> None:
    broken = [
        f"{where}: {reference}"
        for source in sources().values()
        for where, text in docstrings(source)
        for reference in DOTTED.findall(text)
        if not resolves(reference, source)
    ]
    assert not broken, listed(broken)


def test_maps_of_folders_name_only_what_exists() -> None:
    """A word in back-ticks in a package's docstring is a module there or above, or something in one there."""
    broken = []
    for source in sources().values():
        if not source.is_package:
            continue
        inside = [name for name in sources() if f"{name}.".startswith(f"{source.name}.")]
        defined = set().union(*(names_in(name) for name in inside))
        around = source.name.split(".")
        above = {".".join(around[:depth]) for depth in range(1, len(around) + 1)}
        broken += [
            f"{source.name}: {word}"
            for word in SINGLE.findall(ast.get_docstring(source.tree) or "")
            if word not in defined and not any(f"{package}.{word}" in sources() for package in above)
        ]
    assert not broken, listed(broken)


PATH = re.compile(r"`([a-z]\w*(?:/\w+)*/(?:\w+(?:\.\w+)?)?)`")
"""A file or folder of the project or package: ``scripts/speedup.py``, ``rl/algorithms``, ``gossip/``."""


def test_documents_name_only_files_that_exist() -> None:
    root = ROOT.parent
    broken = [
        f"{document.relative_to(root)}: {path}"
        for document in [root / "README.md", *sorted((root / "docs").glob("*.md"))]
        for path in PATH.findall(document.read_text(encoding="utf-8"))
        if not any(place.exists() for place in (root / path, ROOT / path, ROOT / f"{path}.py"))
        and not (path.endswith("/") and any(ROOT.rglob(path)))
    ]
    assert not broken, listed(broken)
