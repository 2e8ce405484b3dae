"""What a node says of the swarm's mode: what is in force, since when, and who follows it already.

Serves ``/v1/mode``, which ``p2pdrl mode show`` prints and ``p2pdrl mode set`` waits on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import psutil

import p2pdrl
from p2pdrl.config.mode import protocol_of, told_options
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.config.task import minibatch_rows
from p2pdrl.ids import short
from p2pdrl.membership.events import MemberView
from p2pdrl.membership.records import relays_in, release_in
from p2pdrl.node import settings
from p2pdrl.node.accounting.evaluations import Entry
from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.node.context import NodeContext
from p2pdrl.node.settings import ModeSetting
from p2pdrl.node.status import health, pipeline
from p2pdrl.node.status.history import MetricHistory
from p2pdrl.node.status.pipeline import measured_facts
from p2pdrl.transport.protocol import Address

__all__ = ["StatusReporter", "describe", "mode_document"]


def describe(strategy: StrategyConfig) -> dict[str, object]:
    """A strategy's name, and its options: those that say what it is, and those that aren't the defaults."""
    return {"name": protocol_of(strategy), "options": told_options(strategy)}


def mode_document(
    context: NodeContext, reports: Sequence[tuple[str, PeerReport | None]]
) -> dict[str, object]:
    """The document of ``/v1/mode``.

    Args:
        reports: the newest report of ourselves and of every living member, with its name.
    """
    training = context.training
    record = context.membership.records.get(settings.MODE)
    setting = None if record is None else settings.decode(record.value, ModeSetting)
    document: dict[str, object] = {
        "mode": None,
        "protocol": None,
        "options": {},
        "epoch": 0,
        "since": None,
        "error": context.mode_error,
        "facts": {},
        "record": None,
    }
    if training is not None:
        strategy = training.mode.config
        document |= {"mode": strategy.mode, "protocol": protocol_of(strategy)}
        document |= {"options": told_options(strategy), "epoch": settings.epoch_of(training.mode.epoch)}
        facts = dict(training.mode.strategy.facts) | measured_facts(training)
        document |= {"since": training.accounting.since_wall_s, "facts": facts}
    wanted = 0
    if record is not None:
        wanted = settings.stamp(record.epoch, record.proposer)
        document["record"] = {
            "epoch": record.epoch,
            "proposer": record.proposer,
            "proposer_name": _name(context, record.proposer),
            "at": record.at_ms / 1000 or None,
            "mode": None if setting is None else setting.strategy.mode,
            "protocol": None if setting is None else protocol_of(setting.strategy),
            "options": {} if setting is None else told_options(setting.strategy),
        }
    protocol = None if setting is None else protocol_of(setting.strategy)
    document["members"] = [_member(name, report, wanted, protocol) for name, report in reports]
    return document


def _member(name: str, report: PeerReport | None, wanted: int, protocol: str | None) -> dict[str, object]:
    """One member: where it stands, and whether it runs what the record says."""
    if report is None:
        return {"name": name, "state": "unheard", "epoch": None, "protocol": "", "role": "", "follows": False}
    return {
        "name": name,
        "state": report.state,
        "epoch": settings.epoch_of(report.mode_epoch),
        "protocol": report.strategy,
        "role": report.role,
        "follows": report.mode_epoch == wanted and report.strategy == protocol,
    }


def _name(context: NodeContext, node: str) -> str:
    name = context.author(node)
    return short(node) if name == node else name


FIGURES = (
    "policy_version",
    "env_steps",
    "steps_per_s",
    "mean_return",
    "episodes_in_window",
    "bytes_in",
    "bytes_out",
    "consensus_distance",
    "loop_lag_s",
    "rss_bytes",
    "role",
    "stage",
    "bubble",
)
"""Fields of a report that ``/v1/status`` and each row of ``/v1/peers`` show under the same names."""


class StatusReporter:
    """Figures of one node."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._seq = 0
        self._processes: dict[int, psutil.Process] = {}
        self._history = MetricHistory()

    # --- of this node ---------------------------------------------------------------------------

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last sampled training episodes; None without any, or if not finite."""
        training = self._context.training
        if training is None or pipeline.serves(training) or not training.supervisor.returns:
            return None
        returns = training.supervisor.returns
        mean = sum(returns) / len(returns)
        return mean if math.isfinite(mean) else None

    @property
    def rss_bytes(self) -> int:
        """Memory of the daemon, its learner and its actors; what can't be read counts nothing."""
        training = self._context.training
        learner = None if training is None else training.supervisor.pid
        children: tuple[int, ...] = () if learner is None else (learner,)
        if training is not None and training.actors is not None:
            children += training.actors.pids
        inference = self._context.inference
        if inference is not None and inference.pid is not None:
            children += (inference.pid,)
        pids = (os.getpid(), *children)
        # Kept, as making one reads more of /proc than asking it does.
        self._processes = {pid: found for pid in pids if (found := self._processes.get(pid) or _process(pid))}
        return sum(_rss_bytes(process) for process in self._processes.values())

    def health(self) -> tuple[bool, list[str]]:
        """Whether this node is well, and why not."""
        context = self._context
        now_s = context.clock.monotonic()
        training = context.training
        inputs: dict[str, Any] = {}
        building = context.building
        if training is None and building is not None:
            inputs = {"learner_starting_s": building.supervisor.starting_s}
        if training is not None:
            learner = training.supervisor
            reported_s = learner.reported_s
            wanted = context.state == "training"
            due = wanted and pipeline.trains(training)
            last_death = learner.restart_policy.last_death
            inputs |= {
                "learner_down_s": learner.down_s if wanted else None,
                "learner_restarts_in_a_row": learner.failures,
                "learner_death": "" if last_death is None else last_death.how,
                "learner_stopped_s": learner.stopped_s,
                "progress_age_s": None if not due or reported_s is None else now_s - reported_s,
                "quarantined": tuple(self.namer()(peer) for peer in training.swarm.quarantine.held(now_s)),
                "adopting_s": training.adoptions.seconds,
                "mode_error": context.mode_error,
            }
        sender = None if building is None else building.sender
        if sender is not None and context.state in ("starting", "training"):
            inputs |= {"idle_s": sender.idle_s, "without_learner": sender.without_learner}
        fall = context.evaluations.fall()
        return health.judge(
            health.HealthInputs(
                loop_lag_s=context.lag.p99_s,
                storage_error=None if context.checkpointer is None else context.checkpointer.error,
                seeds_given=bool(context.config.node.peers),
                alone_s=0.0 if context.alone_since_s is None else now_s - context.alone_since_s,
                return_fall="" if fall is None else str(fall),
                **inputs,
            )
        )

    def ready(self) -> tuple[bool, list[str]]:
        """Whether this node trains, and why not."""
        state, building = self._context.state, self._context.building
        if state == "training":
            return True, []
        why = ""
        if building is not None and (starting_s := building.supervisor.starting_s) is not None:
            why = f": its learner is starting for {starting_s:.0f} s"
        elif building is not None and building.sender is not None and building.sender.without_learner:
            why = f": {building.sender.without_learner}"
        return False, [f"this node is {state}{why}"]

    def report(self) -> PeerReport:
        """Our own report, to be spread."""
        context = self._context
        training = context.training
        healthy, reasons = self.health()
        counts = context.progress_tracker.of_node(context.node_id)
        self._seq += 1
        mean, window = self.mean_return, 0
        fields: dict[str, Any] = {}
        if training is not None:
            window = 0 if pipeline.serves(training) else len(training.supervisor.returns)
            fields = {
                "lineage": training.lineage,
                "policy_version": training.policy_version
                if training.sender is None
                else training.sender.policy_version,
                "consensus_distance": training.mode.strategy.consensus_distance,
                "device": training.supervisor.device,
                "steps_per_s": pipeline.steps_per_s(training, context.clock.monotonic())
                if training.sender is None
                else training.sender.steps_per_s,
                "busy_steps_per_s": training.supervisor.busy_steps_per_s,
                "learner_restarts": training.supervisor.restarts,
                "mode_epoch": training.mode.epoch,
                "strategy": protocol_of(training.mode.config),
                "role": str(training.mode.strategy.facts.get("role", ""))[:64],
                "trains": pipeline.trains(training),
                "acts": training.lent_actors is not None and training.lent_actors.working,
                "stage": pipeline.stage_words(training),
                "bubble": pipeline.pipeline_bubble(training),
            }
        return PeerReport(
            id=context.node_id,
            boot=context.boot,
            seq=self._seq,
            name=context.name,
            state=context.state,
            env_steps=counts.env_steps,
            updates=counts.updates,
            episodes=counts.episodes,
            episodes_in_window=window,
            mean_return=mean,
            loop_lag_s=context.lag.p99_s,
            rss_bytes=self.rss_bytes,
            evaluations=context.own_evaluations,
            bytes_in=context.transport.counters.bytes_in,
            bytes_out=context.transport.counters.bytes_out,
            healthy=healthy,
            reasons=tuple(reasons[:5]),
            **fields,
        )

    def status(self) -> dict[str, object]:
        """The document of ``/v1/status``."""
        context = self._context
        report = self.report()
        training, checkpointer = context.training, context.checkpointer
        alive = [report, *self._reports(context.alive())]
        rates = [one.steps_per_s for one in alive if one.trains or one.acts]
        return {
            "name": context.name,
            "id": context.node_id,
            "swarm_id": context.swarm_id,
            "address": str(context.address),
            "pid": os.getpid(),
            "version": p2pdrl.__version__,
            "mode": "none" if training is None else training.mode.config.mode,
            "mode_epoch": settings.epoch_of(report.mode_epoch),
            "mode_error": context.mode_error,
            "strategy": None if training is None else describe(training.mode.config),
            "lineage": report.lineage,
            "state": context.state,
            "members": context.member_counts(),
            "reach": context.reachability.figures(),
            "commands": self._commands(),
            "swarm_env_steps": context.progress_tracker.total().env_steps,
            "swarm_steps_per_s": sum(rates),
            "speedup": self._speedup(rates),
            "episodes": report.episodes,
            "updates": report.updates,
            **{name: getattr(report, name) for name in FIGURES},
            "exchanges": {} if training is None else training.outcomes,
            "accounting": self.accounting(),
            "trains": report.at_work,
            "collects": report.trains or report.acts,
            "pipeline": None if training is None else pipeline.pipeline_document(training),
            "learner": self._learner(),
            "actors": [] if training is None or training.actors is None else training.actors.figures(),
            "inference": None if context.inference is None else context.inference.figures(),
            "experience": self._experience(),
            "evaluation": self._evaluation(),
            "stop": {"reached": context.halted is not None, "reason": context.halted}
            | ({} if training is None else msgspec.structs.asdict(training.stop_config)),
            "healthy": report.healthy,
            "reasons": list(report.reasons),
            "uptime_s": context.clock.monotonic() - context.began_s,
            "data_dir": context.data_dir,
            "last_checkpoint": {
                "path": None if checkpointer is None else checkpointer.path,
                "age_s": None if checkpointer is None else checkpointer.age_s,
                "error": None if checkpointer is None else checkpointer.error,
            },
        }

    def _commands(self) -> list[dict[str, object]]:
        """Who wrote each of the swarm's records, and when."""
        records = self._context.membership.records
        return [
            {
                "key": record.key,
                "epoch": record.epoch,
                "by": _name(self._context, record.proposer),
                "operator": None if (found := records.operator(record.proposer)) is None else found.name,
                "id": record.proposer,
                "at": record.at_ms / 1000 or None,
            }
            for record in records.all()
        ]

    def _speedup(self, rates: Sequence[float]) -> dict[str, object]:
        """How much sooner the swarm gets there than its fastest node, and how large its batches are.

        ``rows`` is what a gradient of all learners together is made of, ``critical_rows`` the size at which
        more rows bring half of what they would bring if there were few (McCandlish 2018); None until known.
        """
        training = self._context.training
        fastest = max(rates, default=0.0)
        if training is None or not fastest:
            return {}
        metrics = training.supervisor.metrics
        alone, unit = minibatch_rows(training.task)
        if unit == "environments":
            alone *= int(getattr(training.task.algorithm, "unroll_steps", 1))
        learners = 1 if training.mode.config.mode == "local" else 1 + len(self._context.learners())
        rows = alone * max(1.0, learners * metrics.get("batch_share", 1.0))
        critical = metrics.get("gradient_noise_scale")
        worth = 1.0 if critical is None else (1.0 + alone / critical) / (1.0 + rows / critical)
        return {
            "times": worth * sum(rates) / fastest,
            "nodes": len(rates),
            "rows": round(rows),
            "critical_rows": None if critical is None else round(critical),
        }

    def _experience(self) -> dict[str, object]:
        """Unrolls of other nodes' actors that came, or that our own sent; empty where none travel."""
        training = self._context.training
        if training is None:
            return {}
        found: dict[str, object] = {}
        if training.receiver is not None:
            found["received"] = training.receiver.figures()
        if training.sampler is not None:
            found["replay"] = training.sampler.figures()
        if training.replay_server is not None:
            metrics = training.supervisor.metrics
            found["shard"] = training.replay_server.figures(lambda name: metrics.get(name, 0.0)) | {
                "pid": training.supervisor.pid,
                "policy_version": -1 if training.follower is None else training.follower.version,
                "state_version": training.policy_version,
            }
        sender = training.sender_at_work
        if sender is not None:
            found["sent"] = sender.figures() | {"state_version": training.policy_version}
        return found

    def accounting(self) -> dict[str, object]:
        """What each strategy cost and brought, by its name."""
        training = self._context.training
        if training is None:
            return {}
        training.accounting.saw_distance(training.mode.strategy.consensus_distance)
        return training.accounting.document(self.namer())

    def evaluations(self) -> list[dict[str, object]]:
        """The document of ``/v1/evaluations``: the swarm's learning curve, oldest first."""
        named = self.namer()
        return [_evaluation_row(entry, named) for entry in self._context.evaluations.entries]

    def _evaluation(self) -> dict[str, object] | None:
        """The newest evaluation, the best, and how many there were; None before the first."""
        log, named = self._context.evaluations, self.namer()
        if log.newest is None or log.best is None:
            return None
        return _evaluation_row(log.newest, named) | {
            "best": _evaluation_row(log.best, named),
            "count": len(log),
        }

    def rounds(self) -> list[dict[str, object]]:
        """The document of ``/v1/rounds``: the last rounds, oldest first."""
        training = self._context.training
        return [] if training is None else training.accounting.rounds(self.namer())

    # --- of everybody ---------------------------------------------------------------------------

    def sample(self) -> None:
        """Add to the history what all members tell now."""
        context = self._context
        if not self._history.due(context.clock.wall()):
            return
        members = {member.id: member.name for member in context.membership.members()}
        reports = [self.report(), *self.reports()]
        self._history.sample(
            context.clock.wall(), context.progress_tracker.total().env_steps, reports, members
        )

    def history(self) -> dict[str, object]:
        """The document of ``/v1/history``."""
        return self._history.document()

    def peers(self) -> list[dict[str, object]]:
        """The document of ``/v1/peers``: every known member, ourselves first, then by name."""
        membership = self._context.membership
        members = membership.members()
        rows = [self._row(member) for member in members]
        known = {member.id for member in members}
        rows += [
            {"name": ban.name or short(ban.id), "id": ban.id, "address": "", "state": "banned", "self": False}
            | {"state_reason": ban.words, "healthy": False, "reasons": [ban.words], "roles": []}
            for ban in membership.records.bans.values()
            if ban.id not in known
        ]
        return sorted(rows, key=lambda row: (not row["self"], str(row["name"]), str(row["id"])))

    def trainers(self) -> dict[str, Address]:
        """The other living learners that learn from experience by themselves, as far as they have told.

        Actors of other nodes work for these: only a pipeline's first rank has use for what they make.
        """
        learners = self._context.learners()
        busy = {report.id for report in self._reports(learners) if not report.trains}
        return {node: address for node, address in learners.items() if node not in busy}

    def donors(self) -> list[str]:
        """Ids of the living members, those that train and are well and ahead first."""
        alive = self._context.alive()
        return sorted(alive, key=self._donor_rank)

    def busy_steps_per_s(self) -> dict[str, float]:
        """How fast each living learner but ours is, by id; 0 where that isn't known."""
        return {report.id: report.busy_steps_per_s for report in self._reports(self._context.learners())}

    def reports(self) -> list[PeerReport]:
        """The newest reports of the living members that were heard of, without our own."""
        return self._reports(self._context.alive())

    def living_reports(self) -> list[PeerReport] | None:
        """Our own newest report and those of all living members; None while one is unheard of."""
        alive = self._context.alive()
        reports = self._reports(alive)
        mine = self._reports([self._context.node_id]) or [self.report()]
        return [*mine, *reports] if len(reports) == len(alive) else None

    def mode(self) -> dict[str, object]:
        """The document of ``/v1/mode``."""
        alive = {member.id: member.name for member in self._context.others_alive()}
        heard = {report.id: report for report in self._reports(alive)}
        others = [
            (name, heard.get(node)) for node, name in sorted(alive.items(), key=lambda item: item[::-1])
        ]
        return mode_document(self._context, [(self._context.name, self.report()), *others])

    def newest_mode(self) -> tuple[int, str]:
        """The greatest mode stamp of the living members of our lineage, and whose it is; (0, "") for none."""
        lineage = "" if self._context.training is None else self._context.training.lineage
        reports = [
            report for report in self._reports(self._context.alive()) if report.lineage in ("", lineage)
        ]
        return max(((report.mode_epoch, report.id) for report in reports), default=(0, ""))

    def greater_lineage(self) -> tuple[str, str, str] | None:
        """A living member whose lineage stays when it meets ours, that lineage, and why; None for none.

        By what we believe of the steps, not by what that member says of its lineage.
        """
        training = self._context.training
        if training is None or not training.lineage:
            return None
        donors = {
            report.lineage: report.id
            for report in self._reports(self._context.alive())
            if report.lineage not in ("", training.lineage) and report.state in ("training", "paused")
        }
        found = max(map(self._context.rank, donors), default=None)
        ours = self._context.rank(training.lineage)
        if found is None or found < ours:
            return None
        why = f"lineage {found.lineage} has {found.env_steps} steps, ours {ours.env_steps}"
        if found.several and not ours.several:
            why += ", and several members who train in it"
        return donors[found.lineage], found.lineage, why

    def outranks(self, lineage: str) -> bool:
        """Whether ``lineage`` is ours, or stays when it meets ours, as far as we know."""
        training = self._context.training
        ours = "" if training is None else training.lineage
        return ours in ("", lineage) or self._context.rank(ours) < self._context.rank(lineage)

    def _row(self, member: MemberView) -> dict[str, object]:
        now_s = self._context.clock.monotonic()
        if member.is_self:
            found: tuple[PeerReport, float] | None = (self.report(), 0.0)
        else:
            gossip = self._context.gossip
            found = None if gossip is None else gossip.table.get(member.id, now_s)
            if found is not None and found[0].boot < member.incarnation.boot_ms:
                found = None  # it was started again, and has told nothing since
        row: dict[str, object] = {
            "name": member.name,
            "id": member.id,
            "address": member.address,
            "state": member.state,
            "state_reason": member.state_reason,
            "incarnation": list(member.incarnation),
            "rtt_s": member.rtt_s,
            "last_seen_s": member.last_seen_s,
            "self": member.is_self,
            "roles": list(self._context.roles_of(member)),
            "release": release_in(member.tags) or None,
            "protocols": member.spoken.wire,
        } | self._reach(member)
        report, age_s = found if found is not None else (None, None)
        shown = (*FIGURES, "device", "learner_restarts", "strategy")
        row |= {name: getattr(report, name, None) for name in shown}
        row["report_age_s"] = age_s
        row["healthy"] = member.state == "alive" and (report is None or report.healthy)
        row["reasons"] = self._reasons(member, report)
        row["training_state"] = None if report is None else report.state
        row["trains"] = member.state == "alive" and report is not None and report.at_work
        row["collects"] = None if report is None else report.trains or report.acts
        row["mode_epoch"] = None if report is None else settings.epoch_of(report.mode_epoch)
        training = self._context.training
        behind = training.policy_version - report.policy_version if report and training else None
        row["staleness"] = None if behind is None else max(behind, 0)
        row["quarantined"] = training is not None and training.swarm.quarantine.holds(member.id, now_s)
        row["pull_weight"] = 1.0 if training is None else training.swarm.trust(member.id)
        return row

    def _reach(self, member: MemberView) -> dict[str, object]:
        """How others call a member: directly, or through whom."""
        relays = relays_in(member.tags)
        return {
            "reach": "direct" if relays is None else "outbound-only",
            "relays": [self._context.name_of(relay) for relay in relays or ()],
        }

    def _reasons(self, member: MemberView, report: PeerReport | None) -> list[str]:
        reasons = [] if member.state == "alive" else [f"{member.state}: {member.state_reason}"]
        return reasons + (list(report.reasons) if report is not None and member.state == "alive" else [])

    def _reports(self, ids: Iterable[str]) -> list[PeerReport]:
        gossip = self._context.gossip
        if gossip is None:
            return []
        now_s = self._context.clock.monotonic()
        found = (gossip.table.get(node, now_s) for node in ids)
        return [entry[0] for entry in found if entry is not None]

    def _donor_rank(self, node: str) -> tuple[bool, bool, int, str]:
        reports = self._reports([node])
        if not reports:
            return (True, True, 0, node)
        report = reports[0]
        return (report.state not in ("training", "paused"), not report.healthy, -report.policy_version, node)

    def _learner(self) -> dict[str, object] | None:
        training = self._context.training
        building = self._context.building if training is None else training
        learner = None if building is None else building.supervisor
        if learner is None or (training is not None and not training.learns):
            return None
        state = "running" if learner.pid else "down"
        if training is not None and training.paused:
            state = "paused"
        elif learner.stopped_s > 0:
            state = "stopped"
        elif learner.starting_s is not None:
            state = "starting"
        last = learner.restart_policy.last_death
        return {
            "pid": learner.pid,
            "state": state,
            "starting_s": learner.starting_s,
            "stopped_s": learner.stopped_s,
            "restarts": learner.restarts,
            "last_death": None
            if last is None
            else {"how": last.how, "code": last.code, "error": last.document},
            "device": learner.device,
            "metrics": learner.metrics,
        }

    def namer(self) -> Callable[[str], str]:
        """From a node id to the name that people gave it, or to its first digits."""
        names = self._context.names()
        return lambda node: names.get(node) or short(node)


def _evaluation_row(entry: Entry, named: Callable[[str], str]) -> dict[str, object]:
    return msgspec.structs.asdict(entry.evaluation) | {"node": entry.node, "name": named(entry.node)}


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except (psutil.Error, OSError):
        return None


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.Error, OSError):
        return 0
