"""A user's own code by names."""

from __future__ import annotations

import sys

import pytest

import p2pdrl
from p2pdrl.errors import UsageError
from p2pdrl.library import names


@pytest.fixture(autouse=True)
def _own(monkeypatch, tmp_path):
    """A module of a user's, and no names from other tests."""
    monkeypatch.setattr(names, "_environments", {})
    monkeypatch.setattr(names, "_networks", {})
    (tmp_path / "own_things.py").write_text("class Pole:\n    pass\n\n\ndef net(shape, config):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_things", None)


def test_names_stand_for_what_a_module_has(tmp_path):
    import own_things

    assert p2pdrl.register_env("Pole-v0", "own_things:Pole") == "own_things:Pole"
    assert p2pdrl.register_network("small", own_things.net) == "own_things:net"
    assert names.env_entry("Pole-v0") == "own_things:Pole"
    assert names.env_entry("small") is None
    assert names.network_entry("small") == "own_things:net"
    assert names.is_registered("own_things:Pole")
    assert not names.is_registered("own_things:other")
    assert names.search_path(["own_things:Pole"]) == [str(tmp_path)]


def in_main():
    """Stands in for a function of a notebook."""


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (lambda: None, "instead of a lambda"),
        ("own_things", "module:attribute"),
        ("own_things:Rod", "nothing that is named 'Rod'"),
        ("no_such_module:Pole", r"sys\.path"),
    ],
)
def test_what_others_cant_import_is_refused_with_what_to_do(entry, word):
    with pytest.raises(UsageError, match=word):
        p2pdrl.register_env("Pole-v0", entry)


def test_a_notebooks_function_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(in_main, "__module__", "__main__")
    with pytest.raises(UsageError, match=r"my_module\.py.*register 'my_module:in_main'"):
        p2pdrl.register_network("net", in_main)


def test_a_class_inside_a_function_is_refused():
    class Inner:
        pass

    with pytest.raises(UsageError, match="inside a function"):
        p2pdrl.register_env("Inner-v0", Inner)


@pytest.mark.parametrize("name", ["", "a b", "x" * 200, "own:thing"])
def test_bad_names(name):
    with pytest.raises(UsageError, match="is no name"):
        p2pdrl.register_env(name, "own_things:Pole")
