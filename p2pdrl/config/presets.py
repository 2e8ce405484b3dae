"""The presets that ship with the package, by name. Called by `loader` and by the command line.

An installed wheel carries them in ``p2pdrl/config/presets``; a checkout has them in ``config``
at its root.
"""

from __future__ import annotations

import re
from pathlib import Path

from p2pdrl.errors import ConfigError

__all__ = ["is_preset_name", "preset_names", "preset_path", "preset_summary"]

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
    import difflib

    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the presets are: {', '.join(names) or 'none'}."
    raise ConfigError(f"no preset is named {name!r}; {hint} A file of your own wants its ending: {name}.toml")


def preset_summary(name: str) -> str:
    """What a preset is, in one line: the comment at the top of its file.

    Raises:
        ConfigError: if there is no such preset.
    """
    first = preset_path(name).read_text("utf-8").partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
