"""Harbor task folders, played and verified in our own sandbox. `trial` is an agent; `python -m rollart.agents.harbor`
tries folders out with their own solutions."""

from rollart.agents.harbor.trial import trial

__all__ = ["trial"]
