"""What people are told of pipelines, and what is counted: state copies, ends, what nodes show."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from p2pdrl.config.checks import Problem
from p2pdrl.pipeline.plan import StageNews
from p2pdrl.pipeline.wording import in_seconds
from p2pdrl.strategies.pipeline.generation import Generation, blamed
from p2pdrl.strategies.pipeline.layout import PipelineLayout, PipelineMembers
from p2pdrl.strategies.pipeline.planning import NO_PIPELINE
from p2pdrl.strategies.protocol import Merged, RoundReport, StrategyContext
from p2pdrl.strategies.task_runner import OutcomeMetrics

__all__ = ["PipelineEvents", "PipelineStatus"]


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where this node stands; all of it as it was ordered or predicted, nothing measured."""

    standby: bool = False
    """Whether it is in no pipeline, although others are."""
    pipeline: int | None = None
    """Number of its pipeline, from 0; None without one."""
    pipelines: int = 0
    """How many there are."""
    rank: int | None = None
    """Its own; rank 0 makes the experience."""
    ranks: tuple[str, ...] = ()
    """Names of all ranks' nodes."""
    stages: tuple[int, ...] = ()
    """Numbers of the stages that it holds."""
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks in them."""
    schedule: str = ""
    microbatches: int = 0
    """At most, where rank 0 measures which number is fastest."""
    generation: int = 0
    from_version: int = 0
    """Policy version with which the generation began."""
    backend: str = ""
    """``stream`` or ``torch``; ``none`` where a node computes by itself."""
    alone: bool = False
    """Whether all ranks compute by themselves, because a pipeline would be slower."""
    why: str = ""
    """Why it is as it is, with numbers, as the coordinator told all ranks."""
    limit: str = ""
    """What can't be as the strategy's options ask, and which of them to change; empty when all can."""
    step_s: float = 0.0
    """Predicted for one minibatch."""
    bubble: float = 0.0
    """Predicted part of the time in which ranks idle."""
    copies: int = 0
    """State copies in this generation."""

    @property
    def role(self) -> str:
        """In a few words."""
        if self.standby:
            return "standby"
        if self.rank is None:
            return "forming"
        if self.alone:
            return "alone"
        return f"pipeline {self.pipeline} rank {self.rank}"


class PipelineEvents:
    """Tells and counts what happens in one node's pipelines.

    Attributes:
        rounds: by outcome.
    """

    def __init__(self, context: StrategyContext) -> None:
        self._swarm, self._clock = context.swarm, context.clock
        self._me = context.swarm.node_id
        self.rounds = OutcomeMetrics(context.swarm)
        self._since_s = 0.0
        self._last_text = ""
        self._limit = ""
        self._last_ended = 0
        self._reached: tuple[str, int] | None = None
        """Lineage and version that our last generation had come to; None while we don't know."""

    # Events

    def standing_by(self, layout: PipelineLayout) -> None:
        """Tell that no pipeline has a rank for this node."""
        names = self._names(layout.rank0s)
        full = f"pipelines of {', '.join(names)} have" if len(names) > 1 else f"pipeline of {names[0]} has"
        text = f"stands by: the {full} all peers; it takes part once peers come or go"
        if text != self._last_text:
            self._last_text = text
            self._swarm.tell("standby", text)

    def limited(self, problems: Iterable[Problem]) -> None:
        """Tell which options our pipeline can't have, until it can."""
        limit = "; ".join(f"{problem.key}: {problem.message}" for problem in problems)
        if limit and limit != self._limit:
            text = f"a pipeline can't be as its options ask. {limit}"
            self._swarm.tell("pipeline-refused", text, warning=True)
        self._limit = limit

    def formed(self, generation: Generation, carried: str = "") -> None:
        """Tell that a pipeline was formed with us, or that all its peers compute by themselves.

        Args:
            carried: why activations travel as they do; empty where nobody chose.
        """
        self._since_s = self._clock.monotonic()
        form = generation.form
        if generation.alone:
            names = ", ".join(self._names(generation.members))
            text = f"no pipeline of {names}: each computes by itself. {form.why.removeprefix(NO_PIPELINE)}"
            self._swarm.tell("pipeline-refused", text, warning=True, facts=self._begun(generation))
            return
        plan = generation.order.plan
        if plan.ranks == 1:
            text = f"pipeline of one: this node holds all {plan.blocks} blocks"
        else:
            held = [
                f"{name} blocks {_ranges(plan.numbers(rank))}"
                for rank, name in enumerate(self._names(generation.members))
            ]
            text = (
                f"pipeline formed: {', '.join(held)}; {plan.schedule}, {plan.microbatches} microbatches, "
                f"{in_seconds(form.step_s)} a step and bubbles of {form.bubble:.0%} predicted"
            )
            if carried:
                text = f"{text}; {carried}"
        begun = self._begun(generation)
        back = begun.get("updates_back")
        where = f"from version {form.policy_version}" + (f", {back} updates back" if back else "")
        self._swarm.tell("pipeline", f"{text} (generation {generation.number}, {where})", facts=begun)
        self._last_text = ""

    def _begun(self, generation: Generation) -> dict[str, int]:
        """Return with what a generation begins, and how many updates that is behind the end of our last one.

        That isn't known where the last one neither ended nor broke here before this one's order came.
        """
        begun = {"generation": generation.number, "policy_version": generation.form.policy_version}
        reached, self._reached = self._reached, None
        if reached is not None and reached[0] == generation.form.lineage:
            begun["updates_back"] = max(0, reached[1] - generation.form.policy_version)
        return begun

    def unformed(self, pipeline: PipelineMembers, why: str, suspect: str) -> None:
        """Tell that a pipeline couldn't be formed."""
        names = ", ".join(self._names(pipeline.members))
        self._swarm.tell(
            "pipeline-failed", f"the pipeline of {names} couldn't be formed: {why}", warning=True
        )
        missing = (suspect,) if suspect else ()
        self.rounds.ended(RoundReport("unformed", missing=missing, error=why))

    def copied(self, generation: Generation) -> None:
        """Count a state copy: all ranks have the whole state."""
        now_s = self._clock.monotonic()
        since_s, self._since_s = self._since_s, now_s
        merged = (self._me,) if generation.alone else generation.members
        weight = 1.0 / len(merged)
        self.rounds.ended(
            RoundReport(
                "ok",
                tuple(Merged(peer, weight) for peer in merged),
                seconds=now_s - since_s if since_s else 0.0,
                bytes_out=generation.moves.bytes_out,
                bytes_in=generation.moves.bytes_in,
            )
        )

    def ended(self, generation: Generation, news: StageNews) -> bool:
        """Tell that a generation ended; False when that was told before."""
        if generation.number == self._last_ended:
            return False
        self._last_ended = generation.number
        self._reached = (generation.form.lineage, news.policy_version + news.behind)
        if news.what == "over":
            self.copied(generation)
            return True
        neighbour = blamed(generation, news)
        by = f", with {self._swarm.name_of(neighbour)}" if neighbour else ""
        text = f"generation {generation.number} broke{by}: {news.why}"
        self._swarm.tell("pipeline-broken", text, warning=True)
        missing = (neighbour,) if neighbour else ()
        self.rounds.ended(RoundReport("broken", missing=missing, error=news.why))
        return True

    def learner_lost(self, why: str) -> None:
        """Tell that our own learner doesn't answer."""
        self._swarm.tell(
            "pipeline-learner", f"this node's learner is gone for the moment: {why}", warning=True
        )

    def _names(self, peers: tuple[str, ...]) -> list[str]:
        return [self._swarm.name_of(peer) for peer in peers]

    # Figures

    def figures(
        self, layout: PipelineLayout | None, me: str, generation: Generation | None
    ) -> PipelineStatus:
        """Return where we stand.

        Args:
            generation: ours, while it runs.
        """
        if layout is None:
            return PipelineStatus()
        pipeline = layout.pipeline_of(me)
        if pipeline is None:
            return PipelineStatus(standby=True, pipelines=len(layout.pipelines), limit=self._limit)
        if generation is None or not generation.formed:
            ranks = tuple(self._names(pipeline.members))
            return PipelineStatus(
                pipeline=pipeline.number, pipelines=len(layout.pipelines), ranks=ranks, limit=self._limit
            )
        order = generation.order
        plan = order.plan
        return PipelineStatus(
            pipeline=pipeline.number,
            pipelines=len(layout.pipelines),
            rank=generation.rank,
            ranks=tuple(self._names(generation.members)),
            stages=tuple(plan.stages_of(order.rank)),
            blocks=plan.numbers(order.rank),
            schedule=order.schedule,
            microbatches=order.microbatches,
            generation=order.generation,
            from_version=generation.form.policy_version,
            backend=order.backend if order.ranks > 1 else "none",
            alone=generation.alone,
            why=generation.form.why,
            limit=self._limit,
            step_s=generation.form.step_s,
            bubble=generation.form.bubble,
            copies=generation.copies,
        )

    def facts(self, figures: PipelineStatus) -> dict[str, float | str]:
        """Return figures for people, of what there is."""
        facts: dict[str, float | str] = {"role": figures.role, "pipelines": figures.pipelines}
        if figures.limit:
            facts["limited"] = figures.limit
        if figures.rank is None:
            return facts
        facts |= {"ranks": ", ".join(figures.ranks), "blocks": _ranges(figures.blocks)}
        facts |= {"schedule": figures.schedule, "microbatches": figures.microbatches}
        facts |= {"generation": figures.generation, "backend": figures.backend}
        facts |= {"predicted_step_s": figures.step_s, "predicted_bubble": figures.bubble}
        if figures.why:
            facts["why"] = figures.why
        return facts


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers as people do: 0-3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(one) if one == other else f"{one}-{other}" for one, other in runs)
