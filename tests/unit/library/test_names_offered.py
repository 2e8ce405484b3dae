"""What ``import p2pdrl`` offers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import p2pdrl

STUB = Path(p2pdrl.__file__).with_suffix(".pyi")


def test_each_name_is_there_and_nothing_else():
    assert all(getattr(p2pdrl, name) for name in p2pdrl.__all__)
    assert set(p2pdrl.__all__) <= set(dir(p2pdrl))
    with pytest.raises(AttributeError, match="Policies"):
        _ = p2pdrl.Policies


def test_the_stub_names_the_same_places():
    tree = ast.parse(STUB.read_text())
    found = {
        alias.asname: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(found) | {"__version__"} == set(p2pdrl.__all__)
    assert {name: getattr(p2pdrl, name).__module__ for name in found} == found


def test_importing_the_package_imports_nothing_of_weight():
    code = "import p2pdrl, sys; print(len({'torch', 'numpy', 'aiohttp', 'msgspec'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "0\n"
