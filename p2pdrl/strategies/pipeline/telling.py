"""What people are told of pipelines, and what is counted: state copies, ends, what nodes show."""

from __future__ import annotations

from collections.abc import Iterable

from p2pdrl.config.problem import Problem
from p2pdrl.pipeline.order import StageNews
from p2pdrl.pipeline.wording import in_seconds
from p2pdrl.strategies.pipeline.figures import Figures
from p2pdrl.strategies.pipeline.layout import Layout, Place
from p2pdrl.strategies.pipeline.planning import NO_PIPELINE
from p2pdrl.strategies.pipeline.term import Term, blamed
from p2pdrl.strategies.protocol import Context, Merged, RoundReport
from p2pdrl.strategies.tally import Tally

__all__ = ["Telling"]


class Telling:
    """One node's account.

    Args:
        context: what the node gives.
    """

    def __init__(self, context: Context) -> None:
        self._swarm, self._clock = context.swarm, context.clock
        self._me = context.swarm.node_id
        self._tally = Tally(context.swarm)
        self._since_s = 0.0
        self._told = ""
        self._limit = ""
        self._told_end = 0
        self._reached: tuple[str, int] | None = None
        """Lineage and version that our last generation had come to; None while we don't know."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Rounds by outcome."""
        return self._tally.outcomes

    def count(self, outcome: str) -> int:
        """How many rounds ended so."""
        return self._tally.count(outcome)

    # Events

    def standing_by(self, layout: Layout) -> None:
        """We are left over."""
        heads = self._names(layout.heads)
        full = f"pipelines of {', '.join(heads)} have" if len(heads) > 1 else f"pipeline of {heads[0]} has"
        self._once("standby", f"stands by: the {full} all peers; it takes part once peers come or go")

    def limited(self, problems: Iterable[Problem]) -> None:
        """Our pipeline won't be what the strategy's options ask for, until there are no such problems."""
        limit = "; ".join(f"{problem.key}: {problem.message}" for problem in problems)
        if limit and limit != self._limit:
            text = f"a pipeline can't be as its options ask. {limit}"
            self._swarm.tell("pipeline-refused", text, warning=True)
        self._limit = limit

    def formed(self, term: Term, carried: str = "") -> None:
        """We are in a pipeline that was formed, or compute by ourselves as all peers of one do.

        Args:
            term: its generation.
            carried: why activations travel as they do; empty where nobody chose.
        """
        self._since_s = self._clock.monotonic()
        if term.alone:
            names = ", ".join(self._names(term.members))
            text = f"no pipeline of {names}: each computes by itself. {term.why.removeprefix(NO_PIPELINE)}"
            self._swarm.tell("pipeline-refused", text, warning=True, facts=self._begun(term))
            return
        plan = term.order.plan
        if plan.ranks == 1:
            text = f"pipeline of one: this node holds all {plan.blocks} blocks"
        else:
            held = [
                f"{name} blocks {_ranges(plan.numbers(rank))}"
                for rank, name in enumerate(self._names(term.members))
            ]
            text = (
                f"pipeline formed: {', '.join(held)}; {plan.schedule}, {plan.microbatches} microbatches, "
                f"{in_seconds(term.step_s)} a step and bubbles of {term.bubble:.0%} predicted"
            )
            if carried:
                text = f"{text}; {carried}"
        begun = self._begun(term)
        back = begun.get("updates_back")
        where = f"from version {term.policy_version}" + (f", {back} updates back" if back else "")
        self._swarm.tell("pipeline", f"{text} (generation {term.generation}, {where})", facts=begun)
        self._told = ""

    def _begun(self, term: Term) -> dict[str, int]:
        """With what a generation begins, and if we know, how many updates that is behind our last one's end.

        We don't where that one neither ended nor broke here before this one's order came.
        """
        begun = {"generation": term.generation, "policy_version": term.policy_version}
        reached, self._reached = self._reached, None
        if reached is not None and reached[0] == term.lineage:
            begun["updates_back"] = max(0, reached[1] - term.policy_version)
        return begun

    def unformed(self, place: Place, why: str, suspect: str) -> None:
        """A pipeline couldn't be formed."""
        names = ", ".join(self._names(place.members))
        self._swarm.tell(
            "pipeline-failed", f"the pipeline of {names} couldn't be formed: {why}", warning=True
        )
        missing = (suspect,) if suspect else ()
        self._tally.ended(RoundReport("unformed", missing=missing, error=why))

    def copied(self, term: Term) -> None:
        """All ranks have the whole state."""
        now_s = self._clock.monotonic()
        since_s, self._since_s = self._since_s, now_s
        merged = (self._me,) if term.alone else term.members
        weight = 1.0 / len(merged)
        self._tally.ended(
            RoundReport(
                "ok",
                tuple(Merged(peer, weight) for peer in merged),
                seconds=now_s - since_s if since_s else 0.0,
                bytes_out=term.moves.bytes_out,
                bytes_in=term.moves.bytes_in,
            )
        )

    def ended(self, term: Term, news: StageNews) -> bool:
        """A generation ended; False when that was told before."""
        if term.generation == self._told_end:
            return False
        self._told_end = term.generation
        self._reached = (term.lineage, news.policy_version + news.behind)
        if news.what == "over":
            self.copied(term)
            return True
        neighbour = blamed(term, news)
        by = f", with {self._swarm.name_of(neighbour)}" if neighbour else ""
        text = f"generation {term.generation} broke{by}: {news.why}"
        self._swarm.tell("pipeline-broken", text, warning=True)
        missing = (neighbour,) if neighbour else ()
        self._tally.ended(RoundReport("broken", missing=missing, error=news.why))
        return True

    def learner_lost(self, why: str) -> None:
        """Our own learner doesn't answer."""
        self._swarm.tell(
            "pipeline-learner", f"this node's learner is gone for the moment: {why}", warning=True
        )

    def _once(self, kind: str, text: str) -> None:
        if text != self._told:
            self._told = text
            self._swarm.tell(kind, text)

    def _names(self, peers: tuple[str, ...]) -> list[str]:
        return [self._swarm.name_of(peer) for peer in peers]

    # Figures

    def figures(self, layout: Layout | None, me: str, term: Term | None) -> Figures:
        """Say where we stand.

        Args:
            layout: of the view in force; None before the first.
            me: own node id.
            term: our generation, while it runs.
        """
        if layout is None:
            return Figures()
        place = layout.place_of(me)
        if place is None:
            return Figures(standby=True, pipelines=len(layout.pipelines), limit=self._limit)
        if term is None or not term.formed:
            ranks = tuple(self._names(place.members))
            return Figures(
                pipeline=place.number, pipelines=len(layout.pipelines), ranks=ranks, limit=self._limit
            )
        order = term.order
        plan = order.plan
        return Figures(
            pipeline=place.number,
            pipelines=len(layout.pipelines),
            rank=term.rank,
            ranks=tuple(self._names(term.members)),
            stages=tuple(plan.stages_of(order.rank)),
            blocks=plan.numbers(order.rank),
            schedule=order.schedule,
            microbatches=order.microbatches,
            generation=order.generation,
            from_version=term.policy_version,
            backend=order.backend if order.ranks > 1 else "none",
            alone=term.alone,
            why=term.why,
            limit=self._limit,
            step_s=term.step_s,
            bubble=term.bubble,
            copies=term.copies,
        )

    def facts(self, figures: Figures) -> dict[str, float | str]:
        """The same for people."""
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
