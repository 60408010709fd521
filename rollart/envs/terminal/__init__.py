"""Shell tasks in a sandbox. Standard library only, for it runs in slots."""

from rollart.envs.terminal.environment import Terminal, player

__all__ = ["Terminal", "player"]
