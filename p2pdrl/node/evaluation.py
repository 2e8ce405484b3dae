"""Evaluations of the swarm's policy as this node makes and hears them.

When it is this node's turn (`accounting.evaluations`) it plays episodes with the parameters that it holds
now, in a process of its own (`children.evaluator`). What comes out goes into the log, the report, the events,
and decides on the ``best`` checkpoint. At each gossip round, what other nodes' reports tell is taken in.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from p2pdrl.errors import CheckpointError, ConfigError, StorageError, TensorError, WorkerError
from p2pdrl.node.accounting.evaluations import Entry, Evaluation, EvaluationLog, Turns
from p2pdrl.node.children.evaluator import EvaluatorProcess
from p2pdrl.node.context import NodeContext
from p2pdrl.node.status import pipeline
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.node.training import Training
from p2pdrl.tensors.checkpoint import Checkpoint, chunks

__all__ = ["Evaluations"]

LOOK_EVERY_S = 1.0
AFTER_FAILURE_S = 60.0


class Evaluations:
    """Makes this node's evaluations, and keeps `NodeContext.evaluations`.

    Args:
        process: plays the episodes; stopped with `run`.
        heard: told each new one, whoever made it.
    """

    def __init__(
        self,
        context: NodeContext,
        reporter: StatusReporter,
        training: Training,
        process: EvaluatorProcess,
        heard: Callable[[Entry], None],
    ) -> None:
        self._context = context
        self._reporter = reporter
        self._training = training
        self._on_heard = heard
        self._lineage = training.lineage
        self._told_fall = False
        self._process = process

    async def run(self) -> None:
        """Evaluate whenever it is this node's turn, until cancelled."""
        task = self._training.task
        turns = None
        try:
            while task.evaluated:
                await asyncio.sleep(LOOK_EVERY_S)
                if self._context.state != "training":
                    continue
                steps = self._context.progress_tracker.total().env_steps
                if turns is None:
                    turns = Turns(self._context.node_id, task.evaluation.every, steps)
                now_s = self._context.clock.monotonic()
                goal = self._training.stop_config.mean_return
                if turns.mine(steps, self._evaluators(), self._context.evaluations, goal, now_s):
                    seconds = await self._evaluate(steps)
                    turns.took(seconds, self._context.clock.monotonic())
            await asyncio.Event().wait()
        finally:
            await self._process.stop()

    def hear(self) -> None:
        """Take in what the newest reports tell of our lineage."""
        context = self._context
        if self._training.lineage != self._lineage:
            self._lineage = self._training.lineage
            context.evaluations = EvaluationLog()
            context.own_evaluations = ()
        known = context.progress_tracker.total().env_steps
        for report in self._reporter.reports():
            if report.lineage == self._lineage and context.judges(report.id):
                for evaluation in report.evaluations:
                    if evaluation.env_steps <= known:  # one from the future would stay the newest for ever
                        self._heard(report.id, evaluation)
        fall = context.evaluations.fall()
        if fall is not None and not self._told_fall:
            context.events.emit("return-falls", f"{fall}; the best checkpoint is kept", level="warning")
        self._told_fall = fall is not None

    def _heard(self, node: str, evaluation: Evaluation) -> None:
        if self._context.evaluations.add(node, evaluation):
            self._on_heard(Entry(node, evaluation))
            if node == self._context.node_id:  # others' word would let them choose whose pulls count less
                self._training.swarm.judged(evaluation.mean)

    def _evaluators(self) -> list[str]:
        """Ids of the living nodes that train and hold the policy themselves."""
        reports = [one for one in self._reporter.reports() if self._context.judges(one.id)]
        mine = [self._context.node_id] if pipeline.trains(self._training) else []
        return mine + [one.id for one in reports if one.state == "training" and one.trains]

    async def _evaluate(self, steps: int) -> float:
        """Make one evaluation; return its seconds, or for how long it is as if it had lasted."""
        context, events = self._context, self._context.events
        began_s = context.clock.monotonic()
        lineage = self._training.lineage
        try:
            checkpoint, evaluation = await self._played(steps)
        except ConfigError as error:
            events.emit("evaluation-failed", f"no evaluation can be made here: {error}", level="error")
            await asyncio.Event().wait()
        except (WorkerError, CheckpointError, TensorError) as error:
            events.emit("evaluation-failed", f"an evaluation failed: {error}", level="warning")
            await asyncio.sleep(AFTER_FAILURE_S)
            return 0.0
        if self._training.lineage != lineage:
            return context.clock.monotonic() - began_s
        if not evaluation.finite:
            events.emit("evaluation-failed", "the environment's returns aren't finite", level="warning")
            return evaluation.seconds
        self._heard(context.node_id, evaluation)
        context.own_evaluations = (*context.own_evaluations, evaluation)[-2:]
        events.emit(
            "evaluated",
            f"mean return {evaluation.mean:.4g} ± {evaluation.std:.3g} over {evaluation.episodes} episodes",
            mean=evaluation.mean,
            std=evaluation.std,
            episodes=evaluation.episodes,
            env_steps=evaluation.env_steps,
            policy_version=evaluation.policy_version,
            seconds=evaluation.seconds,
        )
        if context.checkpointer is not None:
            try:
                await context.checkpointer.keep_best(checkpoint, evaluation.mean)
            except StorageError as error:
                events.emit("checkpoint-failed", str(error), level="warning")
        return evaluation.seconds

    async def _played(self, steps: int) -> tuple[Checkpoint, Evaluation]:
        context, wanted = self._context, self._training.task.evaluation
        if context.checkpointer is None:
            raise CheckpointError("there is no state yet")
        checkpoint = await context.checkpointer.snapshot()
        words = f"{context.node_id} {self._training.lineage} {steps}"
        seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "little") >> 1
        content = await asyncio.to_thread(chunks, checkpoint)
        played = await self._process.play(content, wanted.episodes, greedy=wanted.mode == "greedy", seed=seed)
        return checkpoint, Evaluation(
            env_steps=steps,
            policy_version=int(checkpoint.meta["policy_version"]),
            episodes=wanted.episodes,
            mean=played.mean,
            std=played.std,
            length=played.length,
            seconds=played.seconds,
        )
