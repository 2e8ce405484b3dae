"""The loader: precedence, origins, variants, and messages that a person can act on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.config import schema
from p2pdrl.config.describe import all_keys
from p2pdrl.config.loader import Resolved, resolve
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import LocalConfig
from p2pdrl.config.task import A2CConfig, PPOConfig
from p2pdrl.errors import ConfigError

A2C_FILE = '[task.algorithm]\nname = "a2c"\noptimizer = "adam"\nlearning_rate = 3e-4\n'
PPO_FILE = '# my task\n[task.algorithm]\nname = "ppo"\nepochs = 7\nlearning_rate = 2e-4\n'


def write(folder: Path, text: str, name: str = "my.toml") -> str:
    path = folder / name
    path.write_text(text, "utf-8")
    return str(path)


def complaint(**sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**sources)  # type: ignore[arg-type]
    return str(caught.value)


def test_nothing_given_is_the_default_task() -> None:
    resolved = resolve()
    assert resolved.config == Config()
    assert resolved.given() == set()
    assert {str(origin) for origin in resolved.origins.values()} == {"default"}


def test_origins_cover_every_value() -> None:
    resolved = resolve(sets=["task.env.kwargs={a=1, b=true}"])
    assert set(resolved.origins) == {schema.dotted(path) for path, _ in schema.leaves(resolved.config)}
    assert {"task.env.kwargs.a", "task.env.kwargs.b"} <= set(resolved.origins)
    assert "task.env.kwargs" in resolve().origins


LAYERS = ("file", "file2", "env", "set", "flag")


@given(st.sets(st.sampled_from(LAYERS)))
@settings(max_examples=32, deadline=None)
def test_the_strongest_source_counts(tmp_path_factory: pytest.TempPathFactory, used: set[str]) -> None:
    folder = tmp_path_factory.mktemp("layers")
    files = [
        write(folder, f"[task.env]\nnum_envs = {number}\n", f"{number}.toml")
        for number, layer in enumerate(("file", "file2"), start=1)
        if layer in used
    ]
    resolved = resolve(
        files=files,
        environ={"P2PDRL_TASK__ENV__NUM_ENVS": "3", "PATH": "/bin"} if "env" in used else {},
        sets=["task.env.num_envs=4"] if "set" in used else [],
        flags={"task.env.num_envs": 5 if "flag" in used else None},
    )
    strongest = max((LAYERS.index(layer) + 1 for layer in used), default=8)
    assert resolved.config.task.env.num_envs == strongest
    assert resolved.given("task") == ({"task.env.num_envs"} if used else set())


def test_where_values_come_from(tmp_path: Path) -> None:
    file = write(tmp_path, '# note\n\n[task.env]\nid = "Acrobot-v1"  # other\nkwargs = { x = 1 }\n')
    resolved = resolve(
        files=["ppo", file],
        environ={"P2PDRL_NODE__NAME": "n1", "P2PDRL_TOKEN": "secret", "P2PDRL_API": "http://x"},
        sets=["task.seed=4"],
        flags={"node.listen": "0.0.0.0:7700", "node.data_dir": None},
    )
    origins = resolved.origins
    assert str(origins["task.env.id"]) == f"file {file}:4"
    assert str(origins["task.env.kwargs.x"]) == f"file {file}:5"
    assert str(origins["task.algorithm.clip"]).startswith("file preset ppo:")
    assert str(origins["node.name"]) == "env P2PDRL_NODE__NAME"
    assert str(origins["task.seed"]) == "set"
    assert str(origins["node.listen"]) == "flag"
    assert resolved.given("node") == {"node.name", "node.listen"}
    assert resolved.given("task.seed") == {"task.seed"}
    assert resolved.given("task.see") == set()


def test_lines_are_not_fooled_by_text_of_several_lines(tmp_path: Path) -> None:
    text = '[task.env.kwargs]\na = """\n[node]\nb = 2\n"""\n"c d" = 3\n'
    resolved = resolve(files=[write(tmp_path, text)])
    assert resolved.config.task.env.kwargs == {"a": "[node]\nb = 2\n", "c d": 3}
    assert resolved.origins['task.env.kwargs."c d"'].where.endswith(":6")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("task.stop.env_steps=1e6", 1_000_000),
        ("task.stop.mean_return=475", 475.0),
        ("task.stop.mean_return=none", None),
        ("task.network.hidden=32,16", (32, 16)),
        ("task.network.hidden=[32, 16]", (32, 16)),
        ("task.network.hidden=32", (32,)),
        ("task.network.hidden=", ()),
        ("node.peers=a:1,b:2", ("a:1", "b:2")),
        ('node.peers=["a:1"]', ("a:1",)),
        ("node.peers=a:1", ("a:1",)),
        ("node.insecure=1", True),
        ("node.insecure=True", True),
        ("node.insecure=false", False),
        ("node.name=123", "123"),
        ("node.name=1e5", "1e5"),
        ("node.name=true", "true"),
        ("node.name=2024-01-01", "2024-01-01"),
        ('node.name="a b"', "a b"),
        ("node.name=a=b", "a=b"),
        ("node.name=x\ny = 1", "x\ny = 1"),
        ("node.learner.device=cuda:1", "cuda:1"),
        ("task.env.kwargs.mode=hard", "hard"),
        ("task.env.kwargs.mode=2", 2),
    ],
)
def test_text_values(text: str, value: object) -> None:
    resolved = resolve(sets=[text])
    [key] = resolved.given() or ["task.env.kwargs"]
    found: object = resolved.config
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_flags_are_taken_as_they_are() -> None:
    flags = {"node.name": "123", "node.peers": ("a:1",), "task.env.kwargs": {"a": 1}, "task.stop.time_s": 60}
    config = resolve(flags=flags).config
    assert (config.node.name, config.node.peers) == ("123", ("a:1",))
    assert config.task.env.kwargs == {"a": 1}
    assert config.task.stop.time_s == 60.0
    assert resolve(flags={"node.name": '"quoted"'}).config.node.name == '"quoted"'
    assert resolve(flags={"task.stop.env_steps": "1e6"}).config.task.stop.env_steps == 1_000_000


def test_open_sections_merge_key_by_key(tmp_path: Path) -> None:
    file = write(tmp_path, "[task.env.kwargs]\na = 1\nb = 2\n")
    assert resolve(files=[file], sets=["task.env.kwargs.b=3"]).config.task.env.kwargs == {"a": 1, "b": 3}


# Variants


def test_another_variant_drops_what_weaker_layers_set_for_the_first(tmp_path: Path) -> None:
    resolved = resolve(files=[write(tmp_path, PPO_FILE)], sets=["task.algorithm.name=a2c"])
    assert resolved.config.task.algorithm == A2CConfig()
    assert resolved.given() == {"task.algorithm.name"}


def test_the_same_variant_drops_nothing(tmp_path: Path) -> None:
    resolved = resolve(files=[write(tmp_path, PPO_FILE)], sets=['task.algorithm.name="ppo"'])
    assert resolved.config.task.algorithm == PPOConfig(epochs=7, learning_rate=2e-4)
    assert str(resolved.origins["task.algorithm.name"]) == "set"


def test_a_file_over_a_file_of_another_variant(tmp_path: Path) -> None:
    files = [write(tmp_path, PPO_FILE, "ppo.toml"), write(tmp_path, A2C_FILE, "a2c.toml")]
    assert resolve(files=files).config.task.algorithm == A2CConfig(optimizer="adam", learning_rate=3e-4)
    back = resolve(files=[*files, files[0]]).config.task.algorithm
    assert back == PPOConfig(epochs=7, learning_rate=2e-4)


@pytest.mark.parametrize("name_is_flag", [True, False])
def test_flags_and_sets_of_one_command_line_belong_together(tmp_path: Path, name_is_flag: bool) -> None:
    key, other = "task.algorithm.name", "task.algorithm.unroll_steps"
    resolved = resolve(
        files=[write(tmp_path, PPO_FILE)],
        flags={key: "a2c"} if name_is_flag else {other: 9},
        sets=[f"{other}=9"] if name_is_flag else [f'{key}="a2c"'],
    )
    assert resolved.config.task.algorithm == A2CConfig(unroll_steps=9)


def test_order_within_one_layer_does_not_matter() -> None:
    resolved = resolve(sets=["task.algorithm.optimizer=adam", "task.algorithm.name=a2c"])
    assert resolved.config.task.algorithm == A2CConfig(optimizer="adam")


def test_the_local_strategy_has_no_keys_of_its_own() -> None:
    resolved = resolve(
        environ={"P2PDRL_TASK__STRATEGY__WEIGHT": "0.1"}, flags={"task.strategy.name": "local"}
    )
    assert resolved.config.task.strategy == LocalConfig()
    assert resolved.given() == {"task.strategy.name"}


# Messages


def test_unknown_keys_name_file_line_and_neighbour(tmp_path: Path) -> None:
    file = write(tmp_path, '[task.env]\nidd = "x"\n')
    assert complaint(files=[file]) == f"unknown key task.env.idd in {file}:2; did you mean task.env.id?"


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"sets": ["env.id=x"]}, ["unknown key env.id in --set", "did you mean task.env.id?"]),
        ({"sets": ["foo=x"]}, ["unknown key foo", "config show"]),
        ({"sets": ["task.env.colour=x"]}, ["task.env has id, kwargs, num_envs"]),
        ({"sets": ["task.algorithm.optimizer=adam"]}, ["task.algorithm.name = a2c", "is ppo here"]),
        ({"sets": ["task.algorithm=a2c"]}, ["did you mean task.algorithm.name?"]),
        ({"sets": ["task=1"]}, ["task is a section"]),
        ({"sets": ["task.env.kwargs=1"]}, ["task.env.kwargs is a section"]),
        ({"sets": ["task.seed.x=1"]}, ["unknown key task.seed.x"]),
        ({"sets": ["task.env.kwargs.a=[1]"]}, ["task.env.kwargs.a", "true or false, an integer"]),
        ({"sets": ["task.env.num_envs=0"]}, ["task.env.num_envs", "in --set", "an integer ≥ 1 and ≤ 4096"]),
        ({"sets": ["task.env.num_envs=1.5"]}, ["an integer ≥ 1"]),
        ({"sets": ["task.strategy.weight=0.6"]}, ["a number > 0 and ≤ 0.5"]),
        ({"sets": ["node.membership=moon"]}, ["'moon'", "one of lan, wan"]),
        ({"sets": ["task.algorithm.name=trpo"]}, ["'trpo'", "one of ppo, a2c"]),
        ({"sets": ["task.stop.mean_return=nan"]}, ["a finite number"]),
        ({"sets": ["task.stop.time_s=inf"]}, ["a finite number"]),
        ({"sets": ["task.stop.env_steps=9223372036854775808"]}, ["64 bits"]),
        ({"sets": ["task.env.kwargs.a=-9223372036854775809"]}, ["64 bits"]),
        ({"sets": ["no equals"]}, ["KEY=VALUE"]),
        ({"sets": ["=5"]}, ["KEY=VALUE"]),
        ({"sets": ["a..b=5"]}, ["KEY=VALUE"]),
        ({"environ": {"P2PDRL_TAKS__ENV__ID": "x"}}, ["variable P2PDRL_TAKS__ENV__ID", "task.env.id?"]),
        ({"environ": {"P2PDRL_NODE__NAME": "a\udcff"}}, ["node.name", "UTF-8"]),
        ({"flags": {"task.seed": -1}}, ["task.seed = -1 on the command line", "≥ 0"]),
        ({"sets": [f"node.membership={'x' * 500}"]}, ["…"]),
        ({"sets": ["task.env.kwargs.a=" + "[" * 5000]}, []),
        ({"files": ["no-such-preset"]}, ["no preset is named", "cartpole"]),
        ({"files": ["cartpol"]}, ["did you mean cartpole?"]),
        ({"files": ["/nowhere/a.toml"]}, ["/nowhere/a.toml", "No such file"]),
        ({"files": ["/"]}, ["can't read"]),
        ({"files": ["a\0.toml"]}, []),
    ],
)
def test_complaints(sources: dict[str, object], words: list[str]) -> None:
    if sources.get("sets") == ["task.env.kwargs.a=" + "[" * 5000]:
        assert resolve(**sources).config.task.env.kwargs["a"].startswith("[[")  # type: ignore[arg-type]
        return
    message = complaint(**sources)
    assert all(word in message for word in words), message
    assert len(message) < 700


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, '[task]\nseed = "x"\n[node.learner]\nthread = 2\n')
    message = complaint(files=[file], sets=["node.insecure=maybe"])
    assert message.startswith("3 problems in the configuration:\n  ")
    assert "task.seed = 'x'" in message
    assert "node.learner.threads?" in message
    assert "true or false" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = ", "isn't valid TOML"),
        (f"a = {'9' * 5000}", "isn't valid TOML"),
        ("a = " + "[" * 3000 + "]" * 3000, "too deep"),
        ("[[task.env]]\nid = 1\n", "task.env is a section"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: str) -> None:
    assert words in complaint(files=[write(tmp_path, text)])


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_bytes(b"a = \xff\xfe")
    assert "isn't UTF-8" in complaint(files=[str(tmp_path / "b.toml")])


def test_a_file_without_an_ending_is_found_when_no_preset_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "task.seed = 5\n", "mine")
    assert resolve(files=["mine"]).config.task.seed == 5


@pytest.mark.parametrize("name", ["cartpole", "ppo"])
def test_a_preset_is_preferred_to_a_file_of_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "task.seed = 5\n", name)
    assert resolve(files=[name]).config.task.seed == 0


KEYS = [doc.key for doc in all_keys()]


@given(st.sampled_from([*KEYS, "task", "node", "task.env.kwargs.a", "x"]), st.text())
@settings(max_examples=300, deadline=None)
def test_no_text_does_worse_than_a_complaint(key: str, text: str) -> None:
    results: list[Resolved | None] = []
    variable = "P2PDRL_" + key.upper().replace(".", "__")
    for sources in ({"sets": [f"{key}={text}"]}, {"environ": {variable: text}}, {"flags": {key: text}}):
        try:
            results.append(resolve(**sources))  # type: ignore[arg-type]
        except ConfigError:
            results.append(None)
    if "." in key and results[0] is not None:
        assert results[1] is not None
        assert results[0].config == results[1].config


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_file_does_worse_than_a_complaint(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f.toml"
    path.write_bytes(data)
    try:
        resolve(files=[str(path)])
    except ConfigError:
        pass


def test_the_loader_imports_little() -> None:
    code = (
        "import sys; import p2pdrl.config.loader; "
        "print([m for m in ('difflib', 'numpy', 'torch', 'structlog', 'aiohttp') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
