"""What is measured before a model is cut: layers, the peers that will hold them, their links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from p2pdrl.errors import ConfigError

__all__ = ["FREE", "Layer", "Links", "Peer", "PeerLink", "check_links", "check_numbers", "link_between"]


class PeerLink(NamedTuple):
    """One direction between two peers.

    Attributes:
        latency_s: from the last byte's leaving to its arrival, while the next message may leave.
    """

    latency_s: float = 0.0
    bandwidth_bytes_s: float = math.inf

    def busy_s(self, size_bytes: float) -> float:
        """How long a message keeps the link from others."""
        return size_bytes / self.bandwidth_bytes_s

    def transfer_s(self, size_bytes: float) -> float:
        """How long a message takes from its beginning to its arrival."""
        return self.latency_s + self.busy_s(size_bytes)

    def check(self) -> None:
        """Raise a `ConfigError` for a negative latency or a bandwidth that isn't positive."""
        check_numbers("the latency of a link in seconds", [self.latency_s])
        if not self.bandwidth_bytes_s > 0:
            raise ConfigError(
                f"the bandwidth of a link must be positive, not {self.bandwidth_bytes_s} bytes/s"
            )


FREE = PeerLink()
"""Messages take no time."""

Links = PeerLink | Mapping[tuple[int, int], PeerLink]
"""The same for all, or of each (sender, receiver), which are ranks or the indices of peers."""


class Layer(NamedTuple):
    """One piece of the chain that is never cut, as measured on one device with one microbatch.

    Attributes:
        output_bytes: of its output as it travels if the chain is cut behind it.
        inner_bytes: beside that, what is kept between its forward and its backward. Its input isn't, which
            is the output of the layer before, nor are its parameters.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: float
    output_bytes: float
    inner_bytes: float = 0.0

    @property
    def kept_bytes(self) -> float:
        """All that is kept between its forward and its backward."""
        return self.output_bytes + self.inner_bytes

    def check(self) -> None:
        """Raise a `ConfigError` for a number that is negative or not finite."""
        check_numbers(f"the seconds and bytes of layer {self.name}", self[1:])


class Peer(NamedTuple):
    """A device that will hold one stage.

    Attributes:
        speed: how many times as fast as the device on which the layers were measured.
        memory_bytes: what a stage may take; without a limit by default.
    """

    name: str
    speed: float = 1.0
    memory_bytes: float = math.inf

    def check(self) -> None:
        """Raise a `ConfigError` for a speed that isn't positive or memory that is negative."""
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"the speed of peer {self.name} must be positive, not {self.speed}")
        if not self.memory_bytes >= 0:
            raise ConfigError(f"the memory of peer {self.name} can't be {self.memory_bytes} bytes")


def link_between(links: Links, sender: int, receiver: int) -> PeerLink:
    """The link of one direction."""
    if isinstance(links, PeerLink):
        return links
    if (sender, receiver) not in links:
        raise ConfigError(f"nothing is known about the link from {sender} to {receiver}")
    return links[sender, receiver]


def check_links(links: Links) -> None:
    """Raise a `ConfigError` for a link with bad numbers."""
    for link in [links] if isinstance(links, PeerLink) else links.values():
        link.check()


def check_numbers(what: str, numbers: Iterable[object]) -> None:
    """Raise a `ConfigError` that begins with ``what`` unless all are finite numbers from 0 on."""
    for number in numbers:
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ConfigError(f"{what} must be finite and not negative, not {number}")
