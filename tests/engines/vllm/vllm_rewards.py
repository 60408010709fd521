"""A reward that even an untrained model gets some of, so that every step changes the weights."""

from rollart.core.types import Episode


def letters(episode: Episode) -> float:
    """The share of letters among what was said."""
    said = "".join(turn.action for turn in episode.turns)
    return sum(character.isalpha() for character in said) / max(1, len(said))
