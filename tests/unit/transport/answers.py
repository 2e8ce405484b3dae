"""Answers to posts as bytes."""

from __future__ import annotations

from collections.abc import Callable

from p2pdrl.transport.http.headers import AnswerHead

from .liars import PEER

Change = Callable[[AnswerHead], AnswerHead]


def same(head: AnswerHead) -> AnswerHead:
    return head


def answered(
    meta: bytes = b"meta",
    vector: bytes = b"vector",
    *,
    change: Change = same,
    status: str = "200 OK",
    extra: str = "",
    body: Callable[[bytes], bytes] = lambda body: body,
) -> bytes:
    """An answer, right in all that isn't overridden."""
    head = change(AnswerHead(sender=PEER, meta_nbytes=len(meta), vector_nbytes=len(vector)))
    content = body(meta + vector)
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.to_headers().items())
    return f"HTTP/1.1 {status}\r\n{lines}{extra}Content-Length: {len(content)}\r\n\r\n".encode() + content


WRONG: dict[str, bytes] = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "endless header line": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    "other content type": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n",
    "no headers of ours": (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-p2pdrl\r\nContent-Length: 0\r\n\r\n"
    ),
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
}
"""What is no answer to any post."""
