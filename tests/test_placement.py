from rollart.config import RunFile
from rollart.placement import plan


def run(**changes: object) -> RunFile:
    tasks = [{"name": name, "env": "json:loads", "weight": weight} for name, weight in (("a", 1), ("b", 3))]
    return RunFile.model_validate({"model": {"tiny": {}}, "tasks": tasks, **changes})


def test_every_role_has_its_processes() -> None:
    made = plan(run(engine={"count": 2, "threads": 3}, environments={"slots": 7}, rewards={"workers": 5}))
    table = {(place.role, place.name): (place.processes, place.threads, place.elastic) for place in made.places}
    assert table == {
        ("control", "controller"): (1, 1, False),
        ("generate", "engine"): (2, 3, False),
        ("train", "trainer"): (1, 1, False),
        ("environment", "a"): (7, 1, True),
        ("environment", "b"): (7, 1, True),
        ("reward", "rewards"): (5, 1, True),
    }


def test_the_batch_follows_the_weights_and_the_pipeline_the_bound() -> None:
    made = plan(run(training={"batch_groups": 8, "group_size": 4}, rollout={"alpha": 2}))
    assert made.batch == {"a": 2, "b": 6}
    assert made.in_flight == 3 * 8 * 4
    assert plan(run(training={"batch_groups": 8, "group_size": 4}, rollout={"preset": "sync"})).in_flight == 8 * 4


def test_more_threads_than_cores_is_warned_of() -> None:
    assert plan(run(engine={"threads": 4096})).warning
    assert plan(run()).compute_threads == 2
