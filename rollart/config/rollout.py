"""`rollout`, `environments` and `rewards`: how trajectories are made."""

from typing import Literal

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Natural, Positive, Seconds, Section
from rollart.core.schedule import QuarantineRule, Schedule, preset

Preset = Literal["sync", "sync_plus", "one_off", "start_bound", "rollart"]
_RULE = QuarantineRule()
SCHEDULE_KEYS = ("alpha", "window", "extra_members", "extra_groups")


class RolloutConfig(Section):
    preset: Preset = "rollart"
    alpha: Natural = Field(1, description="no trained token is older than this many versions")
    window: float = Field(2.0, ge=1, description="batches of groups that compete for the next batch")
    extra_members: Natural = Field(0, description="surplus trajectories per group, cancelled once it is complete")
    extra_groups: Natural = Field(0, description="surplus groups per task in flight")
    retries: Natural = Field(3, description="replacements for failed members of a group, before it is dropped")
    trajectory_deadline: Seconds = 300.0

    @model_validator(mode="after")
    def _preset_has_the_keys(self) -> "RolloutConfig":
        """A key that the preset takes no notice of would only seem to be set."""
        free = {"rollart": set(SCHEDULE_KEYS), "start_bound": {"alpha"}}.get(self.preset, set())
        for key in SCHEDULE_KEYS:
            if key not in free and getattr(self, key) != type(self).model_fields[key].default:
                raise Conflict(f"preset {self.preset!r} has its own {key}; leave it out or choose another preset", key)
        return self

    def schedule(self) -> Schedule:
        return preset(self.preset, self.alpha, self.window, self.extra_members, self.extra_groups)


class QuarantineConfig(Section):
    """When a task that keeps failing is left out of the mixture, and when it is tried again."""

    rate: float = Field(_RULE.rate, gt=0, le=1, description="share of its last trajectories that failed")
    window: Positive = Field(_RULE.window, description="how many of the last count")
    min_count: Positive = Field(_RULE.min_count, description="and how many there must be")
    groups: Positive = Field(_RULE.groups, description="or so many groups in a row that could not be completed")
    wait: Seconds = Field(_RULE.wait, description="seconds until it is tried again; doubled each time")

    def rule(self) -> QuarantineRule:
        return QuarantineRule(**self.model_dump())


class EnvironmentsConfig(Section):
    processes: Positive = Field(64, description="environments alive at the same time, per task")
    reset_deadline: Seconds = 30.0
    step_deadline: Seconds = 10.0
    close_deadline: Seconds = 5.0
    retries: Natural = Field(2, description="fresh environments tried for one reset")
    hedges: Natural = Field(
        8, description="per task, in addition: second resets, begun once one takes longer than most do"
    )
    hedge_after: float = Field(
        0.9, gt=0, lt=1, description="quantile of a task's ordinary resets after which one is slow"
    )
    warm: Natural = Field(2, description="per task, in addition: environments prepared before they are needed")
    quarantine: QuarantineConfig = QuarantineConfig()


class RewardsConfig(Section):
    workers: Positive = Field(2, description="local processes, started when needed")
    deadline: Seconds = Field(30.0, description="seconds for one call")
    retries: Natural = 2
