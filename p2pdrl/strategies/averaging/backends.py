"""Over what the rounds of a group average: the swarm's own connections, or torch.distributed."""

from __future__ import annotations

from p2pdrl.config.strategy import GradAverageConfig, ParamAverageConfig
from p2pdrl.config.strategy_bases import Grouped
from p2pdrl.strategies.averaging.allreduce import ViewAverager
from p2pdrl.strategies.averaging.averager import Averager, Backend
from p2pdrl.strategies.averaging.piece_owner import AverageMemory
from p2pdrl.strategies.averaging.torch_averager import TorchBackend
from p2pdrl.strategies.group.service import Group, GroupView
from p2pdrl.strategies.patience import Patience
from p2pdrl.strategies.protocol import Context

__all__ = ["OwnBackend", "backend_of"]


class OwnBackend:
    """The swarm's own connections; see `Backend`.

    Args:
        context: what the node gives.
        config: the strategy's options.
        memory: taken over from view to view.
    """

    def __init__(self, context: Context, config: Grouped, memory: AverageMemory) -> None:
        self._context, self._config, self._memory = context, config, memory
        self._patience = Patience(config.deadline_s)

    async def start(self) -> None:
        """Nothing is needed."""

    async def stop(self) -> None:
        """Nothing was begun."""

    def averager(self, group: Group, view: GroupView, *, first: int, raw: bool, spread: bool) -> Averager:
        """Return one for ``view``; see `Backend`."""
        return ViewAverager(
            self._context,
            self._config,
            group,
            view,
            memory=self._memory,
            patience=self._patience,
            first=first,
            raw=raw,
            spread=spread,
        )


def backend_of(config: Grouped, context: Context, memory: AverageMemory) -> Backend:
    """Return the backend that ``config`` names.

    Raises:
        ConfigError: this node may not, or can't.
    """
    if isinstance(config, GradAverageConfig | ParamAverageConfig) and config.backend == "torch":
        return TorchBackend(context, config, memory)
    return OwnBackend(context, config, memory)
