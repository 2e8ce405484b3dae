from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.errors import CheckpointError
from p2pdrl.membership.records import Incarnation
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.node.children.restarts import death_of
from p2pdrl.node.context import NodeContext
from p2pdrl.node.status.meters import Meters
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.node.status.view import ApiView
from p2pdrl.strategies.protocol import Merged, RoundReport
from p2pdrl.workers.protocol import Crashed

from ..signing import counted, node_id, said, tracker_of

STATUS = (
    "name id swarm_id address pid version mode mode_epoch mode_error strategy accounting lineage commands "
    "state members policy_version env_steps "
    "swarm_env_steps steps_per_s swarm_steps_per_s speedup mean_return episodes episodes_in_window updates "
    "consensus_distance loop_lag_s rss_bytes bytes_in bytes_out exchanges learner stop healthy reasons "
    "uptime_s data_dir last_checkpoint pipeline trains collects role stage bubble actors "
    "evaluation experience inference reach"
)
ROW = (
    "name id address state state_reason incarnation rtt_s last_seen_s policy_version env_steps steps_per_s "
    "mean_return episodes_in_window staleness bytes_in bytes_out consensus_distance loop_lag_s rss_bytes "
    "healthy reasons device learner_restarts report_age_s self training_state mode_epoch strategy role "
    "trains collects stage bubble roles reach relays quarantined pull_weight release protocols"
)
STATUS_KEYS, ROW_KEYS = set(STATUS.split()), set(ROW.split())
B, C, D, E, F, G = map(node_id, range(11, 17))


@pytest.fixture
def full(talking, membership, training, clock) -> NodeContext:
    """A node that trains among four others: alive, suspect, dead and left."""
    context = talking
    membership.views += [
        membership.view(B, "bob"),
        membership.view(C, "carol", "suspect", state_reason="no answer for 2 s"),
        membership.view(D, "dave", "dead", state_reason="connection refused"),
        membership.view(E, "eve", "left", state_reason="said goodbye"),
    ]
    context.training = training
    context.state = "training"
    context.progress_tracker.follow(training.lineage)
    context.progress_tracker.credit(Counts(800, 4, 2))
    reports = [
        report(B, policy_version=30, state="training", steps_per_s=50.0, mean_return=7.0),
        report(C, policy_version=99, healthy=False, reasons=("the learner is down",)),
    ]
    context.gossip.table.merge(map(said, reports), clock.monotonic())
    return context


def report(node: str, **fields) -> PeerReport:
    return PeerReport(id=node, boot=1, seq=1, **fields)


@pytest.fixture
def figures(full) -> StatusReporter:
    return StatusReporter(full)


async def test_actors_work_for_learners_that_learn_by_themselves(full, figures, membership, clock):
    membership.views += [membership.view(F, "fred"), membership.view(G, "new")]
    assert set(figures.trainers()) == {B, F, G}, "whoever hasn't said otherwise may"
    full.gossip.table.merge([said(report(F, state="training", trains=False, stage="2/2"))], clock.monotonic())
    assert set(figures.trainers()) == {B, G}


async def test_status_has_exactly_the_promised_keys(figures, full):
    status = figures.status()
    assert status.keys() == STATUS_KEYS
    assert status["members"] == {"alive": 2, "suspect": 1, "dead": 1, "left": 1, "banned": 0}
    assert status["last_checkpoint"].keys() == {"path", "age_s", "error"}
    assert status["stop"].keys() == {"reached", "reason", "env_steps", "time_s", "mean_return", "window"}
    assert status["learner"].keys() >= {"pid", "state", "restarts", "device", "metrics"}
    assert status["exchanges"] == {"ok": 3, "busy": 1, "answered": 7}
    assert (status["mode"], status["state"], status["policy_version"]) == ("gossip", "training", 42)
    assert status["strategy"] == {"name": "adpsgd", "options": {"weight": 0.3}}
    assert status["accounting"]["adpsgd"]["consensus_distance"] == 0.25
    assert (status["env_steps"], status["swarm_env_steps"], status["updates"]) == (800, 800, 2)
    assert status["consensus_distance"] == 0.25
    assert status["swarm_steps_per_s"] == pytest.approx(50.0)
    assert status["speedup"] == {"times": 1.0, "nodes": 2, "rows": 512, "critical_rows": None}
    assert (status["healthy"], status["reasons"]) == (True, [])
    msgspec.json.encode(status)


async def test_status_before_there_is_a_task(context):
    status = StatusReporter(context).status()
    assert status.keys() == STATUS_KEYS
    assert (status["mode"], status["state"], status["learner"], status["exchanges"]) == (
        "none",
        "joining",
        None,
        {},
    )
    assert (status["strategy"], status["accounting"], status["mode_error"]) == (None, {}, None)
    assert status["mean_return"] is None
    assert status["members"] == {"alive": 1, "suspect": 0, "dead": 0, "left": 0, "banned": 0}
    assert StatusReporter(context).ready() == (False, ["this node is joining"])
    msgspec.json.encode(status)


async def test_rows_have_exactly_the_promised_keys(figures, full):
    rows = figures.peers()
    assert [row["name"] for row in rows] == ["me", "bob", "carol", "dave", "eve"]
    assert all(row.keys() == ROW_KEYS for row in rows)
    me, bob, carol, dave, _ = rows
    assert (me["self"], me["policy_version"], me["staleness"], me["report_age_s"]) == (True, 42, 0, 0.0)
    assert (bob["staleness"], bob["mean_return"], bob["healthy"]) == (12, 7.0, True)
    assert bob["incarnation"] == [1, 2]
    assert (carol["staleness"], carol["healthy"]) == (0, False)
    assert carol["reasons"] == ["suspect: no answer for 2 s"]
    assert (dave["policy_version"], dave["staleness"], dave["report_age_s"]) == (None, None, None)
    assert (dave["healthy"], dave["reasons"]) == (False, ["dead: connection refused"])
    msgspec.json.encode(rows)


async def test_roles_are_told_and_only_learners_are_met(figures, full, membership):
    eva = F
    membership.views.append(membership.view(eva, "eva", tags={"roles": "actor,replay"}))
    rows = {row["name"]: row["roles"] for row in figures.peers()}
    assert rows["eva"] == ["actor", "replay"]
    assert rows["bob"] == ["actor", "learner", "server"]  # of an earlier release: it says nothing
    assert full.alive().keys() == {B, eva}
    assert full.learners().keys() == {B}


async def test_what_a_node_told_before_it_was_started_again_isnt_shown(figures, full, clock):
    full.gossip.table.merge([said(report(B, updates=9, state="training"))], clock.monotonic())
    row = next(row for row in figures.peers() if row["id"] == B)
    assert row["training_state"] == "training"
    views = full.membership.views
    old = next(view for view in views if view.id == B)
    views[views.index(old)] = msgspec.structs.replace(old, incarnation=Incarnation(2, 1))
    row = next(row for row in figures.peers() if row["id"] == B)
    assert (row["training_state"], row["trains"], row["report_age_s"]) == (None, False, None)


async def test_names_that_several_have_get_their_first_digits(full):
    views = full.membership.views
    names = [view.name for view in views]
    assert [full.names()[view.id] for view in views] == names
    views[1:3] = [msgspec.structs.replace(view, name="lab", state="alive") for view in views[1:3]]
    told = [full.name_of(view.id) for view in views]
    assert told == [names[0], f"lab ({views[1].id[:8]})", f"lab ({views[2].id[:8]})", *names[3:]]


async def test_who_trains_is_told(figures, full, clock):
    now_s = clock.monotonic()
    assert [row["trains"] for row in figures.peers()] == [True, False, False, False, False]
    for number, (fields, trains) in enumerate(
        [
            ({"updates": 1}, True),
            ({"updates": 1, "state": "starting"}, False),
            ({"updates": 1, "state": "paused"}, False),
            ({"updates": 9, "trains": False}, False),  # stands by in a pipeline
            ({"updates": 0, "trains": False, "stage": "2/2"}, True),
        ]
    ):
        fields = {"state": "training"} | fields
        made = msgspec.structs.replace(report(B, **fields), seq=number + 2)
        full.gossip.table.merge([said(made)], now_s)
        assert figures.peers()[1]["trains"] is trains, fields


async def test_the_age_of_a_report_is_told(figures, full, clock):
    clock.advance(4.0)
    assert figures.peers()[1]["report_age_s"] == pytest.approx(4.0)


async def test_the_mean_return_is_of_the_window(figures, training):
    assert figures.mean_return is None
    training.supervisor.returns.extend([1.0, 2.0, 6.0])
    assert figures.mean_return == 3.0
    assert figures.status()["episodes_in_window"] == 3


@pytest.mark.parametrize("bad", [[float("nan")], [float("inf")], [float("inf"), float("-inf")]])
async def test_returns_that_arent_finite_have_no_mean(figures, training, bad):
    training.supervisor.returns.extend([1.0, *bad])
    assert figures.mean_return is None
    assert figures.status()["mean_return"] is None


async def test_reports_are_numbered(figures):
    assert [figures.report().seq for _ in range(3)] == [1, 2, 3]


async def test_donors_that_train_and_are_ahead_come_first(figures, full, membership, clock):
    views = [("1", {"state": "training", "policy_version": 5}), ("2", {"state": "joining"})]
    views += [("3", {"state": "training", "policy_version": 9})]
    views += [("4", {"state": "training", "policy_version": 99, "healthy": False})]
    membership.views = membership.views[:1]
    for digit, fields in views:
        membership.views.append(membership.view(node_id(int(digit)), digit))
        full.gossip.table.merge([said(report(node_id(int(digit)), **fields))], clock.monotonic())
    membership.views.append(membership.view(node_id(5), "5"))
    assert figures.donors() == [node_id(number) for number in (3, 1, 4, 2, 5)]


async def test_living_reports_want_everybody(figures, full, membership):
    reports = figures.living_reports()
    assert [one.id for one in reports] == [full.node_id, B]
    membership.views.append(membership.view("9" * 32, "unheard"))
    assert figures.living_reports() is None


async def test_health_tells_what_is_wrong(figures, full, training, membership, clock):
    training.supervisor.down_s, training.supervisor.failures = 20.0, 3
    training.held = (B,)
    healthy, reasons = figures.health()
    assert not healthy
    assert any("down for 20 s and died 3 times" in reason for reason in reasons)
    assert any("bob" in reason for reason in reasons)
    full.state = "paused"
    assert not any("down" in reason for reason in figures.health()[1])


async def test_a_learner_that_is_starting_is_told_of(figures, full, training):
    full.building, full.training, full.state = training, None, "starting"
    training.supervisor.starting_s = 47.0
    learner = figures.status()["learner"]
    assert (learner["state"], learner["starting_s"]) == ("starting", 47.0)
    assert figures.ready() == (False, ["this node is starting: its learner is starting for 47 s"])
    assert figures.health() == (True, [])
    training.supervisor.starting_s = 61.0
    assert figures.health() == (False, ["the learner is starting for 61 s"])


@pytest.mark.parametrize("state", ["starting", "training"])
async def test_why_no_learner_takes_what_actors_make_is_told(figures, full, training, state):
    training.sender = SimpleNamespace(idle_s=14.0, without_learner="bob takes none: set its roles")
    full.building, full.state = training, state
    if state == "starting":
        full.training = None
        assert figures.ready() == (False, ["this node is starting: bob takes none: set its roles"])
    assert figures.health() == (True, [])
    training.sender.idle_s = 16.0
    words = "no learner has taken what its actors make for 16 s: bob takes none: set its roles"
    assert figures.health() == (False, [words])
    training.sender.without_learner = ""
    assert figures.health() == (True, [])
    full.state = "paused"
    training.sender.idle_s = 100.0
    assert figures.health() == (True, [])


async def test_the_error_that_learners_die_of_is_shown(figures, training):
    crash = Crashed("ValueError", "bad action", "/envs/mine.py:12 in step", "Traceback …")
    training.supervisor.restart_policy.died(death_of(1, crash=crash), 1.0)
    training.supervisor.down_s, training.supervisor.failures = 20.0, 3
    shown = figures.status()["learner"]["last_death"]
    assert shown == {
        "how": "died of ValueError: bad action (at /envs/mine.py:12 in step)",
        "code": 1,
        "error": {
            "type": "ValueError",
            "message": "bad action",
            "where": "/envs/mine.py:12 in step",
            "traceback": "Traceback …",
        },
    }
    assert "in a row: it died of ValueError: bad action" in figures.health()[1][0]


async def test_a_stopped_learner_is_shown(figures, training):
    training.supervisor.pid, training.supervisor.stopped_s = os.getpid(), 4.2
    learner = figures.status()["learner"]
    assert (learner["state"], learner["stopped_s"]) == ("stopped", 4.2)
    assert figures.health()[1] == ["the learner's process has been stopped for 4 s"]


async def test_the_metrics_page(figures, full):
    meters = Meters(full, figures, None)
    page = meters.render().decode()
    assert "p2pdrl_env_steps_total 800.0" in page
    assert 'p2pdrl_members{state="alive"} 2.0' in page
    assert "p2pdrl_policy_version 42.0" in page
    assert "p2pdrl_mean_return NaN" in page
    meters.write_scalars()


class FakeWriter:
    def __init__(self) -> None:
        self.written: list[tuple[int, dict]] = []

    def scalars(self, step: int, values: dict) -> None:
        self.written.append((step, values))


async def test_scalars_are_written_every_five_seconds(figures, full, clock):
    writer = FakeWriter()
    meters = Meters(full, figures, writer)
    for _ in range(11):
        meters.write_scalars()
        clock.advance(1.0)
    assert [step for step, _ in writer.written] == [800, 800, 800]
    values = writer.written[0][1]
    assert values["train/loss"] == 0.5
    assert "swarm/mean_return" not in values


class FakeTracer:
    def __init__(self) -> None:
        self.rounds: list[tuple] = []

    def round(self, *told) -> None:
        self.rounds.append(told)


async def test_each_round_is_traced(figures, full, clock):
    tracer = FakeTracer()
    meters = Meters(full, figures, None, tracer)
    other = full.membership.members()[-1]
    merged = (Merged(full.node_id, 0.5), Merged(other.id, 0.5, 3))
    meters.round(RoundReport("ok", merged, seconds=0.2, bytes_in=7, bytes_out=8))
    meters.round(RoundReport("timeout", missing=(other.id,), seconds=2.0, error="no answer"))
    (name, seconds, good, nothing), (_, _, bad, error) = tracer.rounds
    assert name.startswith("round ")
    assert (seconds, nothing, error) == (0.2, "", "no answer")
    assert good["p2pdrl.peers"] == [other.name]
    assert (good["p2pdrl.staleness"], good["p2pdrl.weights"]) == ([3], [0.5])
    assert (good["p2pdrl.bytes_in"], good["p2pdrl.bytes_out"], good["p2pdrl.outcome"]) == (7, 8, "ok")
    assert bad["p2pdrl.missing"] == [other.name]


async def test_the_view_before_and_after_the_parts_are_there(figures, full, events, training):
    left: list[str] = []
    view = ApiView(
        node_id="a" * 32,
        name="me",
        token="t" * 64,
        swarm_keys=(b"secret key of the swarm",),
        keyed=True,
        open_metrics=False,
        data_dir="/data",
        events=events,
        leave=left.append,
    )
    asks = [view.status, view.peers, view.health, view.ready, view.metrics, view.config]
    for ask in [*asks, view.mode, view.rounds]:
        with pytest.raises(CheckpointError, match="still starting"):
            ask()
    held: list[tuple[str, bool]] = []
    follower = type(
        "Follower",
        (),
        {
            "check_open": lambda self, what: None,
            "pause": lambda self, *, paused: held.append(("swarm", paused)),
            "hold": lambda self, training, *, paused: held.append(("node", paused)),
        },
    )()
    view.attach(full, figures, Meters(full, figures, None), follower, lambda roles: None)
    full.membership.follow(training.lineage)
    assert view.status().keys() == STATUS_KEYS
    assert view.peers()[0].keys() == ROW_KEYS
    assert view.health() == (True, [])
    assert view.ready() == (True, [])
    assert b"p2pdrl_" in view.metrics()
    assert view.events() is events
    for swarm in (False, True):
        await view.pause(paused=True, swarm=swarm)
        await view.pause(paused=False, swarm=swarm)
    assert held == [("node", True), ("node", False), ("swarm", True), ("swarm", False)]
    await view.leave()
    assert left == ["asked to"]
    assert view.config()["task"] == msgspec.to_builtins(training.task)
    assert b"secret" not in msgspec.json.encode(view.config())
    for act in (view.checkpoint, view.export):
        with pytest.raises(CheckpointError, match="no state yet"):
            await act()


async def test_without_file_descriptors_memory_is_left_out(figures, monkeypatch):
    assert figures.rss_bytes > 0

    def exhausted(_process):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("p2pdrl.node.status.reporter.psutil.Process.memory_info", exhausted)
    assert figures.report().rss_bytes == 0


@pytest.mark.parametrize(
    ("steps", "state", "greater"),
    [(799, "training", False), (801, "training", True), (801, "paused", True), (801, "fetching", False)],
)
def test_a_greater_lineage_is_seen_in_the_reports(full, figures, clock, steps, state, greater):
    other = tracker_of(11, 7)
    other.follow("cd" * 8)
    other.credit(Counts(steps, 1, 1))
    full.progress_tracker.merge_counts(counted(other))
    told = PeerReport(id=B, boot=1, seq=9, state=state, lineage="cd" * 8, mode_epoch=2**40)
    full.gossip.table.merge([said(told)], clock.monotonic())
    found = figures.greater_lineage()
    assert (found is not None) is greater
    if found is not None:
        assert found[:2] == (B, "cd" * 8)
    assert figures.newest_mode()[1] != B  # its mode is of another swarm
