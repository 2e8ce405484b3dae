"""A user's own code: environments and networks that a task names as ``module:name``.

Importing runs code. Who calls these functions has made sure that the owner of the machine allowed it: the
daemon checks a task's names where it comes in (`config.environments.import_problems`) and tells its children.
"""

from __future__ import annotations

import importlib
from typing import Any

from p2pdrl.config.environments import imports_of
from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import ConfigError

__all__ = ["load_named", "require_allowed"]


def require_allowed(task: TaskConfig, *, allow_import: bool) -> None:
    """Check that a task imports nothing, or may.

    Raises:
        ConfigError: it may not.
    """
    if allow_import:
        return
    for key, name in imports_of(task).items():
        raise ConfigError(
            f"{key} = {name!r} imports a Python module, which runs its code; "
            "if you trust it give --allow-import, from Python allow_import=True"
        )


def load_named(name: str) -> Any:
    """Import ``module:name`` and return what it names.

    Raises:
        ConfigError: there is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{name!r} can't be imported: {error}; is its folder on PYTHONPATH, on every node?"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"module {module_name!r} has nothing that is named {attribute!r}") from error
