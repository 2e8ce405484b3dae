"""``p2pdrl completion``: commands, options and presets completed by the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["complete_presets", "completion"]

_WHERE = {
    "bash": 'eval "$(p2pdrl completion bash)"  in ~/.bashrc',
    "zsh": 'eval "$(p2pdrl completion zsh)"  in ~/.zshrc',
    "fish": "p2pdrl completion fish > ~/.config/fish/completions/p2pdrl.fish",
}


@click.command(epilog="\b\n" + "\n".join(_WHERE.values()))
@click.argument("shell", type=click.Choice(sorted(_WHERE)))
def completion(shell: str) -> None:
    """Print the script that completes commands in a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise AssertionError(f"click has lost {shell}")
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "p2pdrl", "_P2PDRL_COMPLETE").source())


def complete_presets(_context: click.Context, _option: click.Parameter, begun: str) -> list[CompletionItem]:
    """The presets that ``--config`` takes, and files."""
    from click.shell_completion import CompletionItem

    from p2pdrl.config.loader import preset_names

    found = [CompletionItem(name) for name in preset_names() if name.startswith(begun)]
    return found or [CompletionItem(begun, type="file")]
