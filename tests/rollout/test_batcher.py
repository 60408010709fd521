from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import Outcome, Trajectory
from rollart.rollout.batcher import choose
from rollart.rollout.groups import Group


def group(name: str, task: str, ready: bool) -> Group:
    made = Group(name, task, 0, 0, 1, 0)
    if ready:
        made.done.append(Trajectory(f"{name}.0", task, name, 0, 0, Outcome.FINISHED))
    return made


def row(task: str, *ready: bool) -> dict[str, Group]:
    return {f"{task}{n}": group(f"{task}{n}", task, is_ready) for n, is_ready in enumerate(ready)}


def names(batch: list[Group] | None) -> list[str] | None:
    return None if batch is None else [group.id for group in batch]


def test_takes_ready_groups_in_start_order() -> None:
    groups = {"a": row("a", True, False, True, True)}
    assert names(choose({"a": 2}, groups, 2.0)) == ["a0", "a2"]


def test_a_group_outside_the_window_may_not_overtake() -> None:
    groups = {"a": row("a", False, True, True, True)}
    assert choose({"a": 2}, groups, 1.0) is None
    assert names(choose({"a": 2}, groups, 1.5)) == ["a1", "a2"]


def test_waits_until_every_task_can_fill_its_share() -> None:
    groups = {"a": row("a", True, True), "b": row("b", False)}
    assert choose({"a": 1, "b": 1}, groups, 2.0) is None
    assert names(choose({"a": 2, "b": 0}, groups, 2.0)) == ["a0", "a1"]


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 6), st.sampled_from([1.0, 1.5, 2.0, 4.0]))
def test_the_batch_is_the_first_ready_ones_of_the_window_or_nothing(
    ready: list[bool], need: int, window: float
) -> None:
    within = [f"a{n}" for n, is_ready in enumerate(ready[: max(need, int(need * window))]) if is_ready]
    assert names(choose({"a": need}, {"a": row("a", *ready)}, window)) == (
        within[:need] if len(within) >= need else None
    )
