"""What a child process says of the error that ends it. Called by `learner` and `actor`."""

from __future__ import annotations

import traceback

from p2pdrl.workers.protocol import Crashed

__all__ = ["crash_of"]

LONGEST_MESSAGE = 1000
"""Characters."""
LONGEST_TRACE = 6000
"""Characters; what came first is left out."""


def crash_of(error: BaseException) -> Crashed:
    """Describe ``error``, whatever it is: its own ``str`` may fail, and its text be as long as it likes."""
    seen = traceback.TracebackException.from_exception(error)
    last = seen.stack[-1] if seen.stack else None
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = "".join(seen.format()).rstrip("\n")
    if len(trace) > LONGEST_TRACE:
        tail = trace[-LONGEST_TRACE:]
        trace = tail.partition("\n")[2] or tail
    return Crashed(
        kind=_plain(name, LONGEST_MESSAGE),
        message=_plain(str(seen), LONGEST_MESSAGE),
        where="nowhere" if last is None else _plain(f"{last.filename}:{last.lineno} in {last.name}", 500),
        trace=_plain(trace, LONGEST_TRACE),
    )


def _plain(text: str, longest: int) -> str:
    """Return text that can be encoded, and no more than so much of it."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()
