"""A tool-use task: answer a question about people by looking them up in a directory, one person per turn.

The agent writes `lookup NAME` or `answer CITY`. With `hops` 1 the question names the person whose city is asked; with
more, the person must be found through friends ("the city of Anna's friend's friend"), one look-up after another.
"""

import random
import re
from hashlib import blake2b
from typing import Any

NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Mary",
    "Paul",
)
CITIES = (
    "Rome",
    "Paris",
    "London",
    "Berlin",
    "Madrid",
    "Vienna",
    "Oslo",
    "Tokyo",
    "Dublin",
    "Athens",
    "Boston",
    "Cairo",
)
COMMAND = re.compile(r"\s*(lookup|answer)\s+(\w+)\W*", re.IGNORECASE)

RULES = """You answer questions with a directory. Reply with one command and nothing else:
lookup NAME
answer CITY

Example:
Question: Where does Tom's friend live?
lookup Tom
Tom: lives in Lima, friend is Sara.
lookup Sara
Sara: lives in Delhi, friend is Tom.
answer Delhi"""
