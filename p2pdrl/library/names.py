"""A user's own environments and networks by names: ``p2pdrl.register_env`` and ``p2pdrl.register_network``.

A name stands for ``module:attribute``, which is what a task says to other processes and other nodes: they
import it by themselves (docs/own_code.md). So what is registered must be importable; nothing is pickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pdrl.errors import UsageError

__all__ = ["env_entry", "is_registered", "network_entry", "register_env", "register_network", "search_path"]

_NAME = re.compile(r"[\w./-]{1,128}")
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_environments: dict[str, str] = {}
_networks: dict[str, str] = {}


def register_env(name: str, entry: str | Callable[..., Any]) -> str:
    """Let ``name`` stand for an environment of yours, in `p2pdrl.train` and `p2pdrl.load` of this process.

    Args:
        name: letters, digits and ``_ - . /``, such as ``MyPole-v0``.
        entry: ``"module:attribute"``, or a class or function of a module, which makes a gymnasium
            environment from ``task.env.kwargs``.

    Returns:
        ``module:attribute``, which is the id that the task has: other nodes name and allow it so.

    Raises:
        UsageError: it can't be imported by that name: a lambda, what is defined in a notebook, in
            ``__main__`` or inside a function.
    """
    found = _entry_of(entry, "an environment")
    _environments[_checked(name)] = found
    return found


def register_network(name: str, entry: str | Callable[..., Any]) -> str:
    """Let ``name`` stand for a network of yours, a ``Trunk`` (docs/own_code.md).

    ``p2pdrl.train(…, task__network__own=name)`` takes it.

    Args:
        name: as for `register_env`.
        entry: likewise; makes a ``Trunk`` from an observation's shape and ``task.network``.

    Returns:
        ``module:attribute``.

    Raises:
        UsageError: as `register_env`.
    """
    found = _entry_of(entry, "a network")
    _networks[_checked(name)] = found
    return found


def env_entry(name: str) -> str | None:
    """Return what an environment's name stands for; None where nobody has registered it."""
    return _environments.get(name)


def network_entry(name: str) -> str | None:
    """Return what a network's name stands for; None where nobody has registered it."""
    return _networks.get(name)


def is_registered(entry: str) -> bool:
    """Whether somebody in this process has registered ``module:attribute``, and so allows its import."""
    return entry in _environments.values() or entry in _networks.values()


def search_path(entries: list[str]) -> list[str]:
    """Return the folders in which other processes find the modules of entries."""
    folders = []
    for entry in entries:
        spec = importlib.util.find_spec(entry.partition(":")[0].partition(".")[0])
        if spec is None:
            continue
        if spec.submodule_search_locations:
            folders += [str(Path(location).resolve().parent) for location in spec.submodule_search_locations]
        elif spec.origin is not None:
            folders.append(str(Path(spec.origin).resolve().parent))
    return list(dict.fromkeys(folders))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name: letters, digits and _ - . / such as MyPole-v0")
    return name


def _entry_of(entry: str | Callable[..., Any], what: str) -> str:
    """Return ``module:attribute`` of something that can be imported by it."""
    text = entry if isinstance(entry, str) else _name_of(entry, what)
    if not _ENTRY.fullmatch(text):
        raise UsageError(f"{text!r} isn't written module:attribute, as in my_pole:Pole")
    module, _, attribute = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UsageError(f"{text} can't be imported: {error}; is its folder in sys.path?") from error
    except AttributeError as error:
        raise UsageError(f"module {module} has nothing that is named {attribute!r}") from error
    if not isinstance(entry, str) and found is not entry:
        raise UsageError(f"{text} is something else by now: register what the module has under that name")
    return text


def _name_of(entry: Callable[..., Any], what: str) -> str:
    module = getattr(entry, "__module__", None)
    name = getattr(entry, "__qualname__", "")
    if module == "__main__" or module is None:
        main = getattr(sys.modules["__main__"], "__file__", None)
        where = "a notebook or the prompt" if main is None else Path(main).name
        raise UsageError(
            f"{what} that is defined in {where} can't be imported by the processes that train: put {name} "
            f"into a file, my_module.py say, and register 'my_module:{name.rpartition('.')[2]}'"
        )
    if "<" in name or "." in name or not name:
        raise UsageError(
            f"{what} must have a name at the top of its module, and {name or entry!r} has none: processes "
            "that train import it as module:attribute; write a class or a def there instead of a lambda, or "
            "of one inside a function"
        )
    return f"{module}:{name}"
