"""What a task's pipeline would be on machines like this one: blocks, cuts, the predicted schedule."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from rich.console import RenderableType

from p2pdrl.cli.formats import clean
from p2pdrl.cli.pipeline import timeline_document, timeline_parts
from p2pdrl.cli.tables import Column, Listing
from p2pdrl.config.checks import too_few_blocks
from p2pdrl.config.loader import resolve
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.config.task import batches_of, minibatch_rows, minibatches_of
from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import FREE, Layer, PeerLink
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.pipeline.schedule import make_schedule
from p2pdrl.pipeline.timeline import MicrobatchCosts, Timeline, predict
from p2pdrl.pipeline.wording import in_bytes, in_seconds
from p2pdrl.strategies.pipeline.planning import Design, RankCandidate, design, measured_with
from p2pdrl.workers.pipeline.protocol import Blocks

__all__ = ["TaskPlan", "plan_document", "plan_parts", "plan_task"]

MEASURE_S = 600.0
"""The longest that the child may take; most of it would be for a large model."""
STRATEGY = "task.strategy."


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What was measured and planned.

    Attributes:
        subject: what is trained, for people.
        layers: blocks by number, as one microbatch of ``parts`` costs them.
        device: where they were measured.
        parts: into how many microbatches a minibatch was cut for that.
        rows: of a whole minibatch, and what they are.
        plan: who would hold what; None where there is no pipeline to plan.
        timeline: of one minibatch; with microbatches = auto, in the number predicted to be the fastest.
        why: the pipeline pays or doesn't, where the strategy leaves that open; empty otherwise.
        refused: why no pipeline could be planned though one is asked for; empty otherwise.
    """

    subject: str
    layers: tuple[Layer, ...]
    device: str
    parts: int
    rows: tuple[int, str]
    plan: PipelinePlan | None = None
    timeline: Timeline | None = None
    why: str = ""
    refused: str = ""

    @property
    def schedule(self) -> str:
        """Its name; empty without a plan."""
        return "" if self.plan is None else self.plan.schedule


def plan_task(files: Sequence[str], sets: Sequence[str], link: PeerLink = FREE) -> TaskPlan:
    """Measure the blocks of a task (``--config`` and ``--set``) and plan its pipeline.

    Raises:
        ConfigError: the configuration is wrong beyond its strategy, or the model can't be cut at all.
        SystemExit: the child failed, and has told why.
    """
    link.check()
    config, refused = _resolve(files, sets)
    strategy = config.task.strategy
    wanted = strategy if isinstance(strategy, PipelineConfig) else None
    rows = minibatch_rows(config.task)
    parts = measured_with(wanted, rows[0]) if wanted is not None else 1
    blocks = _measure(config, batches_of(config.task.algorithm) * parts)
    found = TaskPlan(config.task.subject, blocks.layers, blocks.device, parts, rows, refused=refused)
    return found if wanted is None else _planned(config, wanted, found, link)


def _resolve(files: Sequence[str], sets: Sequence[str]) -> tuple[Config, str]:
    """Return the configuration; one whose strategy is refused without that, and why: blocks are listed yet.

    Raises:
        ConfigError: it is wrong elsewhere.
    """
    try:
        return resolve(files=files, sets=sets, environ=os.environ).config, ""
    except ConfigError as error:
        others = [one for one in sets if not one.lstrip().startswith(STRATEGY)]
        try:
            config = resolve(files=files, sets=[*others, f"{STRATEGY}name=local"], environ=os.environ).config
        except ConfigError:
            raise error from None
        return config, str(error)


def _measure(config: Config, parts: int) -> Blocks:
    """Have the child measure blocks with one of so many parts of the longest batch."""
    learner = config.node.learner
    command = [sys.executable, "-m", "p2pdrl.workers.pipeline.measure", "--parts", str(parts)]
    command += ["--device", learner.device, "--threads", str(learner.threads)]
    if config.node.may_import:
        command.append("--allow-import")
    task = msgspec.json.encode(config.task)
    try:
        # Started with the program and our own arguments only: nothing goes through a shell.
        done = subprocess.run(  # noqa: S603
            command, input=task, stdout=subprocess.PIPE, check=False, timeout=MEASURE_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the blocks weren't measured within {MEASURE_S:g} s") from None
    if done.returncode:
        raise SystemExit(done.returncode if done.returncode > 0 else 1)
    blocks = msgspec.json.decode(done.stdout, type=Blocks)
    if blocks.error:
        raise ConfigError(f"this model can't be cut: {blocks.error}")
    return blocks


def _planned(config: Config, strategy: PipelineConfig, found: TaskPlan, link: PeerLink) -> TaskPlan:
    """Plan for as many machines like this one as the strategy wants."""
    few = too_few_blocks(strategy, len(found.layers))
    if few is not None:
        return replace(found, refused=f"{few.key}: {few.message}")
    try:
        forced = _design(config, msgspec.structs.replace(strategy, backend="stream"), found, link)
        if forced.alone:
            return replace(found, refused=forced.why)
        open_ = strategy.backend == "auto" and strategy.stages > 1
        why = _design(config, strategy, found, link).why if open_ else ""
    except ConfigError as error:
        return replace(found, refused=str(error))
    timeline = forced.timeline or _one_rank(forced.plan, found)
    return replace(found, plan=forced.plan, timeline=timeline, why=why)


def _design(config: Config, strategy: PipelineConfig, found: TaskPlan, link: PeerLink) -> Design:
    """Plan as the first of some ranks would that are all as fast as this machine."""
    seconds = sum(layer.forward_s + layer.backward_s for layer in found.layers)
    names = [f"rank {rank}" for rank in range(strategy.stages)]
    return design(
        strategy,
        found.layers,
        [RankCandidate(name, name, seconds) for name in names],
        link,
        minibatches=minibatches_of(config.task.algorithm),
        rows=found.rows[0],
    )


def _one_rank(plan: PipelinePlan, found: TaskPlan) -> Timeline:
    """Predict one minibatch of a rank that holds all blocks."""
    microbatches = plan.parts(found.rows[0])
    part = found.parts / microbatches  # of what was measured
    forward_s = sum(layer.forward_s for layer in found.layers) * part
    backward_s = sum(layer.backward_s for layer in found.layers) * part
    return predict(
        make_schedule(plan.schedule, 1, microbatches), MicrobatchCosts((forward_s,), (backward_s,))
    )


_NO_STRATEGY = "no plan: the task's strategy isn't pipeline; add --set task.strategy.name=pipeline"


def plan_document(found: TaskPlan) -> dict[str, Any]:
    """Return everything; ``plan`` is null where there is none."""
    document: dict[str, Any] = {
        "task": found.subject,
        "device": found.device,
        "measured_microbatches": found.parts,
        "minibatch_rows": found.rows[0],
        "blocks": [{"number": number, **layer._asdict()} for number, layer in enumerate(found.layers)],
        "plan": None,
        "why": found.why or None,
        "refused": found.refused or None,
    }
    if found.plan is not None and found.timeline is not None:
        bubbles = found.timeline.bubbles
        document["plan"] = {
            "schedule": found.plan.schedule,
            "cuts": list(found.plan.cuts),
            "blocks_per_rank": [list(found.plan.numbers(rank)) for rank in range(found.plan.ranks)],
            "bubble": sum(bubbles) / len(bubbles),
            **timeline_document(found.timeline),
        }
    return document


def plan_parts(found: TaskPlan) -> list[RenderableType]:
    """Return the blocks, and the plan where there is one."""
    rows, what = found.rows
    part = f"1/{found.parts} of a minibatch" if found.parts > 1 else "a whole minibatch"
    measured = f"measured on {found.device} with {part} ({rows} {what})"
    lines: list[RenderableType] = [
        f"{clean(found.subject, 80)}: {len(found.layers)} blocks, {measured}",
        "",
        _blocks(found),
    ]
    if found.plan is None or found.timeline is None:
        return lines if found.refused else [*lines, "", _NO_STRATEGY]
    bubbles, plan = found.timeline.bubbles, found.plan
    held = "; ".join(_held(plan.numbers(rank), rank) for rank in range(plan.ranks))
    lines += [
        "",
        f"cuts      {list(plan.cuts)}: {held}",
        "",
        *timeline_parts(plan.schedule, found.timeline),
        "",
        f"bubble    {sum(bubbles) / len(bubbles):.1%}, the ranks' mean",
    ]
    return [*lines, f"backend   auto: {found.why}"] if found.why else lines


def _held(numbers: tuple[int, ...], rank: int) -> str:
    return f"rank {rank} holds {', '.join(map(str, numbers))}"


def _blocks(found: TaskPlan) -> Listing:
    heads = ("parameters", "output", "kept", "forward", "backward")
    columns = [
        Column("block", left=False),
        Column("what it is", least=20),
        *(Column(head, left=False, rank=rank) for rank, head in zip((3, 4, 5, 1, 2), heads, strict=True)),
    ]
    cells = [
        (
            str(number),
            clean(layer.name, 60),
            in_bytes(layer.parameter_bytes),
            in_bytes(layer.output_bytes),
            in_bytes(layer.kept_bytes),
            in_seconds(layer.forward_s),
            in_seconds(layer.backward_s),
        )
        for number, layer in enumerate(found.layers)
    ]
    return Listing(columns, cells)
