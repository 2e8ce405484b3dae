"""Who has which updates: messages that everybody is to add exactly once. Pure.

Each node numbers its messages 1, 2, 3, …; an *origin* is a node and the boot it counts from. Everybody knows,
for each origin, the last number that its parameters contain (`StromLog.have`), and takes messages of an
origin in order only: what comes twice is passed over, what comes too early is sent again later. So losses,
repetitions and changes of order do no harm, and one number for each origin acknowledges all before it.

A node's parameters are a *base* and its own residual. The base is what the messages in ``have`` add up to,
from where its *history* began; two nodes of one history with equal ``have`` have equal bases. Who lacks
messages that nobody keeps any more (they are kept up to a bound), or comes anew, takes a member's base and
its ``have`` together, adds those of its own messages that this base lacks, and goes on.

Of two histories the greater counts; members of a lesser one take the greater one's base. A node begins a
history when nobody has one, and a greater one when a node that wants its base has messages in its own that
the giver lacks for good: as after a partition that was longer than the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from p2pdrl.errors import P2PDRLError

__all__ = ["GapError", "History", "MessageRun", "StromLog", "UpdateOrigin"]

MAX_ORIGINS = 384
"""Origins that are remembered: the newest of each node, and of the most recent nodes."""


class UpdateOrigin(NamedTuple):
    """A node, and the ``boot`` that it draws anew whenever it begins to count again."""

    node: str
    boot: str


class History(NamedTuple):
    """Which base; of two, the greater counts. ``era`` is 0 while nobody but its founder has it."""

    era: int
    founder: str


class MessageRun(NamedTuple):
    """Messages of one origin in a row, from number ``first`` on."""

    origin: UpdateOrigin
    first: int
    messages: tuple[bytes, ...]
    oldest: int
    """Number of the oldest one that the sender keeps."""


class GapError(P2PDRLError):
    """Messages are missing that the sender doesn't keep any more: only another base helps."""


class _Kept:
    """The newest messages of one origin."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.messages: deque[bytes] = deque()
        self.nbytes = 0

    def append(self, message: bytes, most_bytes: int) -> None:
        self.messages.append(message)
        self.nbytes += len(message)
        while self.nbytes > most_bytes and len(self.messages) > 1:
            self.nbytes -= len(self.messages.popleft())
            self.first += 1

    def after(self, number: int) -> list[bytes]:
        return list(self.messages)[max(number + 1 - self.first, 0) :]


class StromLog:
    """One node's messages, and what it knows of its peers.

    Args:
        boot: a name that this node never had before.
        window_bytes: messages kept of each origin, at least one.
    """

    def __init__(self, me: str, boot: str, window_bytes: int) -> None:
        self.own = UpdateOrigin(me, boot)
        self.history: History | None = None
        self.have: dict[UpdateOrigin, int] = {}
        self._window_bytes = window_bytes
        self._kept: dict[UpdateOrigin, _Kept] = {self.own: _Kept(1)}
        self._known: dict[str, dict[UpdateOrigin, int]] = {}

    @property
    def kept_bytes(self) -> int:
        """Length of all messages kept."""
        return sum(kept.nbytes for kept in self._kept.values())

    @property
    def oldest_own(self) -> int:
        """Number of our oldest message kept, or of the next one."""
        return self._kept[self.own].first

    def append(self, message: bytes) -> None:
        """Number a message of ours, which our parameters contain already."""
        self.have[self.own] = self.have.get(self.own, 0) + 1
        self._kept[self.own].append(message, self._window_bytes)

    # Sending

    def known(self, peer: str, have: Mapping[UpdateOrigin, int]) -> None:
        """A peer said what it has."""
        self._known.setdefault(peer, {}).update(have)

    def origins(self, *, relay: bool) -> list[UpdateOrigin]:
        """Whose messages we send."""
        return list(self.have) if relay else [self.own]

    def has_for(self, peer: str, *, relay: bool) -> bool:
        """Whether there is something to send to a peer, or to ask it."""
        if peer not in self._known:
            return True
        return bool(self.runs_for(peer, relay=relay, most_bytes=1, most=1))

    def forget(self, living: Collection[str]) -> None:
        """Keep nothing about peers that are gone."""
        for peer in [peer for peer in self._known if peer not in living]:
            del self._known[peer]

    def runs_for(self, peer: str, *, relay: bool, most_bytes: int, most: int) -> list[MessageRun]:
        """What is to be sent to a peer now; nothing before it has said what it has.

        Args:
            relay: whether to pass on others' messages too.
            most_bytes: length of all messages; one message may be longer.
            most: number of messages.
        """
        runs: list[MessageRun] = []
        if peer not in self._known:
            return runs
        for origin in self.origins(relay=relay):
            kept = self._kept.get(origin) or _Kept(self.have[origin] + 1)
            if most <= 0 or most_bytes <= 0:
                break
            if origin.node == peer:
                continue
            known = self._known[peer].get(origin, 0)
            chosen: list[bytes] = []
            for message in kept.after(known)[:most]:
                if (chosen or runs) and len(message) > most_bytes:
                    break
                most_bytes -= len(message)
                chosen.append(message)
            if chosen or kept.first > known + 1:  # without messages it says that they are lost here
                runs.append(MessageRun(origin, max(known + 1, kept.first), tuple(chosen), kept.first))
                most -= len(chosen)
        return runs

    # Receiving

    def new_in(self, run: MessageRun) -> Sequence[bytes]:
        """Which messages of a run are to be added now.

        Raises:
            GapError: one is missing that the sender has lost.
        """
        have = self.have.get(run.origin, 0)
        if run.origin == self.own:
            return ()
        if run.oldest > have + 1:
            raise GapError(f"{run.origin.node} keeps messages from {run.oldest} on, we have {have}")
        if run.first > have + 1:
            return ()
        return run.messages[have + 1 - run.first :]

    def added(self, run: MessageRun, *, relay: bool) -> None:
        """The new messages of a run are in our parameters now."""
        new = self.new_in(run)
        if not new:
            return
        have = self.have.pop(run.origin, 0)
        self.have[run.origin] = have + len(new)
        if relay:
            kept = self._kept.setdefault(run.origin, _Kept(have + 1))
            if kept.first + len(kept.messages) != have + 1:
                kept = self._kept[run.origin] = _Kept(have + 1)
            for message in new:
                kept.append(message, self._window_bytes)
        self._bound()

    # Bases

    def found(self, *, era: int) -> None:
        """Begin a history with what we have."""
        self.history = History(era, self.own.node)

    def contains(
        self, theirs: History | None, have: Mapping[UpdateOrigin, int], own: UpdateOrigin, oldest: int
    ) -> bool:
        """Say whether our base can be given as it is to somebody who wants it.

        When it can't, and what is missing doesn't come in time either, `found` a greater history first, so
        that nobody keeps a base that contains it.

        Args:
            theirs: its history; only within one does what it has count.
            have: what it has.
            own: its origin.
            oldest: the oldest message of its own that it keeps.
        """
        if theirs != self.history:
            return True
        for origin, number in have.items():
            ours = self.have.get(origin, 0)
            if number > ours and not (origin == own and oldest <= ours + 1):
                return False
        return True

    def take(self, history: History, have: Mapping[UpdateOrigin, int], boot: str) -> Sequence[bytes]:
        """Take another base; return messages of our own that are to be added to it.

        Args:
            history: the giver's.
            have: what it contains.
            boot: a new name, in case messages of ours are lost.
        """
        number = have.get(self.own, 0)
        own = self._kept[self.own]
        again: Sequence[bytes] = ()
        if own.first <= number + 1 <= own.first + len(own.messages):
            again = own.after(number)
            last = number + len(again)
        else:
            self.own = UpdateOrigin(self.own.node, boot)
            last = have.get(self.own, 0)
            own = _Kept(last + 1)
        self.history = history
        self.have = {origin: seen for origin, seen in have.items() if origin != self.own}
        self.have[self.own] = last
        self._kept = {self.own: own}
        self._known.clear()
        self._bound()
        return again

    def covers(self, origins: Iterable[UpdateOrigin]) -> dict[UpdateOrigin, int]:
        """What we have of each."""
        return {origin: self.have.get(origin, 0) for origin in origins}

    def _bound(self) -> None:
        while len(self.have) > MAX_ORIGINS:
            oldest = next(origin for origin in self.have if origin != self.own)
            del self.have[oldest]
            self._kept.pop(oldest, None)
