"""Shell tasks in a sandbox. Standard library only: it runs in worker processes."""

from rollart.envs.terminal.environment import Terminal, player

__all__ = ["Terminal", "player"]
