"""The process that plays evaluations, or films: started with the first one, kept, started anew where it died.

The checkpoint to be played lies in memory that the daemon shares with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from p2pdrl.errors import WorkerError
from p2pdrl.node.children.child_process import ProcessLink
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.workers.protocol import Film, Filmed, Play, Played, decode_from_evaluator, frame

__all__ = ["EvaluatorProcess"]

PLAY_S = 3600.0
"""The longest that an evaluation may take."""
SLACK = 1.25
"""Room in the shared memory for a checkpoint whose counters grow."""


class EvaluatorLink(ProcessLink):
    """A running evaluator process."""

    NAME = "evaluator"

    @classmethod
    async def spawn(cls, memory: SharedRegion, threads: int) -> EvaluatorLink:
        """Start the process.

        Raises:
            WorkerError: it can't be started.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        options = {"--memory": memory.fd, "--nbytes": memory.nbytes}
        return cls(*await cls.launch("p2pdrl.workers.evaluator", options, environment, [memory.fd]))

    async def ask(self, request: Play | Film) -> Played | Filmed:
        """Have it play or film.

        Raises:
            ConfigError: it can't, as configured.
            WorkerError: it is gone, or can't.
        """
        await self.send(frame(request))
        while True:
            for body in await self.receive():
                message = decode_from_evaluator(body)
                if isinstance(message, Played | Filmed):
                    return message
                self.says_its_end(message)


class EvaluatorProcess:
    """This node's evaluator, through all its restarts.

    Args:
        threads: of its numerical libraries.
        allow_import: permit environment ids that import a module.
        longest_s: an evaluation is given up after this.
    """

    def __init__(self, *, threads: int, allow_import: bool, longest_s: float = PLAY_S) -> None:
        self._threads = threads
        self._allow_import = allow_import
        self._longest_s = longest_s
        self._memory: SharedRegion | None = None
        self._link: EvaluatorLink | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        return None if self._link is None else self._link.pid

    async def play(
        self, checkpoint: Sequence[memoryview], episodes: int, *, greedy: bool, seed: int
    ) -> Played:
        """Play episodes with a checkpoint's policy; one call at a time.

        Args:
            checkpoint: the content of its file, as `tensors.checkpoint.chunks` returns it.
            seed: of environments and actions.

        Raises:
            ConfigError: its task can't be played here.
            WorkerError: the process died, or took too long; the next call starts another.
            TensorError: the system gives no memory to share.
        """
        nbytes = sum(part.nbytes for part in checkpoint)
        request = Play(nbytes, episodes, greedy, seed, self._threads, self._allow_import)
        answer = await self._ask(request, checkpoint)
        if not isinstance(answer, Played):
            raise WorkerError("the evaluator filmed, and should have played")
        return answer

    async def film(self, checkpoint: Sequence[memoryview], path: Path, *, seed: int) -> Filmed:
        """Film an episode with a checkpoint's policy; one call at a time.

        Args:
            path: of the file, .mp4; its folder is made.

        Raises:
            ConfigError: its task can't be filmed here.
            WorkerError: as `play`.
            TensorError: likewise.
        """
        nbytes = sum(part.nbytes for part in checkpoint)
        answer = await self._ask(Film(nbytes, str(path), seed, self._allow_import), checkpoint)
        if not isinstance(answer, Filmed):
            raise WorkerError("the evaluator played, and should have filmed")
        return answer

    async def _ask(self, request: Play | Film, checkpoint: Sequence[memoryview]) -> Played | Filmed:
        nbytes = request.nbytes
        if self._memory is None or self._memory.nbytes < nbytes:
            await self.stop()
            self._memory = SharedRegion.create(int(nbytes * SLACK) + (1 << 16), "evaluation")
        await asyncio.to_thread(_fill, self._memory, checkpoint)
        if self._link is None:
            self._link = await EvaluatorLink.spawn(self._memory, self._threads)
        link = self._link
        try:
            async with asyncio.timeout(self._longest_s):
                return await link.ask(request)
        except TimeoutError:
            await self._kill()
            raise WorkerError(f"the evaluator wasn't done after {self._longest_s:g} s") from None
        except WorkerError as error:
            self._link = None
            how = (await link.ended()).how
            raise WorkerError(f"{error}: it {how}") from error
        except BaseException:
            await self._kill()
            raise

    async def stop(self) -> None:
        """End the process, and free the memory."""
        await self._kill()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    async def _kill(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.kill()


def _fill(memory: SharedRegion, parts: Sequence[memoryview]) -> None:
    at = 0
    for part in parts:
        memory.buf[at : at + part.nbytes] = part.cast("B")
        at += part.nbytes
