"""Every key is documented, and what is rendered reads back as what was meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.config import describe, schema
from p2pdrl.config.describe import all_keys, field_docs, render_toml, section_doc, toml_value
from p2pdrl.config.loader import resolve
from p2pdrl.config.node import NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import LocalConfig
from p2pdrl.config.task import A2CConfig, AlgorithmConfig, EnvConfig, PPOConfig, StopConfig, TaskConfig


def read(folder: Path, text: str) -> Any:
    path = folder / "c.toml"
    path.write_text(text, "utf-8")
    return resolve(files=[str(path)])


def test_every_key_and_section_has_a_meaning() -> None:
    assert [doc.key for doc in all_keys() if len(doc.doc) < 8] == []
    assert [doc.key for doc in all_keys() if "a value" in doc.takes] == []
    assert all(section_doc(struct) for struct in (TaskConfig, NodeConfig, PPOConfig, A2CConfig, LocalConfig))


def test_each_stop_condition_says_how_it_is_switched_off() -> None:
    docs = field_docs(StopConfig)
    assert all("; 0 switches it off" in docs[key] for key in ("env_steps", "time_s"))
    assert "0 is a goal here" in docs["mean_return"]
    assert '`"none"` switches it off' in docs["mean_return"]
    off = resolve(sets=["task.stop.mean_return=3", 'task.stop.mean_return="none"'])
    assert off.config.task.stop.mean_return is None


def test_keys_cover_the_schema() -> None:
    keys = {doc.key for doc in all_keys()}
    assert {schema.dotted(path) for path, _ in schema.leaves(Config())} <= keys
    algorithms = {str(struct.__struct_config__.tag) for struct in get_args(AlgorithmConfig)}
    assert {doc.variant for doc in all_keys() if doc.key == "task.algorithm.learning_rate"} == algorithms
    assert "task.algorithm.optimizer" in keys


def test_docs_in_one_line() -> None:
    docs = field_docs(PPOConfig)
    assert docs["discount"] == "γ: weight of the next step's return."
    assert not any("\n" in doc or "``" in doc for doc in docs.values())


def test_the_first_file_of_a_newcomer_sets_nothing(tmp_path: Path) -> None:
    resolved = read(tmp_path, render_toml())
    assert resolved.config == Config()
    assert resolved.given() == set()


def test_its_keys_can_be_uncommented(tmp_path: Path) -> None:
    text = render_toml()
    assert all(len(line) <= 100 for line in text.splitlines())
    defaults = text.replace("#[task.algorithm]", "#[other.algorithm]")
    kept, skip = [], False
    for line in defaults.splitlines():  # leave out the variants that weren't picked
        skip = line.startswith("#[") or (skip and not line.startswith("["))
        kept.append("" if skip else re.sub(r"^#(?=\w)", "", line))
    resolved = read(tmp_path, "\n".join(kept))
    assert resolved.config == Config()
    assert len(resolved.given()) == len(resolved.origins) - 1  # all but the empty kwargs


FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=8).filter(lambda text: text != "none")
SCALAR = st.booleans() | st.integers(-(2**63), 2**63 - 1) | FINITE | st.text(max_size=8)
CONFIGS = st.builds(
    Config,
    task=st.builds(
        TaskConfig,
        seed=st.integers(0, 2**31 - 1),
        env=st.builds(
            EnvConfig,
            id=st.text(max_size=8),
            kwargs=st.dictionaries(st.text(max_size=4), SCALAR, max_size=3),
            max_episode_steps=st.none() | st.integers(1, 10),
        ),
        algorithm=st.builds(
            PPOConfig, learning_rate=st.floats(0, 1), target_kl=st.none() | st.floats(1e-9, 1)
        )
        | st.builds(A2CConfig, rmsprop_eps=st.floats(1e-12, 1)),
        strategy=st.just(LocalConfig()) | st.just(TaskConfig().strategy),
        stop=st.builds(StopConfig, mean_return=st.none() | FINITE),
    ),
    node=st.builds(NodeConfig, name=st.none() | TEXT, peers=st.lists(TEXT, max_size=3).map(tuple)),
)


@given(CONFIGS, st.booleans())
@settings(max_examples=80, deadline=None)
def test_rendered_configurations_read_back(
    tmp_path_factory: pytest.TempPathFactory, config: Config, docs: bool
) -> None:
    text = render_toml(config, docs=docs, active=True)
    assert read(tmp_path_factory.mktemp("render"), text).config == config


def test_toml_values() -> None:
    assert toml_value(None) == '"none"'
    assert toml_value((1, 2.5, "a\n")) == '[1, 2.5, "a\\U0000000A"]'
    assert toml_value({"a b": True}) == '{"a b" = true}'
    assert toml_value({}) == "{}"


def test_without_source_there_are_no_meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Orphan(msgspec.Struct):
        """Not at the top of a module, so there is nothing to find."""

        a: int = 0

    assert section_doc(Orphan) == ""
    assert field_docs(Orphan) == {}

    def no_source(_: object) -> str:
        raise OSError("could not get source code")

    describe._documented.cache_clear()  # noqa: SLF001 - remembered for the process
    monkeypatch.setattr(describe.inspect, "getsource", no_source)
    try:
        assert "#seed = 0" in render_toml()
    finally:
        describe._documented.cache_clear()  # noqa: SLF001 - remembered for the process
