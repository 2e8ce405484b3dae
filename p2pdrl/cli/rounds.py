"""``p2pdrl rounds``: the last rounds of a node's strategy, one by one."""

from __future__ import annotations

import click

from p2pdrl.cli.options import Target, api_options, json_option
from p2pdrl.cli.status import show_again, watchable

__all__ = ["rounds"]


@click.command()
@api_options
@click.option(
    "-n", "--last", type=click.IntRange(min=1), metavar="N",
    help="Only the last N; by default all that the node remembers, 50 at most.",
)  # fmt: skip
@json_option
@watchable
def rounds(target: Target, last: int | None, as_json: bool, watch: bool, interval_s: float) -> None:
    """Show the last rounds of the node's strategy.

    Who was merged with which weight, who was missing, and what it cost.
    """
    from p2pdrl.cli.mode_view import rounds_view

    client = target.client()

    def ask() -> list[object]:
        found = client.get("/v1/rounds")
        found = found if isinstance(found, list) else []
        return found if last is None else found[-last:]

    show_again(ask, lambda: rounds_view(ask()), as_json, watch, interval_s)
