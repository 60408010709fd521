"""Foreign code in processes of its own: hosts that fork processes, and pools from which processes are claimed."""
