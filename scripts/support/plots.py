"""Drawing helpers that scripts share; matplotlib is loaded when something is drawn, and only then."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#3465a4", "#cc6600", "#4e9a06", "#a40000", "#75507b", "#8f5902", "#0b7a75", "#555753")
KINDS = (".png", ".svg", ".pdf")


def pyplot() -> Any:
    """Return ``matplotlib.pyplot`` with a backend that needs no screen.

    Raises:
        SystemExit: matplotlib isn't installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        sys.exit("drawing needs matplotlib: pip install 'p2pdrl[plots]', or leave --plot out")
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    return plt


def check_path(path: Path) -> None:
    """End with a message when a picture can't be written there, before hours are spent.

    Raises:
        SystemExit: the ending is unknown, or there is no such folder.
    """
    if path.suffix not in KINDS:
        sys.exit(f"{path}: a picture ends with {', '.join(KINDS)}")
    if not path.parent.is_dir():
        sys.exit(f"{path}: there is no folder {path.parent}")


def save(figure: Any, path: Path) -> None:
    """Write a figure and let go of it."""
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot().close(figure)


def bars(axis: Any, names: Sequence[str], values: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw horizontal bars, one group for each name, the first on top.

    Args:
        axis: to draw on.
        names: of the groups.
        values: of each series, one for each name; NaN draws nothing.
        title: above; says the unit.
    """
    height = 0.8 / max(1, len(values))
    for index, (label, series) in enumerate(values.items()):
        places = [place + (index - (len(values) - 1) / 2) * height for place in range(len(names))]
        axis.barh(places, list(series), height, label=label, color=COLOURS[index % len(COLOURS)])
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_title(title)
    if len(values) > 1:
        axis.legend(fontsize=8)


def lines(
    axis: Any, curves: Mapping[str, Sequence[tuple[float, float]]], title: str, x: str, y: str, **style: Any
) -> None:
    """Draw curves of (x, y).

    Args:
        axis: to draw on.
        curves: by label.
        title: above.
        x: what goes to the right, with its unit.
        y: what goes up.
        **style: for ``Axes.plot``.
    """
    marks = ("o", "s", "^", "v", "D", "P", "X", "*")
    for index, (label, points) in enumerate(curves.items()):
        look = {"color": COLOURS[index % len(COLOURS)], "marker": marks[index % len(marks)]} | style
        axis.plot([p[0] for p in points], [p[1] for p in points], label=label, **look)
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend(fontsize=8)
