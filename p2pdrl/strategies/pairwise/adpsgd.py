"""With whom to begin an exchange: the pure core of AD-PSGD.

Asynchronous decentralized parallel SGD (Lian 2018, arXiv 1710.06952, algorithm 1): a node
averages with one partner at a time while its learner goes on. An exchange is refused, not
queued, while another one runs, so no circle of waiting nodes can form.

Called by `gossip`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.strategies.occasions import COOL_MAX_S, Occasions
from p2pdrl.strategies.topology import candidates

__all__ = ["COOL_MAX_S", "AdpsgdCore"]


class AdpsgdCore(Occasions):
    """Timing (see `Occasions`), choice of partners, and what the next exchange is about.

    Args:
        config: the strategy's options.
        me: own node id.
        rng: source of the random choices.
    """

    def __init__(self, config: AdpsgdConfig, me: str, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._config = config
        self._me = me
        self._gradients_in_a_row = 0

    def choose(self, alive: Iterable[str], now_s: float) -> str | None:
        """Return the partner of the next exchange, or None while nobody is fit.

        Members that lately failed to answer are passed over for a while.
        """
        return self.choose_among(candidates(self._config.partners, self._me, alive), now_s)

    def choose_among(self, peers: Iterable[str], now_s: float) -> str | None:
        """The same for peers that are candidates already."""
        fit = self.fit(peers, now_s)
        return self._rng.choice(fit) if fit else None

    @property
    def gradients_next(self) -> bool:
        """Whether the next exchange that we begin averages gradients."""
        config = self._config
        return config.exchanges == "gradients" and self._gradients_in_a_row < config.parameters_every

    def exchanged(self, *, gradients: bool) -> None:
        """Note what an exchange averaged, whoever began it: parameters keep replicas together."""
        self._gradients_in_a_row = self._gradients_in_a_row + 1 if gradients else 0
