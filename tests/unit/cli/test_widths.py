"""Every table that a command prints, on narrow and wide terminals, with the longest that a swarm can tell."""

from __future__ import annotations

import io
import re

import click
import pytest
from rich.cells import cell_len

from p2pdrl.api.client import NodeClient
from p2pdrl.cli import doctor, evaluate, sweep, tables
from p2pdrl.cli.main import COMMANDS, LazyGroup, cli
from p2pdrl.library.sweep import SweepPlan, TrialRow
from p2pdrl.testing.fake_node import FakeNode

WIDTHS = (80, 120, 200)
NAMES = ("训练节点" * 16, "🚀" * 64, "worker-in-the-third-row-of-the-hall-" + "x" * 28, "ノード", "node 7")
STEPS = 123_456_789_012
REASON = "the learner died of want of memory, by ImportError"
STATES = ("alive", "suspect", "dead", "left", "banned")


def name(number):
    return f"{NAMES[number % 5][:61]}{number:03}"


def node_id(number):
    return f"{number * 2_654_435_761 % 2**32:08x}" * 4


def member(number):
    return {
        "name": name(number), "id": node_id(number), "self": number == 0, "state": STATES[number % 5],
        "address": f"[2001:db8:aaaa:bbbb:cccc:dddd:eeee:{number:x}]:65535", "mean_return": -1_234_567.25,
        "steps_per_s": 123_456.0, "env_steps": STEPS + number, "policy_version": STEPS - number,
        "consensus_distance": 1.234e-7, "loop_lag_s": 12.3, "rtt_s": 0.345, "last_seen_s": 70_000.0,
        "healthy": number % 5 == 1, "reasons": [REASON], "state_reason": "3 of 3 probes weren't answered",
        "pull_weight": 0.25, "reach": "outbound-only" if number % 2 else "direct",
        "relays": [name(1), name(2)], "roles": ["actor"] if number % 3 else ["learner", "replay", "server"],
        "exit_code": 137, "episodes_in_window": 1_000_000,
    }  # fmt: skip


MEMBERS = [member(number) for number in range(100)]
EVALUATION = {
    "env_steps": STEPS, "policy_version": STEPS, "mean": -1_234_567.25, "std": 123_456.5, "episodes": 10_000,
    "length": 1_000_000.0, "seconds": 360_000.0, "name": NAMES[0], "node": node_id(0),
}  # fmt: skip
STATUS = FakeNode(NAMES[0]).status() | {
    "id": node_id(0), "address": MEMBERS[0]["address"], "swarm_env_steps": STEPS, "env_steps": STEPS,
    "data_dir": "/srv/" + "a-folder/" * 20, "reasons": [REASON], "healthy": False, "members": {"alive": 100},
    "evaluation": {**EVALUATION, "best": EVALUATION, "count": 9}, "uptime_s": 10**7,
    "stop": {"reached": False, "env_steps": 10**13, "mean_return": 1e9, "time_s": 1e9, "window": 100},
    "reach": {"state": "outbound-only", "relays": [name(1)], "why": REASON, "relays_for": [name(2)] * 8},
    "commands": [{"key": "mode", "by": f"operator {NAMES[0]}", "at": 1.7e9}] * 8,
    "actors": [{"running": True, "steps_per_s": 12_345.0, "restarts": 3, "dropped": 7}] * 40,
    "pipeline": {
        "rank": 2, "stage": [3, 7], "stages": 64, "schedule": "interleaved", "backend": "stream",
        "microbatches": 1024, "step_s": 12.5, "bubble": 0.25, "generation": STEPS, "peers": list(NAMES),
        "limit": REASON,
    },
    "last_checkpoint": {"path": "/srv/" + "a-folder/" * 20 + "last.safetensors", "age_s": 9e5, "error": None},
}  # fmt: skip
ROUND = {
    "time": 1.7e9, "protocol": "reduce_scatter", "outcome": "timeout", "seconds": 123.4, "waited_s": 99.9,
    "merged": [{"name": name(number), "weight": 0.123456} for number in range(100)],
    "missing": [name(number) for number in range(100)], "bytes_in": 10**12, "bytes_out": 10**12,
    "changed": 1.234e-7, "error": REASON,
}  # fmt: skip
DOCUMENTS = {
    "/v1/status": STATUS,
    "/v1/peers": MEMBERS,
    "/v1/mode": {
        "mode": "gossip", "protocol": "reduce_scatter", "options": {"weight": 0.3}, "epoch": STEPS,
        "since": 1.7e9, "error": REASON, "record": {"epoch": 1, "proposer_name": NAMES[0], "at": 1.7e9},
        "facts": {"peers": list(NAMES), "why": REASON, "measured_step_s": 0.3},
        "members": [
            {"name": one["name"], "id": one["id"], "state": one["state"], "epoch": STEPS, "role": "standby",
             "protocol": "reduce_scatter", "follows": False} for one in MEMBERS
        ],
    },
    "/v1/rounds": [ROUND, ROUND | {"error": "", "merged": [], "missing": []}],
    "/v1/history": {
        "times": [1.0] * 480, "env_steps": [1] * 480, "steps_per_s": [float(n**2) for n in range(480)],
        "nodes": {
            one["id"]: {"name": one["name"], "mean_return": [None] * 9 + [1e6] * 471} for one in MEMBERS
        },
    },
    "/v1/evaluations": [EVALUATION] * 3,
    "/v1/invites": [
        {"id": "1a2b3c4d", "state": "used", "name": NAMES[0], "node": node_id(0), "used": 1.7e9,
         "roles": ["actor", "learner", "replay", "server"], "until": 1.8e9},
        {"id": "5a6b7c8d", "state": "open", "expires": 1.7e9},
    ],
    "/v1/records": {
        "operators": [{"name": NAMES[0][:32], "id": node_id(0), "root": True, "public_key": "ab" * 32}],
        "records": [],
    },
    "/v1/events?follow=0&since=0": [
        {"seq": 1, "time": 1.7e9, "kind": "learner died", "text": f"{NAMES[0]} at {STEPS:,}: {REASON}"}
    ],
}  # fmt: skip
CHECKS = [
    doctor.Check(f"peer {MEMBERS[0]['address']} dials back", "fail", REASON * 3, REASON * 3),
    doctor.Check("python", "ok", "3.11"),
]


@pytest.fixture
def printed(p2pdrl, monkeypatch, tmp_path):
    """Run a command on a terminal of that width, against a node that answers with `DOCUMENTS`."""
    monkeypatch.setattr(NodeClient, "get", lambda _self, path, **_options: DOCUMENTS[path])
    monkeypatch.setattr(doctor, "machine_checks", lambda *_arguments: CHECKS)
    monkeypatch.setattr("p2pdrl.cli.status.watch", lambda show, out, *_rest, **_options: out.print(show()))
    monkeypatch.chdir(tmp_path)

    def run(width, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        result = p2pdrl(*arguments)
        assert result.exit_code in (0, 4), result.stderr
        return result.stdout

    return run


def _console(width, what):
    out = io.StringIO()
    console = tables.console(out)
    console.width = width
    console.print(what)
    return out.getvalue()


def command(*arguments):
    return lambda width, run: run(width, *arguments)


def of_keys(width, run):
    run(width, "keygen", "swarm.key", "--name", "an-operator-with-a-long-name-as")
    return run(width, "key", "show", "swarm.key")


def of_rotated_keys(width, run):
    run(width, "keygen", "other.key")
    return run(width, "key", "rotate", "other.key")


def of_plan(width, run):
    return run(width, "pipeline", "plan", "--stages", "8", "--microbatches", "64")


SWEPT = ("learning_rate", "entropy_coefficient", "gae_lambda", "discount", "clip_ratio", "epochs")
RESULT = dict.fromkeys(("mean", "std", "median", "min", "max", "mean_length"), -1_234_567.25)
REPORT = {
    "env": "MiniGrid-DoorKey-16x16-v0", "policy_version": STEPS, "env_steps": STEPS, "sampled": RESULT,
    "greedy": RESULT, "video": {"path": "/srv/" + "a-folder/" * 20 + "film.mp4", "return": 1.0},
}  # fmt: skip
RANGES = {f"task.algorithm.{key}": "loguniform(1e-5,1e-2)" for key in SWEPT}
PLAN = SweepPlan(("cartpole",), (), RANGES, {}, STEPS, 3, "evaluation")
TRIALS = [
    TrialRow(
        number,
        state,
        dict.fromkeys(PLAN.ranges, "0.000123456789"),
        value=-1_234_567.25,
        part=0.5,
        seconds=1e6,
    )
    for number, state in enumerate(("running", "done", "pruned", "failed") * 25)
]
TABLES = {
    "sweep": lambda width, _run: _console(width, sweep.trials_table(PLAN, TRIALS)),
    "status": command("status"),
    "peers": command("peers"),
    "top": command("top"),
    "swarm up": lambda width, _run: (
        _console(width, tables.swarm_view(STATUS, MEMBERS, 10**6))
        + _console(width, tables.members_table(MEMBERS, tables.RESULTS))
    ),
    "mode show": command("mode", "show"),
    "roles show": command("roles", "show"),
    "stop show": command("stop", "show"),
    "rounds": command("rounds"),
    "events": command("events"),
    "eval": lambda width, run: (
        run(width, "eval", "--api", "127.0.0.1:1", "--history")
        + _console(width, evaluate.report_table(REPORT))
    ),
    "doctor": command("doctor"),
    "pipeline plan": of_plan,
    "invite list": command("invite", "list"),
    "key show": of_keys,
    "key rotate": of_rotated_keys,
    "operators list": command("operators", "list"),
    "presets": command("presets"),
    "presets --matrix": command("presets", "--matrix"),
    "presets show": command("presets", "show", "pong"),
    "config presets": command("config", "presets"),
    "config presets show": command("config", "presets", "show", "cartpole"),
    "config show --origin": command("config", "show", "--origin", "--config", "pong"),
}
"""By command: how its table is printed."""
LINES = {
    "node", "wait", "pause", "resume", "halt", "checkpoint", "leave", "export", "keygen", "completion",
    "page", "invite", "mode set", "roles set", "stop set", "pipeline trace", "invite revoke", "peers ban",
    "swarm down", "peers unban", "operators add", "operators remove", "config show", "config validate",
    "config init",
}  # fmt: skip
"""Commands that print a line, a log, a script or a file."""


PRINTED = {}
"""What was printed already, by command and width: each is rendered once."""


def table(words, width, run):
    if (words, width) not in PRINTED:
        PRINTED[words, width] = TABLES[words](width, run)
    return PRINTED[words, width]


def commands(group=None, path=()):
    """Every command that can be run, by its words."""
    for word in (group or LazyGroup()).list_commands(click.Context(cli)):
        found = (group or LazyGroup()).get_command(click.Context(cli), word)
        if isinstance(found, click.Group):
            yield from commands(found, (*path, word))
        if not isinstance(found, click.Group) or found.invoke_without_command:
            yield " ".join((*path, word)), found


def test_each_command_is_known_to_print_a_table_or_none():
    found = {words for words, _ in commands()}
    assert {words.partition(" --")[0] for words in TABLES} | LINES == found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", TABLES)
def test_no_line_is_wider_than_the_terminal(printed, words, width):
    text = table(words, width, printed)
    wide = [line for line in text.splitlines() if cell_len(line) > width]
    assert wide == []
    assert len(text.splitlines()) > 1
    # a number with its thousands never goes on in the next line
    numbers = re.findall(r"\d{1,3}(?:,\d{3})+", text)
    assert all(number.count(",") == 3 for number in numbers if number.startswith("123,"))


ROWS_OF_MEMBERS = ("peers", "top", "swarm up", "mode show", "roles show")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", ROWS_OF_MEMBERS)
def test_members_can_be_told_apart_and_their_states_read(printed, words, width):
    lines = table(words, width, printed).splitlines()
    shown = [one for one in MEMBERS if words != "roles show" or one["state"] == "alive"]
    for one in shown:
        rows = [line for line in lines if one["name"] in line or one["id"][:8] in line]
        assert rows, one["name"]
        assert words == "roles show" or any(
            one["state"] in row.split() or f"{one['state']}," in row for row in rows
        )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", ["status", "top", "swarm up", "mode show", "rounds", "events"])
def test_reasons_are_whole(printed, words, width):
    lines = table(words, width, printed).splitlines()
    if words == "rounds":  # in a column of its own
        told = " ".join(line[-14:] for line in lines)
        assert "memory" in told
        return
    assert REASON in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("words", ["peers", "rounds", "mode show", "eval", "operators list", "top"])
def test_wide_leaves_nothing_out(printed, words):
    arguments = {"eval": ["eval", "--api", "127.0.0.1:1", "--history"]}.get(words, words.split())
    narrow, wide = printed(80, *arguments), printed(80, *arguments, "--wide")
    if words != "eval":
        assert "no room for: " in narrow
    assert "no room for: " not in wide
    assert words in ("rounds", "operators list") or NAMES[0][:61] in wide
    assert "…" not in wide


def test_a_name_is_whole_where_there_is_room():
    one = [{"name": "node-1", "id": "ab" * 16, "state": "alive"}]
    assert "abababab" not in _console(80, tables.members_table(one, tables.TRAINING))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_colour_there_is_none(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for variable, escapes in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", variable)
        out = Terminal()
        tables.console(out).print(doctor.checks_table(CHECKS))
        assert bool(re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", out.getvalue())) == escapes


def test_a_dumb_terminal_gets_plain_text_of_its_width(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    tables.console(out).print(tables.members_table(MEMBERS, tables.TRAINING))
    assert "\x1b" not in out.getvalue()
    assert 100 < max(map(cell_len, out.getvalue().splitlines())) <= 120


def test_a_dumb_terminal_is_watched_picture_by_picture(monkeypatch):
    from p2pdrl.cli.status import watch

    monkeypatch.setenv("TERM", "dumb")
    shown = iter(["one", "two"])

    def show():
        try:
            return next(shown)
        except StopIteration:
            raise KeyboardInterrupt from None

    out = Terminal()
    with pytest.raises(KeyboardInterrupt):
        watch(show, tables.console(out), 0.0)
    assert out.getvalue() == "one\n\ntwo\n\n"


def test_help_of_all_commands_fits_80_columns(p2pdrl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words, _ in commands():
        lines = p2pdrl(*words.split(), "--help").stdout.splitlines()
        assert max(map(cell_len, lines)) <= 80, words


def test_every_command_is_looked_at():
    assert {words.split()[0] for words, _ in commands()} == set(COMMANDS)
