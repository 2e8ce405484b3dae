"""Shows something again and again: live on a terminal, as blocks elsewhere. Ends with Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.text import Text

from p2pdrl.errors import DaemonUnreachableError

__all__ = ["watch"]


def watch(show: Callable[[], RenderableType], out: Console, interval_s: float) -> None:
    """Ask and show for ever. The first failure counts; later ones are told below the last picture.

    Args:
        show: asks the node and makes the picture.
        out: where to.
        interval_s: pause between pictures.

    Raises:
        DaemonUnreachableError: nobody answered the first time.
    """
    picture = show()
    if not out.is_terminal:
        while True:
            out.print(picture)
            out.print()
            time.sleep(interval_s)
            picture = _again(show, picture)
    from rich.live import Live

    with Live(picture, console=out, auto_refresh=False, transient=False) as live:
        while True:
            time.sleep(interval_s)
            picture = _again(show, picture)
            live.update(picture, refresh=True)


def _again(show: Callable[[], RenderableType], last: RenderableType) -> RenderableType:
    try:
        return show()
    except DaemonUnreachableError as error:
        good = last.renderables[0] if isinstance(last, _Stale) else last
        return _Stale(good, Text(f"\n{error}", style="red"))


class _Stale(Group):
    """The last good picture, with why there is no newer one."""
