"""Log lines: text or JSON, without secrets, and without the cursor tricks of a peer's name."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.telemetry.logging import REDACTED, configure, get_logger, redact


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("p2pdrl")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    configure("info", "auto", stream)
    get_logger("p2pdrl.node").info("joined", peer="abc", rtt_s=0.25)
    [line] = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "event": "joined", "level": "info", "logger": "p2pdrl.node", "peer": "abc", "rtt_s": 0.25
    }  # fmt: skip


def test_text_at_a_terminal() -> None:
    stream = Terminal()
    configure("info", "auto", stream)
    get_logger("p2pdrl.node").warning("a peer left", peer="abc")
    assert "a peer left" in stream.getvalue()
    assert "abc" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_formats_can_be_forced() -> None:
    as_json, as_text = Terminal(), io.StringIO()
    configure(format="json", stream=as_json)
    get_logger("p2pdrl.x").info("one")
    configure(format="text", stream=as_text)
    get_logger("p2pdrl.x").info("two")
    assert [line["event"] for line in lines(as_json)] == ["one"]
    assert "two" in as_text.getvalue()
    assert "\x1b" not in as_text.getvalue()


@pytest.mark.parametrize(
    ("level", "own", "foreign"),
    [
        ("debug", ["debug", "info", "warning", "error"], ["info", "warning", "error"]),
        ("info", ["info", "warning", "error"], ["warning", "error"]),
        ("warning", ["warning", "error"], ["warning", "error"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_levels(level: Any, own: list[str], foreign: list[str]) -> None:
    stream = io.StringIO()
    configure(level, "json", stream)
    ours, theirs = get_logger("p2pdrl.a"), logging.getLogger("somebody.else")
    for name in ("debug", "info", "warning", "error"):
        getattr(ours, name)("ours")
        getattr(theirs, name)("theirs")
    assert [line["level"] for line in lines(stream) if line["event"] == "ours"] == own
    assert [line["level"] for line in lines(stream) if line["event"] == "theirs"] == foreign


def test_a_logger_made_before_configure_obeys_it() -> None:
    log = get_logger("p2pdrl.early").bind(node="n1")
    stream = io.StringIO()
    configure("info", "json", stream)
    log.debug("hidden")
    log.info("shown")
    assert [(line["event"], line["node"]) for line in lines(stream)] == [("shown", "n1")]


def test_foreign_lines_pass_the_same_processors() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    logging.getLogger("aiohttp.server").error("broken %s", "pipe", extra={"auth_token": "t0p", "n": 1})
    [line] = lines(stream)
    assert line["event"] == "broken pipe"
    assert (line["auth_token"], line["n"], line["logger"]) == (REDACTED, 1, "aiohttp.server")


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_not_written(form: Any) -> None:
    stream = io.StringIO()
    configure("info", form, stream)

    def fail() -> None:
        swarm_key = "hunter2-local"
        raise RuntimeError(f"failed with {len(swarm_key)}")

    log = get_logger("p2pdrl.secrets")
    log.info(
        "started",
        swarm_key="hunter2",
        Token="hunter2",
        nested={"deep": [{"API_SECRET": "hunter2"}], "password": "hunter2"},
        raw=b"hunter2",
        view=memoryview(b"hunter2"),
        rows=[(b"hunter2",)],
    )
    try:
        fail()
    except RuntimeError:
        log.exception("it failed")
    text = stream.getvalue()
    assert "hunter2" not in text
    assert REDACTED in text
    assert "7 bytes" in text
    assert "RuntimeError: failed with 13" in text
    assert "Traceback" in text


NESTED = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["a", "key", "b"]), NESTED), st.lists(st.sampled_from("abc"), max_size=9)
)
def test_redaction_reaches_every_depth_and_alters_nothing_of_the_callers(
    event: dict[str, Any], path: list[str]
) -> None:
    buried: Any = {"my_token": "S3CRET"}
    for name in path:
        buried = {name: buried}
    snapshot = repr(buried)
    found = redact(None, "info", {**event, "buried": buried})
    assert "S3CRET" not in repr(found)
    assert repr(buried) == snapshot


def test_a_peers_name_cannot_move_the_cursor() -> None:
    stream = io.StringIO()
    configure("info", "text", stream)
    get_logger("p2pdrl.x").info(
        "joined \x1b[2J", name="evil\n2026 [error] forged\x1b[31m", names=["\x1b[0m"], more={"\x9b": 1}
    )
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert "\x9b" not in stream.getvalue()
    assert "n2026 [error] forged" in stream.getvalue()


def test_json_lines_stay_lines() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    get_logger("p2pdrl.x").info("a\nb\u2028c\x85", odd=object(), path={1, 2})
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().isascii()


UNCAUGHT = """
import asyncio, logging, threading
from p2pdrl.telemetry.logging import configure, get_logger
configure("info", "json")

def fail():
    raise RuntimeError("two\\nlines")

async def lose():
    asyncio.get_running_loop().create_task(fails())
    await asyncio.sleep(0)
    await asyncio.sleep(0)

async def fails():
    fail()

try:
    fail()
except RuntimeError:
    get_logger("p2pdrl.x").exception("caught")
thread = threading.Thread(target=fail, name="a thread")
thread.start()
thread.join()
asyncio.run(lose())
try:
    fail()
except RuntimeError as error:
    raise ExceptionGroup("group", [error, ValueError("another")]) from error
"""


def test_as_json_each_traceback_is_one_record() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert [record["event"].partition("\n")[0] for record in records] == [
        "caught",
        "an error that nobody caught ends a thread",
        "Task exception was never retrieved",
        "an error that nobody caught ends this process",
    ]
    for record in records:
        assert "RuntimeError: two\nlines" in record["exception"]
        assert record["level"] == "error"
    assert records[1]["thread"] == "a thread"
    assert "ValueError: another" in records[3]["exception"]


def test_configuring_twice_writes_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure(stream=first)
    configure(stream=second)
    get_logger("p2pdrl.x").info("one")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
