"""`rollout`, `environments` and `rewards`: how trajectories are made."""

from typing import Literal

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Natural, Positive, Seconds, Section
from rollart.core.schedule import QuarantineRule, Schedule, preset

Preset = Literal["sync", "sync_plus", "one_off", "start_bound", "rollart"]
_RULE = QuarantineRule()
SCHEDULE_KEYS = ("alpha", "window", "extra_members", "extra_groups", "elastic")


class RolloutConfig(Section):
    """When trajectories start and how old they may be when they are trained."""

    preset: Preset = Field(
        "rollart",
        description="rollart: asynchronous, staleness at most alpha; start_bound: asynchronous, staleness bounded only "
        "when a group starts; one_off: train on one batch while the next is generated; sync_plus: generate a batch, "
        "then train on it; sync: the same, all trajectories turn by turn and rewards at the end",
    )
    alpha: Natural = Field(1, description="maximum staleness of a trained token, in versions")
    window: float = Field(2.0, ge=1, description="batches of groups that compete for the next batch")
    extra_members: Natural = Field(0, description="extra trajectories per group, cancelled once it is complete")
    extra_groups: Natural = Field(0, description="extra groups in flight per task")
    elastic: float = Field(
        1.0,
        ge=1,
        description="a batch grows up to this many times training.batch_groups while the trainer waits for batches, "
        "and shrinks again; 1: every batch has batch_groups",
    )
    retries: Natural = Field(3, description="replacements for failed members of a group, before it is dropped")
    trajectory_deadline: Seconds = Field(300.0, description="seconds for one trajectory")
    players: Literal["auto"] | Natural = Field(
        "auto",
        description="processes beside the controller that play trajectories: they tokenize, and talk to environments "
        "and engines; 0: the controller does it; auto: one for 256 environments, at most half of the cores, 0 if that "
        "is fewer than two. Agents, and tasks with a teacher, are always played by the controller",
    )

    @model_validator(mode="after")
    def _preset_has_the_keys(self) -> "RolloutConfig":
        """A key that the preset ignores is an error."""
        free = {"rollart": set(SCHEDULE_KEYS), "start_bound": {"alpha"}}.get(self.preset, set())
        for key in SCHEDULE_KEYS:
            if key not in free and getattr(self, key) != type(self).model_fields[key].default:
                raise Conflict(f"preset {self.preset!r} has its own {key}; leave it out or choose another preset", key)
        try:
            self.schedule()
        except ValueError as error:
            raise Conflict(str(error), "elastic") from None
        if self.schedule().lockstep and self.players not in ("auto", 0):
            raise Conflict(
                f"preset {self.preset!r} plays turn by turn, which one process must do: set it to 0", "players"
            )
        return self

    def schedule(self) -> Schedule:
        return preset(self.preset, self.alpha, self.window, self.extra_members, self.extra_groups, elastic=self.elastic)


class SampleConfig(Section):
    """`rollart sample`: rollouts without training, written to a file."""

    episodes: Positive = Field(100, description="episodes of each task")
    samples: Positive = Field(4, description="attempts at each episode")
    held_out: bool = Field(False, description="the held-out episodes of evaluations, not those of training")
    format: Literal["jsonl", "parquet"] = Field("jsonl", description="of the file of trajectories")


class QuarantineConfig(Section):
    """When a task that keeps failing leaves the mixture, and when it is probed."""

    rate: float = Field(_RULE.rate, gt=0, le=1, description="fraction of its last trajectories that failed")
    window: Positive = Field(_RULE.window, description="trajectories that the rate is measured over")
    min_count: Positive = Field(_RULE.min_count, description="minimum number of trajectories before the rate counts")
    groups: Positive = Field(_RULE.groups, description="or this many groups in a row were dropped")
    wait: Seconds = Field(_RULE.wait, description="seconds until the first probe; doubled each time")

    def rule(self) -> QuarantineRule:
        return QuarantineRule(**self.model_dump())


class ProcessLimitsConfig(Section):
    """Limits of one process of foreign code and all that it starts; 0: none. One that exceeds them is killed, and its
    trajectory is env_failed."""

    memory: Natural = Field(4096, description="megabytes of memory, files that it maps not counted")
    processes: Natural = Field(512, description="processes; with control groups, threads count too")
    file: Natural = Field(4096, description="megabytes of one file that it writes")
    log: Natural = Field(64, description="megabytes of the log that all of them write to; older lines are dropped")


class EnvironmentsConfig(Section):
    """Environment processes, their deadlines and retries."""

    processes: Positive = Field(64, description="environments alive at the same time, per task")
    reset_deadline: Seconds = Field(30.0, description="seconds for one reset")
    step_deadline: Seconds = Field(10.0, description="seconds for one step")
    close_deadline: Seconds = Field(5.0, description="seconds for one close")
    retries: Natural = Field(2, description="fresh environments tried for one reset")
    hedges: Natural = Field(
        8, description="per task, in addition: second resets, begun once one takes longer than most do"
    )
    hedge_after: float = Field(
        0.9, gt=0, lt=1, description="quantile of a task's ordinary resets after which one is slow"
    )
    warm: Natural = Field(2, description="per task, in addition: environments prepared before they are needed")
    quarantine: QuarantineConfig = QuarantineConfig()
    limits: ProcessLimitsConfig = Field(
        ProcessLimitsConfig(), description="of each process of an environment or agent, its sandbox included"
    )


class RewardsConfig(Section):
    """Reward functions that run on this machine, and the defaults of all."""

    workers: Positive = Field(2, description="most local processes; started when needed")
    deadline: Seconds = Field(30.0, description="seconds for one call")
    retries: Natural = Field(2, description="more attempts after a failed call")
    group_deadline: Seconds = Field(
        300.0,
        description="rewards of groups: seconds that an attempt waits for the others at its episode; then those that "
        "are there are compared",
    )
    limits: ProcessLimitsConfig = Field(ProcessLimitsConfig(), description="of each local process")
