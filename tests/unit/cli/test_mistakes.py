"""What people get wrong at first, and what they are told: the code, and the words that name the mend."""

from __future__ import annotations

import re
import subprocess

import pytest

from p2pdrl.api.keyfile import write_swarm_key
from p2pdrl.testing.fake_node import FakeNode, ServedNode

MISTAKES = [
    # the command
    ("nod", 2, "there is no command 'nod'; did you mean node?"),
    ("mode shwo", 2, "there is no command 'shwo'; did you mean show?"),
    ("status --jsn", 2, "there is no option --jsn; did you mean --json?"),
    ("status --api", 2, "--api wants a value behind it"),
    ("status --json=yes", 2, "--json takes no value: write it alone"),
    ("status now", 2, "'now' is more than this command takes"),
    ("peers ban", 2, "ID|NAME is missing"),
    ("swarm up", 2, "say how many nodes to start here (swarm up 4), or where: --hosts a,b"),
    ("export {ckpt}", 2, "--out FILE is missing"),
    ("completion tcsh", 2, "one of bash, fish, zsh, not 'tcsh'"),
    ("wait", 2, "--healthy N"),
    # numbers and words
    ("swarm up 0", 2, "N] takes a whole number from 1 to 64, not '0'"),
    ("swarm up two", 2, "N] takes a whole number from 1 to 64, not 'two'"),
    ("swarm up 2 --base-port 70000", 2, "--base-port takes a whole number from 1 to 65535"),
    ("status --interval 0", 2, "--interval takes a number of at least 0.1"),
    ("status --watch --interval nan", 2, "--interval takes a number of at least 0.1, not 'nan'"),
    ("wait --training 1 --timeout inf", 2, "--timeout takes a number of at least 0, not 'inf'"),
    ("pipeline trace --seconds nan", 2, "--seconds takes a number greater than 0 and at most 60, not 'nan'"),
    ("key rotate nothere.key --overlap nan", 2, "--overlap takes a number from 0.02 to 720, not 'nan'"),
    ("events --since -1", 2, "--since takes a whole number of at least 0"),
    ("rounds -n many", 2, "--last takes a whole number of at least 1, not 'many'"),
    ("node --log-level warn", 2, "did you mean warning?"),
    ("node --actors -2", 2, "node.actors.count = '-2' on the command line: must be an integer ≥ 0"),
    ("node --roles learnr", 2, "did you mean learner?"),
    ("roles set learnr", 2, "no role is called 'learnr'; did you mean learner?"),
    ("pipeline plan --stages 2 --microbatches 4 --forward-s a", 2, "give one number, or 2 with commas"),
    ("invite --expires never", 2, "write a number with s, m, h or d, such as 24h"),
    # addresses
    ("status --api {free}", 3, "start one with `p2pdrl node`, or name its address with --api"),
    ("status --api no-such-host.invalid", 3, "name its address with --api HOST:PORT"),
    ("status --api 127.0.0.1:99999", 2, "a port of 1-65535"),
    ("status --api a..b:7700", 2, "'a..b:7700' isn't an address: write HOST:PORT, or [IPV6]:PORT"),
    ("doctor --peers a..b", 2, "'a..b' isn't an address: write HOST:PORT, or [IPV6]:PORT"),
    ("doctor --listen a..b:1", 2, "'a..b:1' isn't an address: write HOST:PORT, or [IPV6]:PORT"),
    ("status --api {stranger}", 3, "isn't a p2pdrl node: name another address with --api"),
    ("node --peers 127.0.0.1:1;127.0.0.1:2", 2, "write HOST:PORT"),
    ("node --peers 7700", 2, "'7700' is a port alone: write HOST:PORT, such as 127.0.0.1:7700"),
    ("node --peers ,", 2, "--peers names nobody: write HOST:PORT behind it, or leave it away"),
    ("doctor --peers ,", 2, "--peers names nobody: write HOST:PORT behind it, or leave it away"),
    ("node --listen 8080", 2, "such as 127.0.0.1:8080"),
    ("node --listen 0.0.0.0:7700", 2, "make one with `p2pdrl keygen FILE`"),
    ("doctor --peers a:b", 2, "a port of 1-65535"),
    # the configuration
    ("node --config cartpoel", 2, "did you mean cartpole?"),
    ("node --config nothere.toml", 2, "`p2pdrl config init nothere.toml` writes a file of all keys"),
    ("config validate {bad_toml}", 2, "did you mean task.algorithm.learning_rate?"),
    ("config validate {broken_toml}", 2, "isn't valid TOML"),
    ("node --set task.algorithm.lr=0.1", 2, "did you mean task.algorithm.learning_rate?"),
    ("node --set task.algorithm.num_envs=4", 2, "is a key of another section: task.env.num_envs"),
    ("node --set total_timesteps=1e6", 2, "did you mean task.stop.env_steps?"),
    ("node --set task.algorithm.learning_rate=-1", 2, "must be a number ≥ 0"),
    ("node --set task.env.num_envs=many", 2, "must be an integer ≥ 1"),
    ("node --set novalue", 2, "isn't written KEY=VALUE, as in --set task.env.id=CartPole-v1"),
    ("node --set task.algorithm.name=pppo", 2, "did you mean ppo?"),
    ("node --set task.strategy.name=gossip", 2, "did you mean adpsgd?"),
    ("node --set task.env.id=LunarLander-v2", 2, "take LunarLander-v3"),
    ("mode set gosip", 2, "did you mean gossip?"),
    ("mode set adpsgd", 2, "write `mode set gossip --set protocol=adpsgd`"),
    ("stop set steps=1000", 2, "did you mean env_steps?"),
    ("stop set env_steps", 2, "as in env_steps=1000000"),
    # files, keys and invites
    ("eval", 2, "--api HOST:PORT"),
    ("eval nothere.safetensors", 2, "nodes keep theirs in DATA_DIR/checkpoints"),
    ("eval {folder}", 2, "is it a node's data folder"),
    ("eval {ckpt} --video film.avi", 2, "name it film.mp4"),
    ("export {ckpt} --out {folder}/no/x.onnx", 2, "make it, or name another"),
    ("config init {folder}/no/x.toml", 2, "name a file in a folder of yours"),
    ("keygen {folder}/no/x.key", 2, "name a file in a folder of yours"),
    ("keygen {key}", 2, "a key is never overwritten: name another file"),
    ("status --swarm-key-file nothere.key", 2, "`p2pdrl keygen nothere.key`"),
    ("status --swarm-key-file {open_key}", 2, "run `chmod 600 "),
    ("status --swarm-key-file {no_key}", 2, "copy the swarm's file again"),
    ("node --join hello", 2, "copy the whole line that `p2pdrl invite` prints"),
    ("operators add eve", 2, "`p2pdrl keygen --operator-only FILE`"),
    ("status --api {keyed}", 2, "--swarm-key-file FILE for any node of your swarm"),
    # the node refuses
    ("peers ban nobody --api {node}", 1, "nobody here is called nobody"),
    ("pause --api {shut}", 2, "try --data-dir FOLDER for a node of yours"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files, folders and nodes that mistakes are about."""
    folder = tmp_path_factory.mktemp("mistakes")
    files = {
        "ckpt": b"hello", "no_key": b"hello", "broken_toml": b"[task", "open_key": b"x",
        "bad_toml": b"[task.algorithm]\nlearning_rat = 0.1\n",
    }  # fmt: skip
    found = {"folder": folder, "key": folder / "good.key"}
    for name, content in files.items():
        found[name] = folder / name
        found[name].write_bytes(content)
        found[name].chmod(0o644 if name == "open_key" else 0o600)
    write_swarm_key(found["key"])
    (folder / "token").write_text("7" * 64)
    nodes = [
        ServedNode(FakeNode(data_dir=str(folder))), ServedNode(FakeNode(swarm_key=b"k" * 32)),
        ServedNode(FakeNode()),
    ]  # fmt: skip
    for node in nodes:
        node.__enter__()
    found |= {"node": nodes[0].address, "keyed": nodes[1].address, "shut": nodes[2].address}
    yield found
    for node in nodes:
        node.__exit__(None, None, None)


@pytest.fixture(scope="module")
def stranger():
    """Something else that speaks HTTP."""
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


FOREIGN = re.compile(
    r"Error:|Invalid value|No such option|is not in the range|Traceback|msgspec|ValidationError|Errno|"
    r"aiohttp|click\.|<class|object at 0x|Expected `|range\."
)
"""How libraries talk."""


@pytest.mark.parametrize(("line", "code", "mend"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_told_with_its_mend(
    p2pdrl, places, stranger, free_address, monkeypatch, tmp_path, line, code, mend
):
    def never(*_arguments, **_options):
        raise AssertionError("no process is started for a mistake that can be seen before")

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("P2PDRL_DATA_ROOT", str(tmp_path))
    here = {**places, "stranger": stranger, "free": free_address}
    result = p2pdrl(*(word.format(**here) for word in line.split()))
    assert result.exit_code == code, result.stderr
    assert mend in result.stderr
    assert not FOREIGN.search(result.stderr), result.stderr
    assert result.stderr.startswith("p2pdrl: ")
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_there_are_forty():
    assert len(MISTAKES) >= 40


def test_what_the_parser_says_elsewhere_is_left_as_it_is():
    import click

    from p2pdrl.cli.usage import explain, pointer

    assert explain(click.UsageError("give --a or --b")) == "give --a or --b"
    assert pointer(click.UsageError("give --a or --b")) == ""
    assert explain(click.BadParameter("no good")) == "no good"
    assert explain(click.MissingParameter()) == "something is missing"


@pytest.mark.parametrize(
    ("kind", "message", "told"),
    [
        (
            "FloatRange(0, 60, min_open=True)",
            "0.0 is not in the range 0<x<=60.",
            "greater than 0 and at most 60",
        ),
        ("FloatRange(max=1, max_open=True)", "1.0 is not in the range x<1.", "a number smaller than 1"),
        ("INT", "'x' is not a valid integer.", "--it takes a whole number, not 'x'"),
        ("FLOAT", "'x' is not a valid float.", "--it takes a number, not 'x'"),
        ("Path()", "Path 'x y' does not exist.", "--it: there is no x y"),
        ("Path()", "File 'x' is a directory.", "--it: x is a folder; name a file"),
        ("Path()", "Directory 'x' is a file.", "--it: x is a file; name a folder"),
        ("Path()", "File 'x' is not writable.", "--it: you may not write to x"),
        ("Path()", "File 'x' is not readable.", "--it: you may not read x"),
    ],
)
def test_types_are_told_in_words(kind, message, told):
    import click

    from p2pdrl.cli.usage import explain

    option = click.Option(["--it"], type=eval(f"click.{kind}"))
    assert told in explain(click.BadParameter(message, param=option))
