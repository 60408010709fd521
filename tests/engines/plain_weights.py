"""Weights that are simply there, for tests that are about something else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollart.core.types import Hop, Publication


def at(version: int) -> Publication:
    return Publication(version, "0", ((),))


@dataclass
class Plain:
    tensors: Mapping[str, Tensor]
    bytes: int = 0
    transport: str = "none"
    hops: tuple[Hop, ...] = ()
    relay: str = ""
    released: bool = False

    def release(self) -> None:
        self.released = True


class Made:
    """A source whose versions are made when they are asked for."""

    def __init__(self, make: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._make = make

    def fetch(self, publication: Publication) -> Plain:
        return Plain(self._make(publication.version))


def versions(*networks: Any) -> Made:
    return Made(lambda version: networks[version].state_dict())
