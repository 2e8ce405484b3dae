"""What tests of rounds share."""

from __future__ import annotations

import pytest

from .bowls import GRADIENTS, PARAMETERS

BOTH = pytest.mark.parametrize("config", [GRADIENTS, PARAMETERS], ids=["gradients", "parameters"])

CALM_S = 0.1
"""Time of an update where much time goes by."""
