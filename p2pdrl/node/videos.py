"""Films this node's policy now and then while it trains (``node.video``).

An episode is played by a process of the lowest priority, which ends with it: while it works the learner has
the processors first, and between two films the node rests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

from p2pdrl.config.node import VideoConfig
from p2pdrl.errors import CheckpointError, ConfigError, StorageError, TensorError, UsageError, WorkerError
from p2pdrl.node.children.evaluator import EvaluatorProcess
from p2pdrl.node.context import NodeContext
from p2pdrl.tensors.checkpoint import chunks

__all__ = ["FOLDER", "LONGEST_S", "Videos", "require_video"]

FOLDER = "videos"
UNFINISHED = ".unfinished"
LOOK_EVERY_S = 1.0
REST = 9.0
"""Times as long as the last film took."""
LONGEST_S = 1800.0
"""A film that isn't done by then is given up: the machine has no time for it, or the episode doesn't end."""


def require_video(config: VideoConfig) -> None:
    """Check that films can be written here, if there are to be any.

    Raises:
        UsageError: they can't.
    """
    if config.every and importlib.util.find_spec("moviepy") is None:
        raise UsageError(
            "node.video.every needs moviepy, which isn't installed here; run: pip install 'p2pdrl[video]'"
        )


class Videos:
    """Makes this node's films.

    Args:
        process: plays and films; stopped after each film.
    """

    def __init__(self, context: NodeContext, config: VideoConfig, process: EvaluatorProcess) -> None:
        self._context = context
        self._config = config
        self._process = process
        self._folder = Path(context.data_dir) / FOLDER

    async def run(self) -> None:
        """Film whenever it is time, until cancelled."""
        context, every = self._context, self._config.every
        if not every:
            await asyncio.Event().wait()
        next_at = _next(context.progress_tracker.total().env_steps, every)
        rest_until_s = float("-inf")
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                steps = context.progress_tracker.total().env_steps
                now_s = context.clock.monotonic()
                if context.state != "training" or steps < next_at or now_s < rest_until_s:
                    continue
                if not await self._film(steps):
                    await asyncio.Event().wait()
                ended_s = context.clock.monotonic()
                rest_until_s = ended_s + REST * (ended_s - now_s)
                next_at = _next(context.progress_tracker.total().env_steps, every)
        finally:
            await self._process.stop()

    async def _film(self, steps: int) -> bool:
        """Make one film; tell whether others can be made."""
        events, checkpointer = self._context.events, self._context.checkpointer
        if checkpointer is None:
            return True
        path = self._folder / f"step-{steps}.mp4"
        try:
            content = await asyncio.to_thread(chunks, await checkpointer.snapshot())
            unfinished = self._folder / UNFINISHED / path.name
            filmed = await self._process.film(content, unfinished, seed=steps % 2**31)
            await asyncio.to_thread(self._keep, unfinished, path)
        except ConfigError as error:
            events.emit("video-failed", f"no video can be made here: {error}", level="error")
            return False
        except (WorkerError, CheckpointError, TensorError, StorageError, OSError) as error:
            events.emit("video-failed", f"a video failed: {error}", level="warning")
        else:
            text = f"filmed an episode of return {filmed.episode_return:.4g}: {path}"
            events.emit("filmed", text, env_steps=steps, path=str(path), seconds=filmed.seconds)
        finally:
            await self._process.stop()
            await asyncio.to_thread(shutil.rmtree, self._folder / UNFINISHED, ignore_errors=True)
        return True

    def _keep(self, unfinished: Path, path: Path) -> None:
        """Put a film where it belongs, and remove the oldest of too many."""
        unfinished.replace(path)
        numbered = []
        for file in self._folder.glob("step-*.mp4"):
            number = file.stem.removeprefix("step-")
            if number.isascii() and number.isdigit():
                numbered.append((int(number), file))
        for _, file in sorted(numbered, reverse=True)[self._config.keep :]:
            file.unlink(missing_ok=True)


def _next(steps: int, every: int) -> int:
    return (steps // every + 1) * every
