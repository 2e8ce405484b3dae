"""The table of `bench_pipeline.py` for a README: a step's time by ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline_bench.figures import ALL_CORES, ALONE, PLAIN

__all__ = ["markdown"]

HEADS = (
    "ranks",
    "microbatches",
    "one process",
    "ideal",
    "`stream`",
    "`torch`",
    "plain `torch.distributed.pipelining`",
    "speed-up",
    "of the ideal",
    "most memory, MiB",
)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table.

    ``ideal`` is one process' time with as many microbatches, divided by S·M/(M+S−1): where only the bubble
    costs. ``speed-up`` is of ``stream`` over one process with the whole batch, ``of the ideal`` the part of
    the ideal one once what cutting costs is divided out; memory is that of ``stream``'s ranks, and of one
    process. Each process has one thread, but for that of the line below.

    Args:
        rows: of one link and one schedule, as ``Figures.rows`` gives them.
    """
    alone = {row["microbatches"]: row for row in rows if row["contender"] == ALONE}
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for stages in sorted({row["stages"] for row in rows if row["contender"] not in (ALONE, ALL_CORES)}):
        for microbatches, single in sorted(alone.items()):
            found = {
                row["contender"]: row
                for row in rows
                if (row["stages"], row["microbatches"]) == (stages, microbatches) and row is not single
            }
            if "stream" not in found:
                continue
            stream = found["stream"]
            cells = [
                str(stages),
                str(microbatches),
                _ms(single["wall_s"]),
                _ms(single["wall_s"] / stream["ideal"]),
                *(_ms(found.get(name, {}).get("wall_s")) for name in ("stream", "torch", PLAIN)),
                f"{stream['speedup']:.2f}",
                f"{stream['efficiency']:.2f}",
                f"{_mib(stream['peak_bytes'])}; unsplit {_mib(single['peak_bytes'])}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        if row["contender"] == ALL_CORES:
            lines += ["", f"One process with threads on all cores, the whole batch: {_ms(row['wall_s'])}."]
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def _mib(peaks: Sequence[int] | None) -> str:
    return ", ".join(f"{nbytes / 2**20:.0f}" for nbytes in peaks or ()) or "–"
