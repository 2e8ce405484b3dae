"""The page at ``/``: one self-contained file that shows the swarm's table.

It holds no data itself: its script fetches ``/v1/status`` and ``/v1/peers`` and shows every
text as text. The content security policy names script and style by their hashes, so nothing
else runs, and only this origin can be asked.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web

__all__ = ["Page", "load_page"]


class Page:
    """The page's file with the headers that belong to it."""

    def __init__(self, html: str) -> None:
        self.html = html
        self.headers = {
            "Content-Security-Policy": _policy(html),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cache-Control": "no-cache",
        }

    async def handle(self, _request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        return web.Response(text=self.html, content_type="text/html", headers=self.headers)


def load_page() -> Page:
    """Read the page from the installed package."""
    return Page(resources.files("p2pdrl.api").joinpath("page.html").read_text(encoding="utf-8"))


def _policy(html: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(html, 'script')}",
            f"style-src {_hashes(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(html: str, tag: str) -> str:
    """CSP level 2 §4.2.5: the hash is over the element's text, byte by byte."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
