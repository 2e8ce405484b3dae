"""How two of gloo's processes agree on who connects to whom: by their ports."""

from __future__ import annotations

import socket

__all__ = ["gloo_order", "low_port"]


def gloo_order(port: int) -> int:
    """Return what gloo compares of two ports on one host; the process with the greater one connects.

    It is the port in the network's byte order, read as a number of this (little-endian) machine.
    """
    return int.from_bytes(port.to_bytes(2, "big"), "little")


def low_port() -> int:
    """Return a free port that gloo takes for smaller than any that the system chooses by itself.

    Those are greater than 0x7fff, as they are usually.

    Raises:
        OSError: there is none.
    """
    for port in range(0x2000, 0x8000, 0x100):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port that gloo takes for a small one is free")
