"""When to restart a learner or an actor that died, and when to give up; and how it died, in words. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from p2pdrl.config.node import LearnerConfig
from p2pdrl.workers.protocol import Crashed

__all__ = ["Death", "RestartPolicy", "advice", "death_of", "wants_memory"]

LONG_LIFE_S = 60.0
"""After a life so long the shortest back-off counts again."""
FROM_OUTSIDE = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})
"""Signals that a person or a system short of memory sends, and no code of the learner's."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one process."""

    how: str
    """What it did, in words that follow "the learner"."""
    cause: str | None = None
    """What tells this end from another; None where it came from outside, which may be over by now."""
    code: int = 0
    """Its exit code; negative is the signal that ended it."""
    crash: Crashed | None = None
    """The error that ended it, where it could say so."""

    @property
    def document(self) -> dict[str, object] | None:
        """The error, in JSON types; None without one."""
        if self.crash is None:
            return None
        return {
            "type": self.crash.kind,
            "message": self.crash.message,
            "where": self.crash.where,
            "traceback": self.crash.trace,
        }


def death_of(
    code: int,
    *,
    crash: Crashed | None = None,
    failed: str | None = None,
    stood_still: str | None = None,
    late: bool = False,
) -> Death:
    """Say how a process died.

    Args:
        crash: the error that it said to die of.
        failed: why it said that it can't go on.
        stood_still: why we killed it, if we did.
        late: whether we killed it because it had hung up and hadn't ended.
    """
    if crash is not None:
        message = f": {crash.message}" if crash.message else ""
        want = "want of memory, by " if wants_memory(crash) else ""
        how = f"died of {want}{crash.kind}{message} (at {crash.where})"
        return Death(how, f"{crash.kind} at {crash.where}", code, crash)
    if failed is not None:
        return Death(f"failed: {failed}", failed, code)
    if stood_still is not None:
        return Death(f"was killed because {stood_still}", None, code)
    if late:
        return Death("hung up and didn't end, and was killed", "hung up", code)
    if code < 0:
        cause = None if -code in FROM_OUTSIDE else f"signal {-code}"
        return Death(f"was killed by signal {-code} ({_name(-code)})", cause, code)
    return Death(f"ended with code {code}", f"code {code}", code)


_REFUSED_MEMORY = (
    "failed to map segment from shared object",
    "cannot allocate memory",
    "can't allocate memory",
)
"""What the dynamic linker, the C library and torch say where the system gives no memory; in lower case."""


def wants_memory(crash: Crashed) -> bool:
    """Whether the error is that the system gave no more memory, or address space (``ulimit -v``)."""
    text = crash.message.lower()
    return crash.kind.endswith("MemoryError") or any(words in text for words in _REFUSED_MEMORY)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time one"


class RestartPolicy:
    """Exponential back-off between the restarts of one learner or actor, which ends where they are in vain.

    Args:
        who: is restarted, for people.
    """

    def __init__(self, config: LearnerConfig, who: str = "the learner") -> None:
        self._config = config
        self._who = who
        self._alike = 0
        self.in_a_row = 0
        """Deaths without a minute of life between."""
        self.last_death: Death | None = None

    def died(self, death: Death, lived_s: float) -> None:
        """Count the death of a process that had lived ``lived_s``."""
        brief = lived_s < LONG_LIFE_S
        again = brief and self.last_death is not None and self.last_death.cause == death.cause
        self._alike = 0 if death.cause is None else self._alike + 1 if again else 1
        self.in_a_row = self.in_a_row + 1 if brief else 0
        self.last_death = death

    def failed_to_start(self) -> None:
        """Count a restart that failed before there was a process."""
        self.in_a_row += 1

    @property
    def backoff_s(self) -> float:
        """The wait before the next restart."""
        doublings = min(max(self.in_a_row - 1, 0), 16)
        return min(self._config.restart_min_s * 2.0**doublings, self._config.restart_max_s)

    @property
    def give_up_reason(self) -> str | None:
        """Why another restart would end as the last ones did; None while it may not."""
        most = self._config.give_up_after
        if not most or self._alike < most or self.last_death is None:
            return None
        row = f"died {self._alike} times in a row in the same way, each within a minute: it "
        return f"{self._who} {row if most > 1 else ''}{self.last_death.how}. {advice(self.last_death)}"


def advice(death: Death) -> str:
    """Return what a person can do about it."""
    if death.crash is not None and wants_memory(death.crash):
        return (
            "Let the node have more memory (`ulimit -v`, the bound of its container, other programs), or "
            "need less: a smaller task.algorithm.buffer_size where there is a replay memory, a smaller batch "
            "or network, fewer actors (node.actors.count); then start it again: it goes on from its last "
            "checkpoint"
        )
    if death.crash is not None:
        return (
            "The traceback is in the log. If that is code of the environment, mend it there; then start "
            "this node again: it goes on from its last checkpoint"
        )
    return (
        "What it printed is in the log. Look there whether the environment or a library of its ended the "
        "process; then start this node again: it goes on from its last checkpoint"
    )
