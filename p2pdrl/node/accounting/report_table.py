"""What each node tells about itself, spread by gossip: the newest report of every node, everywhere.

Each is signed by its node, and passed on as it is.

Metrics travel apart from membership records. Each period a node sends a bounded list of reports to
`FAN_OUT` random peers and takes in theirs (anti-entropy, push-pull: Demers 1987, "Epidemic
algorithms for replicated database maintenance"), so news reaches all of N nodes in O(log N) periods;
`period_s` grows with N so that the bytes a node sends per second stay flat. Pure: the daemon's
digest loop does the sending, the API shows the table, `stop` and `health` judge by it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.errors import WireError
from p2pdrl.node.accounting.evaluations import Evaluation
from p2pdrl.node.accounting.facts import FactSigner, ForgedFactError, SignedFact
from p2pdrl.transport.codec import decode

__all__ = [
    "FAN_OUT",
    "MAX_REPORTS",
    "PeerReport",
    "ReportRow",
    "ReportTable",
    "period_s",
]

FAN_OUT = 2
"""Peers told per period. More spreads faster, at that many times the bytes."""
MAX_REPORTS = 4096
"""Nodes a table holds."""

Natural = Annotated[int, Meta(ge=0, lt=2**53)]
NonNegative = Annotated[float, Meta(ge=0)]
NodeId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Label = Annotated[str, Meta(max_length=64)]


def period_s(nodes: int, *, paused: bool = False) -> float:
    """Seconds between two rounds of a swarm of ``nodes``.

    Formula: ``max(1, nodes / 6)``, of a paused node, which has little news, ``max(3, nodes / 6)``. A round's
    bytes grow with N (counts of every node, reports up to the bound of a message), so its period does as
    well, from six nodes on. Shorter periods are fresher and cost more bytes.
    """
    return max(3.0 if paused else 1.0, nodes / 6)


class PeerReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one node tells of itself; counts are of all its boots, bytes of this one.

    Travels by position: 160 bytes instead of the 430 that names take.
    """

    id: NodeId
    boot: Natural
    seq: Natural
    """Grows with every report of a boot; the greater (boot, seq) is the newer report."""
    name: Label = ""
    state: Label = "starting"
    """``joining | starting | training | paused | stopping | stopped``."""
    lineage: Label = ""
    policy_version: Natural = 0
    env_steps: Natural = 0
    updates: Natural = 0
    episodes: Natural = 0
    episodes_in_window: Natural = 0
    """Episodes that ``mean_return`` is taken over."""
    mean_return: float | None = None
    steps_per_s: NonNegative = 0.0
    consensus_distance: NonNegative | None = None
    loop_lag_s: NonNegative = 0.0
    rss_bytes: Natural = 0
    bytes_in: Natural = 0
    bytes_out: Natural = 0
    healthy: bool = True
    reasons: Annotated[
        tuple[Annotated[str, Meta(max_length=200)], ...],
        Meta(max_length=5),
    ] = ()
    device: Label = ""
    """Where the learner runs; empty on a node that has no learner."""
    learner_restarts: Natural = 0
    mode_epoch: Natural = 0
    """Stamp of the mode record that the node follows, see `settings.stamp`; 0 before the first."""
    strategy: Label = ""
    """Name of the strategy in force there."""
    role: Label = ""
    """What the node does in its group, in a word: ``server``, ``worker``; empty where all do the same."""
    trains: bool = True
    """Whether its learner learns from experience by itself: the lower stages of a pipeline don't."""
    stage: Label = ""
    """Of a pipeline: ``2/3`` for the second of three; empty for none."""
    bubble: NonNegative | None = None
    """Part of its time that such a learner waited for its neighbours."""
    evaluations: Annotated[tuple[Evaluation, ...], Meta(max_length=2)] = ()
    """The last ones that the node made, the newest last."""
    acts: bool = False
    """Whether its actors work for its pipeline's first rank, and their steps are counted here."""
    busy_steps_per_s: NonNegative = 0.0
    """Environment steps a second of its learner, without time in which it waited for others; 0: unknown."""

    @property
    def at_work(self) -> bool:
        """Whether its learner makes updates, or it computes or acts for one that does."""
        works = self.updates > 0 if self.trains else bool(self.stage) or self.steps_per_s > 0
        return self.state == "training" and (works or bool(self.stage))


class ReportRow(msgspec.Struct, frozen=True, array_like=True):
    """A report on its way."""

    age_s: NonNegative
    """How old it was when this copy of it was sent; zero at its origin. A member's word."""
    fact: SignedFact
    """A `PeerReport`."""


@dataclass(slots=True)
class _Held:
    report: PeerReport
    fact: SignedFact
    made_s: float
    """When the report was made, on this node's monotonic clock."""
    changed: int
    """Order in which reports were replaced."""
    sent: int = -1
    """Order in which this node's reports were last passed on."""
    fresh: bool = True
    """Not passed on since it changed."""


class ReportTable:
    """The newest report of every node; at ``capacity`` the one that was silent longest makes room.

    Args:
        signer: of our own reports.

    Attributes:
        living: ids of members that live. Their reports make room for each other's alone: anybody can sign
            reports of nodes that he has made up.
    """

    def __init__(self, signer: FactSigner, *, capacity: int = MAX_REPORTS) -> None:
        self._signer = signer
        self._me = signer.node_id
        self._capacity = capacity
        self.living: Collection[str] = ()
        self._held: dict[str, _Held] = {}
        self._order = itertools.count()

    def put(self, report: PeerReport, now: float) -> None:
        """Keep this node's own new report, made at ``now`` (monotonic seconds).

        Numbers that aren't finite (an environment may give such rewards) become unknown, or zero.
        """
        unknown = dict.fromkeys(name for name in _bad_numbers(report) if name in _NUMBERS)
        zero = {name: 0.0 for name in unknown if name not in _MAY_BE_UNKNOWN}
        report = msgspec.structs.replace(report, **{**unknown, **zero})
        self._keep(report, self._signer.sign("report", "", msgspec.msgpack.encode(report)), now)

    def outgoing(self, now: float, limit: int = 32) -> list[tuple[str, ReportRow]]:
        """Return what to tell a peer next: at most ``limit`` reports by node, this node's own first.

        Half of the others are those that changed last and weren't passed on yet; the rest are those
        that were passed on longest ago, so that in time everything gets around.
        """
        mine = [self._held[self._me]] if self._me in self._held else []
        others = [held for held in self._held.values() if held.report.id != self._me]
        room = max(0, limit - len(mine))
        fresh = sorted((held for held in others if held.fresh), key=lambda held: -held.changed)
        chosen = fresh[: (room + 1) // 2]
        taken = {held.report.id for held in chosen}
        rest = sorted((held for held in others if held.report.id not in taken), key=lambda held: held.sent)
        chosen = [*mine, *chosen, *rest[: room - len(chosen)]]
        for held in chosen:
            held.sent, held.fresh = next(self._order), False
        return [
            (held.report.id, ReportRow(max(0.0, now - held.made_s), held.fact)) for held in chosen[:limit]
        ]

    def merge(self, rows: Iterable[ReportRow], now: float, *, latest_boot: int | None = None) -> list[str]:
        """Take in a peer's reports, each if it is newer than the one held; return the ids that changed.

        Reports of boots beyond ``latest_boot`` (the far future) are ignored; None takes all.

        Raises:
            ForgedFactError: a report isn't signed by its node; none is taken in then.
            WireError: one can't be read, or holds a number that isn't finite; none is taken in then.
        """
        news: list[tuple[PeerReport, ReportRow]] = []
        for row in rows:
            held = self._held.get(row.fact.node)
            if held is not None and held.fact == row.fact:
                continue
            report: PeerReport = decode(row.fact.body, PeerReport, "report of a node")
            if bad := [*_bad_numbers(report), *([] if math.isfinite(row.age_s) else ["age_s"])]:
                raise WireError(f"the report of node {report.id} holds a {bad[0]} that isn't finite")
            if report.id != row.fact.node:
                self._signer.forged += 1
                raise ForgedFactError(f"a report of {report.id[:8]} is signed by {row.fact.node[:8]}")
            if held is None or (report.boot, report.seq) > (held.report.boot, held.report.seq):
                self._signer.check("report", "", row.fact)
                news.append((report, row))
        changed = []
        for report, row in sorted(news, key=lambda one: (one[0].boot, one[0].seq)):
            if report.id == self._me or (latest_boot is not None and report.boot > latest_boot):
                continue
            self._keep(report, row.fact, now - row.age_s)
            changed.append(report.id)
        return list(dict.fromkeys(changed))

    def get(self, node: str, now: float) -> tuple[PeerReport, float] | None:
        """Return a node's newest report and its age in seconds, or None if it is unheard of."""
        held = self._held.get(node)
        return None if held is None else (held.report, max(0.0, now - held.made_s))

    def drop(self, nodes: Iterable[str]) -> None:
        """Forget nodes that have left or died for good; unknown ones are passed over."""
        for node in nodes:
            self._held.pop(node, None)

    def ids(self) -> list[str]:
        """Ids of all nodes that a report is held of."""
        return list(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _keep(self, report: PeerReport, fact: SignedFact, made_s: float) -> None:
        before = self._held.get(report.id)
        if before is None and len(self._held) >= self._capacity:
            others = (held for held in self._held.values() if held.report.id != self._me)
            oldest = min(others, key=self._worth, default=None)
            if oldest is not None:
                if oldest.report.id in self.living and report.id != self._me and report.id not in self.living:
                    return
                del self._held[oldest.report.id]
        sent = -1 if before is None else before.sent
        self._held[report.id] = _Held(report, fact, made_s, next(self._order), sent)

    def _worth(self, held: _Held) -> tuple[bool, float]:
        return held.report.id in self.living, held.made_s


_MAY_BE_UNKNOWN = {"mean_return", "consensus_distance", "bubble"}


_NUMBERS = ("mean_return", "steps_per_s", "consensus_distance", "bubble", "loop_lag_s")
"""The fields that may be infinite, or NaN, within the bounds of the schema."""


def _bad_numbers(report: PeerReport) -> list[str]:
    values = ((name, getattr(report, name)) for name in _NUMBERS)
    bad = [name for name, value in values if value is not None and not math.isfinite(value)]
    return bad if all(one.finite for one in report.evaluations) else [*bad, "evaluation"]
