"""Foreign code in processes of its own: the forking host, and the pools of leased slots on it."""
