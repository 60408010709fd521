"""Which layout a trainer gets: the simplest that fits into the memory of its devices; what to change if none does."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollart.core.errors import RollartError
from rollart.hardware.layout import Layout, misfits
from rollart.hardware.training_memory import TrainingMemory, TrainingSetup, training_memory

TENSOR_MAX = 8  # tensor parallelism exchanges activations in every layer: within a node
RANKS_MAX = 1 << 14
_LEANER: tuple[dict[str, Any], ...] = (  # settings that need less memory, from the cheapest in time
    {},
    {"dtype": "bfloat16"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"offload": ("optimizer",)},
    {"offload": ("optimizer", "activations")},
)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout, the memory that each rank needs in it, and why it was chosen."""

    layout: Layout
    memory: TrainingMemory
    why: str


def candidates(ranks: int, model: Mapping[str, Any], *, adapters: bool = False) -> Iterator[Layout]:
    """The layouts that a model can have, by tensor, then context, then expert. Adapters allow neither tensor nor expert
    parallelism."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tensor in [1] if adapters else [size for size in sizes if size <= TENSOR_MAX]:
        for context in sizes:
            for expert in [1] if adapters else sizes:
                try:
                    layout = Layout.over(ranks, context=context, tensor=tensor, expert=expert)
                except RollartError:
                    continue
                if not any(misfits(layout, model)):
                    yield layout


def choose(model: Mapping[str, Any], setup: TrainingSetup, ranks: int, room: float) -> LayoutChoice | None:
    """The first of the candidates that needs at most `room` bytes; None if all need more."""
    first = None
    for layout in candidates(ranks, model, adapters=bool(setup.adapters)):
        memory = training_memory(model, replace(setup, layout=layout))
        if memory.total <= room:
            why = f"takes {_gb(memory.total)} of {_gb(room)} GB"
            if first is not None:
                why += f"; {first.layout} would take {_gb(first.memory.total)}"
            return LayoutChoice(layout, memory, why)
        first = first or LayoutChoice(layout, memory, "")
    return None


def leaner(
    model: Mapping[str, Any], setup: TrainingSetup, ranks: int, room: float
) -> tuple[dict[str, Any], LayoutChoice | None]:
    """The changes of settings, as cheap in time as can be, with which some layout fits; all of them and None if none
    does."""
    changes: dict[str, Any] = {}
    for more in _LEANER:
        if all(getattr(setup, key) == value for key, value in more.items()) and more:
            continue
        if more.get("recompute") == "selective" and setup.recompute == "full":
            continue
        changes |= more
        if found := choose(model, _changed(setup, changes), ranks, room):
            return changes, found
    return changes, None


def _changed(setup: TrainingSetup, changes: Mapping[str, Any]) -> TrainingSetup:
    return replace(setup, **changes, flash=changes.get("dtype", setup.dtype) == "bfloat16")


def proposal(model: Mapping[str, Any], setup: TrainingSetup, ranks: int, room: float) -> str:
    """What fits instead: another layout, else leaner settings too, else more ranks."""
    changes, found = leaner(model, setup, ranks, room)
    if found:
        return f"{_as_keys(changes, found.layout)} {found.why}"
    for wanted in _counts(ranks + 1):
        if found := choose(model, _changed(setup, changes), wanted, room):
            return f"{wanted} ranks with {_as_keys(changes, found.layout)}, which {found.why}"
    return f"a smaller training.pack_tokens (now {setup.pack_tokens}) or max_context, or a larger device"


def _counts(least: int) -> Iterator[int]:
    """Numbers of ranks worth a try: all up to 16, then eight between each power of two and the next, since a layout
    needs a number that heads and experts divide.

    >>> [*_counts(14)][:8]
    [14, 15, 16, 18, 20, 22, 24, 26]
    """
    count = 1
    while count <= RANKS_MAX:
        if count >= least:
            yield count
        count += max(1, 1 << (count.bit_length() - 4)) if count >= 8 else 1


def parallel_of(layout: Layout) -> dict[str, int]:
    """As in the run file."""
    sizes = {"context": layout.context, "tensor": layout.tensor, "expert": layout.expert}
    return {name: size for name, size in sizes.items() if size > 1}


def _as_keys(changes: Mapping[str, Any], layout: Layout) -> str:
    keys = [f"{key}: {_yaml(value)}" for key, value in changes.items()]
    parallel = ", ".join(f"{name}: {size}" for name, size in parallel_of(layout).items())
    return f"training: {{{', '.join([*keys, f'parallel: {{{parallel}}}'])}}}"


def _yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"
