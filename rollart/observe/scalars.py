"""Events as scalars by policy version: what TensorBoard, W&B, MLflow and trackio draw."""

from rollart.core import events as ev
from rollart.observe.metric_table import METRICS
from rollart.observe.metrics import Metrics


class ScalarLog:
    """Call `of` with each event, in order, once `metrics` have folded it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def of(self, event: ev.AnyEvent) -> tuple[int, dict[str, float]] | None:
        """The x value and what the event adds there; None for most events."""
        match event:
            case ev.Evaluated():
                return event.version, {f"held_out_success/{event.task}": event.success}
            case ev.WarmupStep():
                return event.step, {"warmup/loss": event.loss}
            case ev.StepDone():
                return event.version, self._step(event)
        return None

    def _step(self, event: ev.StepDone) -> dict[str, float]:
        shot = self._metrics.snapshot()
        point = shot.history[-1]
        scalars = {f"trainer/{name}": value for name, value in event.values.items()}
        for task, values in event.tasks.items():
            scalars |= {f"{task}/{name}": value for name, value in values.items() if name != "reward"}
        scalars |= {f"logprob_gap/{gap.task}, {gap.age} old": gap.mean for gap in event.gaps}
        scalars |= {f"reward/{task}": value for task, value in point.rewards.items()}
        scalars |= {f"dropped/{reason}": float(dropped) for reason, dropped in shot.drops.items()}
        tags = {metric.name: metric.tag for metric in METRICS}
        scalars |= {tags[name]: value for name, value in point.metrics.items()}
        return scalars | {
            "time/step_s": point.seconds,
            "time/waited_s": point.waited_s,
            "rollout/staleness": point.mean_staleness,
            "busy/engine": shot.recent_use.engine,
            "busy/trainer": shot.recent_use.trainer,
            "busy/environments": shot.recent_use.environments,
        }
