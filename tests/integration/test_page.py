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
    page = shown(node, tmp_path)
    assert "<title>owned" not in page
    assert "&lt;img src=x onerror" in page
    assert "<img src=x" not in page
    assert "training" in page
    assert "alive" in page
    assert 'class="staged"' not in page


@pytest.mark.skipif(CHROMIUM is None, reason="wants Chromium (apt-get install chromium)")
def test_the_page_shows_who_holds_which_stage(swarm, wait_until, tmp_path):
    a = swarm.start("a", "--config=amb_pp", "--set=node.learner.max_updates_per_s=5")
    b = swarm.start("b", "--set=node.learner.max_updates_per_s=5", peers=a)
    wait_until(lambda: {row["stage"] for row in a.peers()} == {"1/2", "2/2"}, 60, "both hold a stage")
    page = shown(b, tmp_path)
    assert 'class="staged"' in page
    for words in ('<td class="stage">1/2</td>', '<td class="stage">2/2</td>'):
        assert words in page


def shown(node, tmp_path):
    """What the page's elements are, a while after a browser opened it."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={tmp_path}/browser", "--virtual-time-budget=8000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"http://{node.api}/"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
