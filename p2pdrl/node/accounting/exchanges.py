"""What each strategy cost and brought over this boot, and the last rounds one by one.

`Training` feeds it from `strategies.protocol.RoundReport`; status, the metrics page, ``/v1/rounds`` and the
summary at a run's end show it. Pure but for the clock.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdrl.clock import Clock
from p2pdrl.config.mode import changed_options, protocol_of
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.strategies.protocol import RoundReport

__all__ = ["GOOD", "STALENESS_BOUNDS", "Account", "Accounting"]

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Greatest staleness, in policy versions, of each bucket but the last, which takes the rest."""
GOOD = ("ok", "pushed", "answered")
"""Outcomes of rounds that went well: merged, given to another, or begun by another."""
ROUNDS_KEPT = 50
MODES_KEPT = 100
PEERS_SHOWN = 256

Named = Callable[[str], str]


@dataclass(slots=True)
class Account:
    """Sums over all rounds under one strategy."""

    mode: str
    """The strategy's family."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Rounds by outcome."""
    seconds: float = 0.0
    waited_s: float = 0.0
    """How long the learner stood still for them."""
    bytes_in: int = 0
    bytes_out: int = 0
    round_trips: int = 0
    staleness: list[int] = field(default_factory=lambda: [0] * (len(STALENESS_BOUNDS) + 1))
    """Contributions merged, by bucket: others' to us, and ours to servers."""
    distance: float | None = None
    """Newest estimate of the consensus distance."""
    in_force_s: float = 0.0
    """How long the strategy was in force, without the present stay."""

    def add(self, report: RoundReport, me: str) -> None:
        """Add one round."""
        self.outcomes[report.outcome] += 1
        self.seconds += report.seconds
        self.waited_s += report.waited_s
        self.bytes_in += report.bytes_in
        self.bytes_out += report.bytes_out
        self.round_trips += report.round_trips
        for staleness in report.staleness(me):
            self.staleness[bisect_left(STALENESS_BOUNDS, staleness)] += 1

    def document(self) -> dict[str, object]:
        """The account as JSON types."""
        rounds = sum(self.outcomes.values())
        names = [*map(str, STALENESS_BOUNDS), f">{STALENESS_BOUNDS[-1]}"]
        return {
            "mode": self.mode,
            "rounds": dict(self.outcomes),
            "failed": rounds - sum(self.outcomes[word] for word in GOOD),
            "round_s": self.seconds,
            "learner_wait_s": self.waited_s,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "round_trips": self.round_trips,
            "staleness": dict(zip(names, self.staleness, strict=True)),
            "consensus_distance": _finite(self.distance),
        }


class Accounting:
    """Accounts of every strategy of this boot, the walk from one to the next, and the last rounds."""

    def __init__(self, me: str, clock: Clock) -> None:
        self._me = me
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._walk: deque[dict[str, object]] = deque(maxlen=MODES_KEPT)
        self._rounds: deque[tuple[int, float, str, RoundReport]] = deque(maxlen=ROUNDS_KEPT)
        self._numbers = itertools.count(1)
        self._protocol = ""
        self._since_s = clock.monotonic()
        self.since_wall_s: float | None = None
        """Wall time at which the strategy in force began here; None before the first."""

    def entered(self, strategy: StrategyConfig, epoch: int) -> None:
        """Another strategy is in force from now on, by the mode record of ``epoch``, as people see it."""
        self._leave()
        self._protocol = protocol_of(strategy)
        self.since_wall_s = self._clock.wall()
        self._accounts.setdefault(self._protocol, Account(strategy.mode)).mode = strategy.mode
        self._walk.append(
            {
                "time": self.since_wall_s,
                "epoch": epoch,
                "mode": strategy.mode,
                "protocol": self._protocol,
                "options": changed_options(strategy),
            }
        )

    def round(self, report: RoundReport) -> None:
        """Count one round for the strategy in force, and remember it."""
        self._present().add(report, self._me)
        self._rounds.append((next(self._numbers), self._clock.wall(), self._protocol, report))

    def saw_distance(self, distance: float | None) -> None:
        """Note the strategy's estimate of the consensus distance; None changes nothing."""
        if distance is not None:
            self._present().distance = distance

    def document(self, named: Named) -> dict[str, object]:
        """Each strategy's account, with who was merged in its last round; JSON types."""
        last = {protocol: report for _, _, protocol, report in self._rounds if report.merged}
        stay_s = self._clock.monotonic() - self._since_s
        documents: dict[str, object] = {}
        for protocol, account in self._accounts.items():
            here_s = account.in_force_s + (stay_s if protocol == self._protocol else 0.0)
            merged = _merged(last[protocol], named) if protocol in last else []
            documents[protocol] = account.document() | {"in_force_s": here_s, "last_merged": merged}
        return documents

    def rounds(self, named: Named) -> list[dict[str, object]]:
        """The last rounds, oldest first; JSON types."""
        return [
            {
                "number": number,
                "time": time,
                "protocol": protocol,
                "outcome": report.outcome,
                "merged": _merged(report, named),
                "missing": [named(peer) for peer in report.missing[:PEERS_SHOWN]],
                "bytes_in": report.bytes_in,
                "bytes_out": report.bytes_out,
                "round_trips": report.round_trips,
                "seconds": _finite(report.seconds),
                "waited_s": _finite(report.waited_s),
                "changed": _finite(report.changed),
                "distance": _finite(report.distance),
                "error": report.error[:500],
            }
            for number, time, protocol, report in self._rounds
        ]

    def walk(self) -> list[dict[str, object]]:
        """The modes of this boot in order: when each began here, its epoch and its options."""
        return [dict(step) for step in self._walk]

    def _leave(self) -> None:
        now_s = self._clock.monotonic()
        if self._protocol:
            self._accounts[self._protocol].in_force_s += now_s - self._since_s
        self._since_s = now_s

    def _present(self) -> Account:
        return self._accounts.setdefault(self._protocol or "local", Account("local"))


def _merged(report: RoundReport, named: Named) -> list[dict[str, object]]:
    return [
        {
            "peer": one.peer,
            "name": named(one.peer),
            "weight": _finite(one.weight),
            "staleness": one.staleness,
        }
        for one in report.merged[:PEERS_SHOWN]
    ]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
