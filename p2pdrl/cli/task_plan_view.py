"""A task's blocks and its plan, as text and as JSON: what ``p2pdrl pipeline plan --config`` shows."""

from __future__ import annotations

from typing import Any

from p2pdrl.cli.formats import clean
from p2pdrl.cli.task_plan import TaskPlan
from p2pdrl.cli.timelines import timeline_document, timeline_lines
from p2pdrl.pipeline.wording import in_bytes, in_seconds

__all__ = ["plan_document", "plan_lines"]

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


def plan_lines(found: TaskPlan) -> list[str]:
    """Return the blocks, and the plan where there is one."""
    rows, what = found.rows
    part = f"1/{found.parts} of a minibatch" if found.parts > 1 else "a whole minibatch"
    measured = f"measured on {found.device} with {part} ({rows} {what})"
    lines = [f"{clean(found.subject, 80)}: {len(found.layers)} blocks, {measured}", "", *_blocks(found)]
    if found.plan is None or found.timeline is None:
        return lines if found.refused else [*lines, "", _NO_STRATEGY]
    bubbles, plan = found.timeline.bubbles, found.plan
    held = "; ".join(_held(plan.numbers(rank), rank) for rank in range(plan.ranks))
    lines += [
        "",
        f"cuts      {list(plan.cuts)}: {held}",
        "",
        *timeline_lines(plan.schedule, found.timeline),
        "",
        f"bubble    {sum(bubbles) / len(bubbles):.1%}, the ranks' mean",
    ]
    return [*lines, f"backend   auto: {found.why}"] if found.why else lines


def _held(numbers: tuple[int, ...], rank: int) -> str:
    return f"rank {rank} holds {', '.join(map(str, numbers))}"


def _blocks(found: TaskPlan) -> list[str]:
    titles = [clean(layer.name, 60) for layer in found.layers]
    wide = max(len("what it is"), *map(len, titles))
    lines = [f"block  {'what it is':<{wide}}  parameters     output       kept    forward   backward"]
    for number, (title, layer) in enumerate(zip(titles, found.layers, strict=True)):
        lines.append(
            f"{number:>5}  {title:<{wide}}  {in_bytes(layer.parameter_bytes):>10} "
            f"{in_bytes(layer.output_bytes):>10} {in_bytes(layer.kept_bytes):>10} "
            f"{in_seconds(layer.forward_s):>10} {in_seconds(layer.backward_s):>10}"
        )
    return lines
