"""Who may have how much at once: token buckets and handler slots per peer.

`http.server` asks here after a request proved authentic, so that a flood by one peer costs
others nothing; refusals of strangers are counted by host, and told more briefly when many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from p2pdrl.clock import Clock
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Refusal

__all__ = ["Admission", "TokenBuckets"]


class TokenBuckets:
    """A token bucket per key: ``rate_per_s`` on average, ``burst`` at once.

    Args:
        clock: monotonic time.
        rate_per_s: tokens that flow in per second.
        burst: tokens a full bucket holds.
        max_keys: keys remembered; the one unused for longest goes first, and starts full again.
    """

    def __init__(self, clock: Clock, rate_per_s: float, burst: float, max_keys: int = 4096) -> None:
        self._clock = clock
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> bool:
        """Take one token; False when the bucket is empty."""
        now_s = self._clock.monotonic()
        tokens, at_s = self._buckets.pop(key, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - at_s) * self._rate_per_s)
        allowed = tokens >= 1.0
        self._buckets[key] = (tokens - 1.0 if allowed else tokens, now_s)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return allowed


class Admission:
    """Decides whether one more request may run.

    Args:
        limits: rates and counts.
        clock: monotonic time.
    """

    def __init__(self, limits: TransportLimits, clock: Clock) -> None:
        self._limits = limits
        self._requests = TokenBuckets(clock, limits.requests_per_s, limits.requests_burst)
        self._failures = TokenBuckets(clock, limits.failures_per_s, limits.failures_burst)
        self._running: dict[str, int] = {}
        self._total = 0

    def tell_failure(self, host: str) -> bool:
        """Tell whether a refusal to ``host`` is still worth its reason; False asks for a 429."""
        return self._failures.take(host)

    @contextmanager
    def slot(self, peer: str) -> Iterator[None]:
        """Hold one of ``peer``'s handler slots.

        Raises:
            Refusal: 429, the peer sends too many or too fast, or all slots are taken.
        """
        if not self._requests.take(peer):
            raise Refusal(429, f"more than {self._limits.requests_per_s:g} requests per second: slow down")
        running = self._running.get(peer, 0)
        if running >= self._limits.max_requests_per_peer:
            raise Refusal(429, f"{running} of your requests are running already: wait for their answers")
        if self._total >= self._limits.max_requests:
            raise Refusal(429, f"{self._total} requests are running here: try again later")
        self._running[peer] = running + 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            if self._running[peer] == 1:
                del self._running[peer]
            else:
                self._running[peer] -= 1
