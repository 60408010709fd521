"""rollart trains LLM agents with reinforcement learning on mixed hardware."""

__version__ = "0.1.0"
