"""Processes of a bench that are told what to do, and answer, in lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

__all__ = ["Team", "Worker", "WorkerLostError"]

ANSWER_S = 120.0
END_S = 20.0


class WorkerLostError(Exception):
    """A worker ended, or did not answer in time."""


class Worker:
    """One process, at the head of a process group of its own.

    Args:
        command: what to run.
        environment: its variables; None for ours.

    Raises:
        WorkerLostError: there is no such program.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
            )
        except OSError as error:
            raise WorkerLostError(f"cannot start {command[0]}: {error}") from error
        self._to, self._from = cast("TextIO", self._process.stdin), cast("TextIO", self._process.stdout)

    def say(self, **words: object) -> None:
        """Send one line.

        Raises:
            WorkerLostError: it has ended.
        """
        try:
            self._to.write(json.dumps(words) + "\n")
            self._to.flush()
        except OSError as error:
            raise WorkerLostError(f"worker {self._process.pid} ended early") from error

    def hear(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Read one line.

        Raises:
            WorkerLostError: it has ended, or says nothing for ``timeout_s``.
        """
        if not select.select([self._from], [], [], max(timeout_s, 0.0))[0]:
            raise WorkerLostError(f"worker {self._process.pid} does not answer")
        line = self._from.readline()
        if not line:
            raise WorkerLostError(f"worker {self._process.pid} ended early")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def dismiss(self) -> None:
        """Tell it to end, and don't wait."""
        with suppress(OSError):
            self._to.close()

    def end(self, timeout_s: float = END_S) -> None:
        """Wait until it has ended, which `dismiss` told it; then kill what is left of its group."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill it and all of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)
        self.dismiss()
        self._from.close()


class Team:
    """All workers together.

    Args:
        workers: the processes, by rank.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers

    def ask(self, *, timeout_s: float = ANSWER_S, **words: object) -> list[dict[str, Any]]:
        """Say the same to all; return the answers.

        Raises:
            WorkerLostError: one has ended, or not all have answered in ``timeout_s``.
        """
        for worker in self.workers:
            worker.say(**words)
        deadline_s = time.monotonic() + timeout_s
        return [worker.hear(deadline_s - time.monotonic()) for worker in self.workers]

    def close(self) -> None:
        """End all in an orderly way; who takes too long is killed."""
        for worker in self.workers:
            worker.dismiss()
        deadline_s = time.monotonic() + END_S
        for worker in self.workers:
            worker.end(max(deadline_s - time.monotonic(), 0.0))

    def kill(self) -> None:
        """End all at once."""
        for worker in self.workers:
            worker.kill()
