"""The page: self-contained, under a policy that runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from p2pdrl.api.page import Page, load_page


@pytest.fixture
def html():
    return load_page().html


def test_the_policy_names_exactly_our_script_and_style(html):
    policy = load_page().headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    for tag in ["script", "style"]:
        [body] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_nothing_is_loaded_from_elsewhere_and_no_markup_is_made_of_text(html):
    assert not re.search(r"https?://|src=|@import|url\(", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(| style=| on\w+=\"", html)
    # attributes are set in one place, of shapes, and none is a handler or a link
    assert len(re.findall(r"setAttribute", html)) == 1
    assert not re.search(r"shape\([^)]*\b(on\w+|href|style)\"?:", html)


def test_it_is_small(html):
    assert len(html.encode()) < 60_000


def test_every_element_that_the_script_names_exists(html):
    names = set(re.findall(r'at\("(\w+)"\)', html))
    assert names
    assert names <= set(re.findall(r'id="(\w+)"', html))


def test_another_script_gets_another_hash():
    assert Page("<script>1</script>").headers != Page("<script>2</script>").headers
