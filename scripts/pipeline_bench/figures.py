"""What `bench_pipeline.py` makes of its trials: ratios, tables and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline_bench.teams import Outcome
from support.plots import COLOURS, pyplot, save

__all__ = ["ALONE", "PLAIN", "Case", "CaseSamples", "Figures", "draw", "ideal_speedup", "show", "show_memory"]

ALONE, ALL_CORES, PLAIN = "one process", "one process, all cores", "plain torch"


class Case(NamedTuple):
    """What is measured.

    Attributes:
        link: what the connections are like; empty for loopback.
        stages: ranks, each of which has one stage, or ``chunks``.
        schedule: of the pipeline.
        microbatches: M.
        contender: who.
        chunks: stages of each rank.
    """

    link: str
    stages: int
    schedule: str
    microbatches: int
    contender: str
    chunks: int = 1

    def whole(self) -> Case:
        """One process with the whole batch."""
        return Case(self.link, 1, "", 1, ALONE)

    def accumulated(self) -> Case:
        """One process with as many microbatches."""
        return Case(self.link, 1, "", self.microbatches, ALONE)

    def plain(self) -> Case:
        """The same by plain torch."""
        return self._replace(contender=PLAIN)


@dataclass
class CaseSamples:
    """The trials of one case.

    Attributes:
        rounds: by round.
        memory: of the trial in which memory was looked at.
    """

    rounds: list[Outcome] = field(default_factory=list)
    memory: Outcome | None = None

    def median(self, what: Callable[[Outcome], float]) -> float:
        """Return the median of a figure."""
        return statistics.median(what(outcome) for outcome in self.rounds)


def ideal_speedup(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return how many times as fast equal stages are at most: the bubble is all that they lose.

    That is S·M/(M+S−1); with V chunks on each of R ranks R·V·M/(V·M+R−1).
    """
    turns = chunks * microbatches
    return stages * turns / (turns + stages - 1)


class Figures:
    """All cases.

    Args:
        by_case: by case.
    """

    def __init__(self, by_case: Mapping[Case, CaseSamples]) -> None:
        self._by_case = by_case

    def ratio(self, case: Case, other: Case) -> float | None:
        """Return how many times as long as the other a case takes: the median over the rounds.

        Both trials of a round meet the same machine, so their ratio is less uneven than their times.
        """
        if case not in self._by_case or other not in self._by_case:
            return None
        pairs = zip(self._by_case[case].rounds, self._by_case[other].rounds, strict=True)
        return statistics.median(one.wall_s / two.wall_s for one, two in pairs)

    def speedup(self, case: Case) -> float | None:
        """Return how many times as fast as one process with the whole batch a case is."""
        return self.ratio(case.whole(), case)

    def gain(self, case: Case) -> float | None:
        """Return how many times as fast as one process with as many microbatches a case is.

        That is its speed-up without what it costs to cut a batch, which no pipeline can help.
        """
        return self.ratio(case.accumulated(), case)

    def efficiency(self, case: Case) -> float | None:
        """Return which part of the ideal speed-up the gain is."""
        gain = self.gain(case)
        return None if gain is None else gain / ideal_speedup(case.stages, case.microbatches, case.chunks)

    def row(self, case: Case) -> dict[str, Any]:
        """Return all figures of a case."""
        samples = self._by_case[case]
        alone = case.contender in (ALONE, ALL_CORES)
        bubbles = [outcome.bubble for outcome in samples.rounds if outcome.bubble is not None]
        memory = samples.memory
        return {
            **case._asdict(),
            "wall_s": samples.median(lambda outcome: outcome.wall_s),
            "cpu_s": samples.median(lambda outcome: outcome.cpu_s),
            "collect_s": samples.median(lambda outcome: outcome.collect_s) or None,
            "x_plain": None if alone else self.ratio(case, case.plain()),
            "speedup": self.speedup(case),
            "ideal": None if alone else ideal_speedup(case.stages, case.microbatches, case.chunks),
            "efficiency": None if alone else self.efficiency(case),
            "bubble": statistics.median(bubbles) if bubbles else None,
            "peak_bytes": None if memory is None else memory.peak_bytes,
            "kept_bytes": None if memory is None else memory.kept_bytes,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of all cases."""
        return [self.row(case) for case in self._by_case]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of times."""
    names = ("wall ms", "CPU ms", "x plain", "speed-up", "ideal", "effic.", "bubble", "collect ms")
    widths = (9, 9, 8, 9, 7, 7, 7, 11)
    heads = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    for title, group in _groups(rows):
        print(f"\n{title:33} {'M':>2} {heads}")
        for row in group:
            cells = (
                _number(row["wall_s"], 9, 1, 1e3),
                _number(row["cpu_s"], 9, 1, 1e3),
                _number(row["x_plain"], 8, 2),
                _number(row["speedup"], 9, 2),
                _number(row["ideal"], 7, 2),
                _number(row["efficiency"], 7, 2),
                _number(row["bubble"], 7, 2),
                _number(row["collect_s"], 11, 1, 1e3),
            )
            print(f"  {row['contender']:31} {row['microbatches']:>2} {' '.join(cells)}")


def show_memory(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of memory, where it was looked at."""
    for title, group in _groups([row for row in rows if row["peak_bytes"]]):
        print(f"\n{title:33} {'M':>2}  {'most memory, MiB':24} kept by autograd, MiB")
        for row in group:
            peaks, kept = (
                ", ".join(f"{nbytes / 2**20:.1f}" for nbytes in row[name])
                for name in ("peak_bytes", "kept_bytes")
            )
            print(f"  {row['contender']:31} {row['microbatches']:>2}  {peaks:24} {kept}")


def _groups(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Put rows under titles, in order, and each group in the order of M."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        pipeline = f"{row['stages']} ranks, {row['schedule']}" if row["schedule"] else "whole model"
        groups.setdefault(", ".join(filter(None, (row["link"], pipeline))), []).append(row)
    return [(title, sorted(group, key=lambda row: row["microbatches"])) for title, group in groups.items()]


def _number(value: float | None, width: int, digits: int, scale: float = 1.0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value * scale:{width}.{digits}f}"


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the time of a step, and the gain, by the number of microbatches; measured, and ideal dashed.

    Args:
        rows: of one link.
        path: of the picture.
        title: above it.
    """
    plt = pyplot()
    figure, (times, gains) = plt.subplots(1, 2, figsize=(11, 4.2))
    alone = {row["microbatches"]: row["wall_s"] for row in rows if row["contender"] == ALONE}
    times.plot(list(alone), [value * 1e3 for value in alone.values()], "k-o", label=ALONE)
    for index, (label, curve) in enumerate(_curves(rows).items()):
        colour = COLOURS[index % len(COLOURS)]
        at = [row["microbatches"] for row in curve]
        times.plot(at, [row["wall_s"] * 1e3 for row in curve], marker="o", color=colour, label=label)
        gains.plot(at, [row["efficiency"] * row["ideal"] for row in curve], marker="o", color=colour)
    for style, (label, ideal) in zip(("--", ":", "-."), _ideals(rows).items(), strict=False):
        times.plot(list(ideal), [alone[m] / ideal[m] * 1e3 for m in ideal], f"k{style}", label=label)
        gains.plot(list(ideal), list(ideal.values()), f"k{style}")
    times.set_title("time of a gradient step, ms")
    gains.set_title("times as fast as one process with equal M")
    for axis in (times, gains):
        axis.set_xlabel("microbatches")
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(alone), [str(m) for m in alone])
        axis.set_ylim(bottom=0)
    labels = times.get_legend_handles_labels()
    figure.legend(*labels, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.18))
    figure.suptitle(title)
    save(figure, path)


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Put the pipelines' rows under labels, in the order of M."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["microbatches"]):
        if row["contender"] not in (ALONE, ALL_CORES):
            label = f"{row['contender']}, {row['schedule']}, {row['stages']} ranks"
            curves.setdefault(label, []).append(row)
    return dict(sorted(curves.items()))


def _ideals(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the ideal speed-up by M, for each number of ranks and chunks."""
    ideals: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["microbatches"]):
        if row["contender"] not in (ALONE, ALL_CORES):
            more = f" x {row['chunks']} stages" if row["chunks"] > 1 else ""
            ideals.setdefault(f"ideal, {row['stages']} ranks{more}", {})[row["microbatches"]] = row["ideal"]
    return ideals
