"""Where a configured value came from. Made by `loader`, shown by ``p2pdrl config show --origin``."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Kind", "Origin"]

Kind = Literal["flag", "set", "env", "file", "default"]
"""The sources, strongest first."""


class Origin(msgspec.Struct, frozen=True):
    """The source of one value.

    Attributes:
        kind: which sort of source.
        where: ``FILE:LINE`` of a file, ``preset NAME:LINE`` of a preset, the name of an environment
            variable; empty for the others.
    """

    kind: Kind
    where: str = ""

    def __str__(self) -> str:
        """The words for a table: ``file my.toml:3``, ``env P2PDRL_NODE__NAME``, ``flag``."""
        return f"{self.kind} {self.where}".rstrip()

    def phrase(self) -> str:
        """The words for a sentence: ``in my.toml:3``, ``in --set``."""
        match self.kind:
            case "file":
                return f"in {self.where}"
            case "env":
                return f"in the variable {self.where}"
            case "set":
                return "in --set"
            case "flag":
                return "on the command line"
            case "default":
                return "by default"
