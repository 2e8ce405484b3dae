"""How much of what nodes say they have done can be true: no more than time allows.

A signature shows who says so, not that it is so. Nobody sees another's steps, but everybody sees for how
long another was there. So each member has a *budget*: it fills at ``steps_per_s`` while we see it alive, up
to `BURST_S` seconds' worth, and what it says to have done since we last believed it comes out of it. A claim
that the budget doesn't hold isn't believed now; from then on the budget fills without a bound, so the claim
(or a later one) counts once enough time has passed. Honest nodes use a few per cent of theirs.

Two more cases:

- Of nodes that we never saw alive somebody else tells. That comes out of a budget of the member that tells
  it, so members that it made up help a liar no more than lies about itself.
- A newcomer finds a swarm with a history that it has seen nothing of. For `HISTORY_S` after it was taken in
  it also believes what two members beside the node in question hold true themselves (all of them, where there
  are fewer; the node itself, where there is no other), if the swarm is old enough for it.

Pure: time comes in as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

__all__ = ["ClaimBounds"]

BURST_S = 5.0
"""What a budget holds at most, in seconds of the greatest rate."""
FIRST_S = 1.0
"""What it begins with."""
HISTORY_S = 60.0
OWN_RATES = 20.0
"""A machine of ours that makes more than a twentieth of ``steps_per_s`` shows that the bound is too low."""
OWN_RATE_OVER_S = 10.0
OLDEST_S = 10 * 365 * 86_400.0
"""No swarm is older."""
MAX_MEMBERS = 8192
MAX_WORDS = 8192


@dataclass(slots=True)
class _Budget:
    steps: float
    filled_s: float
    alive: bool = True
    short: bool = False
    """Whether the last claim was more than it held."""

    def fill(self, rate: float, now_s: float) -> None:
        if self.alive:
            self.steps += rate * max(0.0, now_s - self.filled_s)
        if not self.short:
            self.steps = min(self.steps, rate * BURST_S)
        self.filled_s = now_s

    def spend(self, steps: int) -> bool:
        self.short = steps > self.steps
        if not self.short:
            self.steps -= steps
        return not self.short


class ClaimBounds:
    """Believes what time allows.

    Args:
        me: our own id.
        steps_per_s: the fastest that any node may be; likewise for episodes and updates.
    """

    def __init__(self, me: str, steps_per_s: float) -> None:
        self.held = 0
        """Claims that weren't believed when they were heard, each time that they were."""
        self._me = me
        self._steps_per_s = steps_per_s
        self._age_s: Callable[[], float] = float
        self._own: tuple[float, int] | None = None
        self._alive: set[str] = set()
        self._budgets: dict[str, tuple[_Budget, _Budget]] = {}
        """By node: for what it says of itself, and of nodes that nobody here has seen."""
        self._history_until_s = float("-inf")
        self._words: dict[Hashable, dict[str, int]] = {}
        """By claim: who has told it, and how much."""

    @property
    def steps_per_s(self) -> float:
        """The greatest rate that is believed."""
        return self._steps_per_s

    def look(self, alive: Iterable[str], now_s: float) -> None:
        """Note who is alive now, ourselves aside."""
        self._alive = {node for node in alive if node != self._me}
        for node, budgets in self._budgets.items():
            for budget in budgets:
                if budget.alive != (node in self._alive):
                    budget.fill(self._steps_per_s, now_s)
                    budget.alive = not budget.alive
        for node in self._alive - self._budgets.keys():
            self._add(node, now_s)

    def saw(self, node: str) -> bool:
        """Whether a node was ever seen alive, as far as we remember."""
        return node in self._budgets

    def made(self, steps: int, now_s: float) -> None:
        """Note what this node has made itself in this boot: what we can do, others can too."""
        if self._own is None or steps < self._own[1]:
            self._own = (now_s, steps)
        began_s, before = self._own
        if now_s >= began_s + OWN_RATE_OVER_S:
            self._steps_per_s = max(self._steps_per_s, OWN_RATES * (steps - before) / (now_s - began_s))
            self._own = (now_s, steps)

    def joined(self, now_s: float, age_s: Callable[[], float], period_s: float = 0.0) -> None:
        """Begin to believe a history: a swarm has taken us in.

        Args:
            age_s: tells for how long it is there, as far as told.
            period_s: in which news comes.
        """
        self._age_s = age_s
        self._history_until_s = now_s + HISTORY_S + 4 * period_s

    def admit(self, what: Hashable, node: str, *, total: int, gain: int, teller: str, now_s: float) -> bool:
        """Tell whether a claim is believed.

        Args:
            what: tells claims about different things apart.
            node: it is about.
            total: that it says the node has done of it.
            gain: so much more than we believed before.
            teller: who tells it, a proven member.
        """
        seen, told = self._budgets.get(node), self._budgets.get(teller)
        budget = seen[0] if seen is not None else told[1] if told is not None else None
        unproven = min(gain, max(0, total - self._vouched(what, node, total, teller, now_s)))
        if budget is not None:
            budget.fill(self._steps_per_s, now_s)
        if unproven == 0 or (budget is not None and budget.spend(unproven)):
            return True
        self.held += 1
        return False

    def _add(self, node: str, now_s: float) -> None:
        if len(self._budgets) >= MAX_MEMBERS:
            gone = next((other for other in self._budgets if other not in self._alive), None)
            if gone is None:
                return
            del self._budgets[gone]
        first = FIRST_S * self._steps_per_s
        self._budgets[node] = (_Budget(first, now_s), _Budget(first, now_s))

    def _vouched(self, what: Hashable, node: str, total: int, teller: str, now_s: float) -> int:
        """How much of a claim others hold true, while we are new."""
        if now_s > self._history_until_s:
            self._words.clear()
            return 0
        age_s = min(max(self._age_s(), 0.0), OLDEST_S)
        possible = total <= self._steps_per_s * (age_s + FIRST_S)  # not so where the age is NaN
        if teller not in self._alive or not possible:
            return 0
        others = self._alive - {node}
        if not others:
            return total if teller == node else 0
        words = self._words.get(what, {})
        if teller != node and (words or len(self._words) < MAX_WORDS):
            words[teller] = max(words.get(teller, 0), total)
            self._words[what] = words
        said = sorted((words[other] for other in others & words.keys()), reverse=True)
        wanted = min(2, len(others))
        return said[wanted - 1] if len(said) >= wanted else 0
