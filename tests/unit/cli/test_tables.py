"""Numbers as people read them, and the tables they stand in."""

from __future__ import annotations

import io
import math

import pytest

from p2pdrl.cli import formats
from p2pdrl.cli.status import status_view, watch
from p2pdrl.cli.tables import (
    ADDRESSES,
    TRAINING,
    complaints,
    console,
    curve_rows,
    members_table,
    outcome,
    progress_line,
    shorten,
    sparkline,
    swarm_view,
)
from p2pdrl.errors import DaemonUnreachableError
from p2pdrl.testing.fake_node import FakeNode


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        (formats.count, 950, "950"), (formats.count, 12_345, "12.3k"), (formats.count, 999_999, "1M"),
        (formats.count, 4.56e9, "4.56G"), (formats.grouped, 1_234_567, "1,234,567"),
        (formats.fixed, 431.26, "431.3"),
        (formats.millis, 0.0021, "2.1 ms"), (formats.millis, 0.038, "38 ms"),
        (formats.percent, 0.254, "25%"),
        (formats.duration, 3723, "1:02:03"),
        (formats.age, 0.4, "0.4 s"), (formats.age, 90, "90 s"), (formats.age, 180, "3 min"),
        (formats.age, 7200, "2 h"), (formats.byte_size, 90.1e6, "90.1 MB"),
        (formats.scientific, 0.0123, "0.0123"),
        (formats.scientific, 1.234e-7, "1.23e-07"), (formats.byte_size, 12, "12 B"),
    ],
)  # fmt: skip
def test_formats(form, value, shown):
    assert form(value) == shown


@pytest.mark.parametrize(
    "form", [formats.count, formats.fixed, formats.millis, formats.duration, formats.age]
)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, "7", True, [1]])
def test_what_isnt_a_number_is_a_dash(form, value):
    assert form(value) == formats.NONE


def rendered(what):
    out = io.StringIO()
    console(out).print(what)
    return out.getvalue()


def test_version_lag_is_counted_from_the_newest():
    members = [{"name": "a", "policy_version": 10}, {"name": "b", "policy_version": 7}, {"name": "c"}]
    lines = rendered(members_table(members, ("name", "lag"))).splitlines()[2:]
    assert [line.split() for line in lines] == [["a", "0"], ["b", "3"], ["c", "–"]]


def test_a_crowd_with_long_names_keeps_to_100_columns():
    members = [
        {"name": "x" * 80, "state": "training", "mean_return": -1e5, "policy_version": n} for n in range(40)
    ]
    lines = rendered(members_table(members, TRAINING)).splitlines()
    assert len(lines) == 42
    assert max(map(len, lines)) <= 100


def test_stages_have_columns_of_their_own_where_there_are_any():
    members = [
        {"name": "a", "stage": "1/2", "bubble": 0.125},
        {"name": "b", "stage": "", "bubble": None},
    ]
    lines = [line.split() for line in rendered(members_table(members, ("name",))).splitlines()]
    assert lines == [["node", "stage", "bubble"], ["a", "1/2", "12%"], ["b", "–", "–"]]


def test_peers_of_a_pipeline_fit_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    members = [
        {
            "name": f"node-{n}", "address": f"127.0.0.1:793{n}", "state": "alive", "mean_return": 394.7,
            "steps_per_s": 5650.0, "policy_version": 9, "rtt_s": 0.0069, "last_seen_s": 0.5, "stage": "1/2",
            "bubble": 0.68, "consensus_distance": 0.00123, "env_steps": 10_000, "loop_lag_s": 0.02,
        }
        for n in range(3)
    ]  # fmt: skip
    members[2] |= {"stage": "", "role": "standby", "bubble": None}
    for columns in (ADDRESSES, TRAINING):
        lines = rendered(members_table(members, columns)).splitlines()
        assert max(map(len, lines)) <= 80
        assert "…" not in "".join(lines)


def test_a_rank_that_serves_another_shows_no_return_and_no_speed():
    members = [
        {
            "name": "a",
            "stage": "1/2",
            "collects": True,
            "mean_return": 21.0,
            "steps_per_s": 0.0,
            "env_steps": 0,
        },
        {"name": "b", "stage": "2/2", "collects": False, "steps_per_s": 0.0, "env_steps": 0},
        {"name": "c", "stage": "", "role": "standby", "collects": False, "steps_per_s": 0.0, "env_steps": 7},
        # The end of a run: its head has no order any more, and did train.
        {"name": "d", "stage": "", "collects": False, "mean_return": 9.0, "steps_per_s": 0.0, "env_steps": 8},
    ]
    table = rendered(members_table(members, ("name", "return", "rate", "steps")))
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["a", "21.0", "0", "0", "1/2", "–"],
        ["b", "–", "–", "–", "2/2", "–"],
        ["c", "–", "–", "7", "standby", "–"],
        ["d", "9.0", "0", "8", "–", "–"],
    ]


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"stage": "2/2"}, "it computes for the first rank of its pipeline"),
        ({"stage": "", "role": "standby"}, "it stands by"),
        ({"stage": "", "role": "forming"}, "over the last 100 of"),
    ],
)
def test_status_of_one_that_doesnt_train_says_so(more, shown):
    status = {**FakeNode().status(), "mean_return": None, "collects": False, "role": "", **more}
    text = " ".join(rendered(status_view(status)).split())
    assert f"return –, {shown}" in text or f"return – {shown}" in text
    training = text.partition(" training ")[2].partition(" learner")[0]
    own = "3k steps/s, 120,000 steps, 120 updates"
    assert training == (own if "over" in shown else "none of its own; 120,000 steps, 120 updates before")


@pytest.mark.parametrize(
    ("learner", "shown"),
    [
        ({"state": "starting", "starting_s": 75.0, "device": ""}, "learner starting for 0:01:15"),
        ({"state": "stopped", "stopped_s": 4.2, "restarts": 1}, "learner stopped for 0:00:04, 1 restarts"),
        (
            {
                "state": "down",
                "restarts": 2,
                "device": "cpu",
                "last_death": {"how": "died of E: \x1b[2J boom"},
            },
            "learner down on cpu, 2 restarts; the last one died of E: ?[2J boom",
        ),
    ],
)
def test_status_tells_how_the_learner_is(learner, shown):
    text = " ".join(rendered(status_view({**FakeNode().status(), "learner": learner})).split())
    assert shown in text


def test_columns_may_be_told_where_there_is_no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console(io.StringIO()).width == 100
    monkeypatch.setenv("COLUMNS", "72")
    assert console(io.StringIO()).width == 72


PIPELINE = {
    "rank": 1, "stage": [2, 4], "stages": 4, "schedule": "interleaved", "backend": "stream",
    "microbatches": 8.0, "bubble": 0.25, "activation_bytes": 1.5e6, "peers": ["n0", "n1"], "generation": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("pipeline", "shown"),
    [
        (
            PIPELINE,
            (
                "stage 2 and 4 of 4, interleaved over stream, 8 microbatches, bubble 25% measured here, "
                "1.5 MB of activations, with n0, n1; generation 3"
            ),
        ),
        (
            {**PIPELINE, "predicted_bubble": 0.336, "step_s": 0.0021, "predicted_step_s": 0.00114},
            (
                "stage 2 and 4 of 4, interleaved over stream, 8 microbatches, step 2.1 ms measured here, "
                "1.1 ms predicted, bubble 25% measured here, 34% predicted, 1.5 MB"
            ),
        ),
        ({"role": "stands by"}, "stands by"),
        (
            PIPELINE | {"rank": 0, "ranks": 1, "stage": [1], "stages": 1, "backend": "none"},
            "pipeline of one: computes alone; generation 3",
        ),
        (
            {"rank": 0, "alone": True, "why": "a pipeline would take 2 s"},
            "computes by itself: a pipeline would",
        ),
        ({}, "none"),
        ({"rank": 0, "stage": "x", "stages": [], "peers": 3}, "stage – of –"),
    ],
)
def test_status_shows_the_pipeline(pipeline, shown):
    text = " ".join(rendered(status_view({**FakeNode().status(), "pipeline": pipeline})).split())
    assert f"pipeline {shown}" in text


def test_status_shows_who_acts_for_a_pipeline():
    """A later rank with actors has steps of its own, and no returns."""
    pipeline = PIPELINE | {"experience": "its 1 actor works for rank 0"}
    more = {"pipeline": pipeline, "stage": "2/2", "collects": True, "mean_return": None}
    sent = {"sent": {"sent": 12, "env_steps": 240, "learner_name": "n0"}}
    text = " ".join(rendered(status_view({**FakeNode().status(), **more, "experience": sent})).split())
    assert "with n0, n1, its 1 actor works for rank 0; generation 3" in text
    assert "return –, it computes and acts for the first rank of its pipeline" in text
    assert "training 3k steps/s, 120,000 steps" in text


def test_status_shows_what_a_pipeline_cannot_be():
    pipeline = {"role": "standby", "limit": "task.strategy.stages: 4 stages need as many blocks"}
    text = " ".join(rendered(status_view({**FakeNode().status(), "pipeline": pipeline})).split())
    assert "limited task.strategy.stages: 4 stages need as many blocks" in text
    assert "limited" not in rendered(status_view({**FakeNode().status(), "pipeline": PIPELINE}))


ACTOR = {"running": True, "steps_per_s": 812.0, "restarts": 0, "dropped": 0}


@pytest.mark.parametrize(
    ("actors", "shown"),
    [
        ([ACTOR, ACTOR], "2 of 2, 812 + 812 steps/s"),
        (
            [ACTOR, {"running": False, "steps_per_s": 0.0, "restarts": 1, "dropped": 2}],
            "1 of 2, 812 + 0 steps/s, 1 restart, 2 half unrolls dropped",
        ),
        ([{}, "nonsense", *([ACTOR] * 20)], "20 of 21, – + 812"),
    ],
)
def test_status_shows_what_actors_do(actors, shown):
    text = " ".join(rendered(status_view({**FakeNode().status(), "actors": actors})).split())
    assert f"actors {shown}" in text


RECEIVED = [{"name": "a", "unrolls": 1200, "lost": 0}, {"name": "b", "unrolls": 4, "lost": 3}] * 2
SENT = {"learner_name": "n0", "sent": 812, "env_steps": 97_440}


@pytest.mark.parametrize(
    ("experience", "shown"),
    [
        ({"received": {"actors": RECEIVED}}, "actors: 2 of a, 2 of b; 2,408 unrolls came, 6 were lost"),
        ({"received": {"actors": []}}, "actors: nobody yet; 0 unrolls came"),
        ({"sent": SENT}, "sent 812 unrolls with 97,440 steps; works for n0"),
        ({"sent": {"learner_name": None, "sent": 0}}, "works for –"),
    ],
)
def test_status_shows_unrolls_that_travel(experience, shown):
    text = " ".join(rendered(status_view({**FakeNode().status(), "experience": experience})).split())
    assert shown in text


def test_roles_have_a_column_where_they_differ():
    members = FakeNode().peers()
    same = [member | {"roles": ["actor", "learner", "server"]} for member in members]
    assert "roles" not in rendered(members_table(same, TRAINING))
    told = [same[0] | {"roles": ["learner"]}, *(member | {"roles": ["actor"]} for member in same[1:])]
    lines = rendered(members_table(told, TRAINING)).splitlines()
    assert any(line.split()[:3] == ["node", "state", "roles"] for line in lines)
    assert [line.split()[2] for line in lines[-len(told) :]] == ["learner", *["actor"] * (len(told) - 1)]


@pytest.mark.parametrize("actors", [None, []])
def test_status_without_actors_has_no_such_line(actors):
    assert "actors" not in rendered(status_view({**FakeNode().status(), "actors": actors}))


def test_status_without_a_pipeline_has_no_such_line():
    assert "pipeline" not in rendered(status_view({**FakeNode().status(), "pipeline": None}))


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ({"env_steps": 960_000}, "25% of 960k steps  ·  0:02:00 left"),
        ({"time_s": 600.0}, "until 0:10:00"),
        ({"mean_return": 475.0}, "goal: return 475"),
        ({"reached": True, "reason": "240,000 steps are done"}, "done"),
        ({}, "adpsgd"),
    ],
)  # fmt: skip
def test_progress_tells_the_goal(stop, shown):
    assert progress_line({**FakeNode().status(), "evaluation": None, "stop": stop}).endswith(shown)


def test_progress_tells_the_newest_evaluation():
    assert progress_line(FakeNode().status()).endswith("evaluated: 400.0 at 100k steps")
    assert "400.0 ± 31.5 over 30 episodes at 100,000 steps, by node-1; best 400.0 at 100,000" in rendered(
        status_view(FakeNode().status())
    )
    assert "none yet" in rendered(status_view({**FakeNode().status(), "evaluation": None}))


def test_a_progress_line_is_broken_between_its_parts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stop = {"env_steps": 1_000_000, "mean_return": 475}
    status = {**FakeNode().status(), "stop": stop, "swarm_env_steps": 111_252, "swarm_steps_per_s": 1900.0}
    whole, printed = progress_line(status), rendered(swarm_view(status, []))
    lines = [line for line in printed.splitlines() if "steps" in line or "return" in line]
    assert max(map(len, lines)) <= 80
    parts = [part for line in lines for part in line.rstrip().split("  ·  ")]
    assert parts[: whole.count("·") + 1] == whole.split("  ·  ")


def test_why_it_stopped_has_a_line_of_its_own():
    status = {**FakeNode().status(), "stop": {"reached": True, "reason": "240,000 steps\x1b are over"}}
    assert rendered(swarm_view(status, [])).splitlines()[1] == "240,000 steps? are over"
    assert outcome(FakeNode().status()) == ""


def test_unwell_members_are_named_below_the_table():
    status = FakeNode().status()
    members = [{"name": "a", "state": "training", "healthy": False, "reasons": ["the disk is full"]}]
    text = rendered(swarm_view(status, members))
    assert "unwell" in text
    assert "a: the disk is full" in text
    assert complaints([{"name": "b", "state": "dead", "state_reason": "no answer"}]) == ["b: dead no answer"]


def test_watching_survives_a_node_that_goes_away(monkeypatch):
    answers = iter(["first", DaemonUnreachableError("gone"), "second", KeyboardInterrupt()])

    def show():
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr("p2pdrl.cli.status.time.sleep", lambda _s: None)
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        watch(show, console(out), 1.0)
    assert [line for line in out.getvalue().splitlines() if line] == ["first", "first", "gone", "second"]


def test_watching_a_node_that_never_was_fails_at_once():
    def show():
        raise DaemonUnreachableError("nobody")

    with pytest.raises(DaemonUnreachableError):
        watch(show, console(io.StringIO()), 1.0)


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([5, 5, 5], 10, "▁▁▁"),
        ([None, 0, math.nan, 7], 4, " ▁ █"),
        ([None, None], 4, ""),
        ([], 4, ""),
    ],
)
def test_sparklines(values, width, drawn):
    assert sparkline(values, width) == drawn


def test_top_draws_the_mean_return_and_the_speed():
    history = {
        "steps_per_s": [0.0, 1000.0, 2000.0],
        "nodes": {"a": {"mean_return": [None, 10.0, 20.0]}, "b": {"mean_return": [None, 30.0, 40.0]}, "c": 3},
    }
    assert curve_rows(history) == [
        ("return", " ▁█ 30.0 now, 20.0 to 30.0"),
        ("steps/s", "▁▅█ 2k now, 0 to 2k"),
    ]
    shown = rendered(swarm_view(FakeNode().status(), [], history=history))
    assert "▁▅█" in shown
    for odd in ({}, {"nodes": 3, "steps_per_s": "x"}, {"steps_per_s": [1.0], "nodes": {}}):
        assert curve_rows(odd) == []


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("worker-of-the-long-row-17", 13, "worker…row-17"),
        ("node-1", 8, "node-1"),
        ("训练节点训练节点", 9, "训练…节点"),
        ("训练节点训练节点", 8, "训…节点"),
        ("abcdef", 3, "a…f"),
    ],
)
def test_what_is_too_long_loses_its_middle(text, width, shown):
    assert shorten(text, width) == shown
