"""The hivemind method of `bench_averaging.py`: peers of its own interpreter, and what becomes of a round."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.worker_team import Team, Worker, WorkerLostError

__all__ = ["ROWS", "HivemindTeam"]

WORKER = Path(__file__).with_name("hivemind_worker.py")
ROWS = ("hivemind", "hivemind+meet")
WARM_UPS = 2
MOST_FAILURES = 3  # after so many failures in a row a size is given up
PAUSE_S = 0.1  # its processes still tidy up when the round is done; the next method should not pay for it


class RoundFailedError(Exception):
    """A round that found no group, was not done in time, or left a wrong average."""


class HivemindTeam:
    """Hivemind's peers, one process (and its own children) for every rank.

    A failed round costs the team its processes: the next round begins with new ones, and with warm-ups.

    Args:
        python: an interpreter with hivemind.
        ranks: how many peers.

    Raises:
        WorkerLostError: its workers don't start.
    """

    def __init__(self, python: str, ranks: int) -> None:
        self._python, self._ranks = python, ranks
        self._size = self._names = self._failed_in_a_row = 0
        self._warm = False
        self._folder = tempfile.TemporaryDirectory()
        self._team: Team | None = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._team is not None:
            self._team.close()
        self._folder.cleanup()

    def begin(self, size: int) -> None:
        """The next rounds are of ``size`` floats."""
        self._size, self._failed_in_a_row, self._warm = size, 0, False

    def turn(self) -> dict[str, tuple[float, float]]:
        """Average once.

        Returns:
            (wall seconds of the slowest peer, CPU seconds of all) by row; empty for a round that failed.
        """
        if self._failed_in_a_row == MOST_FAILURES:
            return {}
        try:
            times = self._round()
        except (RoundFailedError, WorkerLostError) as error:
            print(f"hivemind failed with {self._size} floats: {error}", file=sys.stderr)
            self._failed_in_a_row += 1
            if self._team is not None:
                self._team.kill()
                self._team = None
            return {}
        self._failed_in_a_row = 0
        time.sleep(PAUSE_S)
        return times

    def _start(self) -> Team:
        """Start the processes; rank 0 begins the DHT that the others join."""
        environment = {"HIVEMIND_LOGLEVEL": "CRITICAL", **os.environ}
        team = Team(
            [
                Worker(
                    [self._python, "-I", str(WORKER), str(rank), str(self._ranks), self._folder.name],
                    environment,
                )
                for rank in range(self._ranks)
            ]
        )
        try:
            first, *others = team.workers
            first.say(do="open", maddrs=[])
            opened = [first.hear()]
            for worker in others:
                worker.say(do="open", maddrs=opened[0].get("maddrs"))
            _check(opened + [worker.hear() for worker in others])
        except (RoundFailedError, WorkerLostError) as error:
            team.kill()
            raise WorkerLostError(f"hivemind did not start: {error}") from error
        self._warm = False
        return team

    def _round(self) -> dict[str, tuple[float, float]]:
        """Average once; before the first of a size, set up and warm up."""
        if self._team is None:
            self._team = self._start()
        if not self._warm:
            self._names += 1
            _check(self._team.ask(do="prepare", size=self._size, name=f"bench{self._names}"))
            for _ in range(WARM_UPS):
                self._once(self._team)
            self._warm = True
        return self._once(self._team)

    def _once(self, team: Team) -> dict[str, tuple[float, float]]:
        meeting = _check(team.ask(do="meet"))
        reducing = _check(team.ask(do="round"))
        return dict(zip(ROWS, (reducing, (meeting[0] + reducing[0], meeting[1] + reducing[1])), strict=True))


def _check(answers: list[dict[str, Any]]) -> tuple[float, float]:
    """Return (wall seconds of the slowest, CPU seconds of all), or raise `RoundFailedError`."""
    reasons = sorted({str(answer["failed"]) for answer in answers if "failed" in answer})
    if reasons:
        raise RoundFailedError("; ".join(reasons))
    return (
        max(answer.get("wall_s", 0.0) for answer in answers),
        sum(answer.get("cpu_s", 0.0) for answer in answers),
    )
