"""Losses, advantages and optimizers by name: one that ships with rollart, or `module:function` of the user."""

import importlib
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from rollart.config import import_check
from rollart.config.yaml_tree import did_you_mean
from rollart.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """`key` is the run-file key whose values it resolves. Shipped functions are added with `@registry.register`."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._shipped: dict[str, F] = {}

    def register(self, function: F) -> F:
        self._shipped[function.__name__] = function
        return function

    def names(self) -> list[str]:
        """Of those that ship with rollart."""
        return list(self._shipped)

    def problem(self, name: str) -> str | None:
        """What is wrong with `name`, as the end of a sentence, or None. Imports nothing."""
        if name in self._shipped:
            return None
        if ":" not in name:
            known = ", ".join(self._shipped)
            return f"must be {known} or module:function, not {name!r}{did_you_mean(name, list(self._shipped))}"
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            return f"must look like package.module:function, not {name!r}"
        return import_check.problem(name)

    def find(self, name: str) -> F:
        """Raises ConfigError."""
        if wrong := self.problem(name):
            raise ConfigError(f"{self._key} {wrong}")
        if name in self._shipped:
            return self._shipped[name]
        module, _, attribute = name.partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise ConfigError(f"{self._key} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(function):
            raise ConfigError(f"{self._key} {name!r} is not a function")
        return cast(F, function)
