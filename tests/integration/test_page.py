"""The page that a node serves, in a real browser."""

from __future__ import annotations

import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "<img src=x onerror=document.title='owned'>"


@pytest.mark.skipif(CHROMIUM is None, reason="wants Chromium (apt-get install chromium)")
def test_the_page_shows_the_swarm_and_names_only_as_text(swarm, tmp_path):
    node = swarm.start("page", "--set", f"node.name={EVIL}", "--set", "node.learner.max_updates_per_s=2")
    swarm.training(node)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={tmp_path}/browser", "--virtual-time-budget=8000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"http://{node.api}/"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "<title>owned" not in done.stdout
    assert "&lt;img src=x onerror" in done.stdout
    assert "<img src=x" not in done.stdout
    assert "training" in done.stdout
    assert "alive" in done.stdout
