"""One episode in the terminal: `players` act, `episode` plays and shows."""
