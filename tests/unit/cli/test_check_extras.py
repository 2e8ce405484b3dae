"""Each optional extra has something that tries it, and the table says what came of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "check_extras.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("check_extras", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_extras", module)
    spec.loader.exec_module(module)
    return module


def test_each_extra_is_tried(script):
    assert {*script.declared(), *script.PYTHONS} == set(script.USES)


def test_the_code_says_whether_one_failed(script, monkeypatch, capsys):
    results = {"video": "ok", "lan": "skip"}

    def check(extra, _base, _wheels, _folder):
        return script.Outcome(extra, results[extra], 3.0, 12.0, "because")

    monkeypatch.setattr(script, "check", check)
    monkeypatch.setattr(script, "build_wheel", lambda _into: Path("p2pdrl.whl"))
    monkeypatch.setattr(script, "make_environment", lambda _folder: Path("python"))
    monkeypatch.setattr(script, "install", lambda *_what: "")
    monkeypatch.setattr(sys, "argv", ["check_extras.py", "video", "lan"])
    assert script.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["extra", "result"], ["video", "ok"], ["lan", "skip"]]
    results["lan"] = "fail"
    assert script.main() == 1


def test_an_unknown_extra_is_named(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_extras.py", "vidoe"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert "no extra vidoe" in capsys.readouterr().err


def test_a_python_that_is_not_there_is_skipped(script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = script.check("python3.13", tmp_path, tmp_path, tmp_path / "x")
    assert (found.result, found.why) == ("skip", "it isn't on the path")


def test_what_the_index_lacks_is_skipped_and_what_breaks_fails(script, monkeypatch, tmp_path):
    folder = tmp_path / "extra"

    def made(path, _beneath=None):
        (path / "lib" / "python3" / "site-packages").mkdir(parents=True)
        return path / "bin" / "python"

    complaints = ["ERROR: No matching distribution found for ray", "ERROR: conflict"]
    monkeypatch.setattr(script, "make_environment", made)
    monkeypatch.setattr(script, "install", lambda *_what: complaints[0])
    assert script.check("ray", tmp_path, tmp_path, folder).result == "skip"
    complaints.pop(0)
    assert script.check("ray", tmp_path, tmp_path, tmp_path / "other").result == "fail"
