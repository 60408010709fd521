"""`training.algorithm`: how rewards become advantages, advantages a loss, and what is done about stale tokens."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rollart.config.base import Conflict, Natural, Section

# A validator before a section hands it Python objects, not JSON, and strict tuples refuse lists.
_LISTS = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Band = Annotated[tuple[float, float], _LISTS]


class CorrectionConfig(Section):
    """What is done about tokens that another policy sampled: an older one, or the same one in an engine whose numbers
    differ. `correction: NAME` and `correction: [NAME, ...]` are short for `{use: [...]}`, and `[]` is for none at all.
    w is the probability by the trainer's policy, before the step, over that by the engine's."""

    use: Annotated[tuple[str, ...], _LISTS] = Field(
        ("token", "dppo"),
        description="factors of a token's loss, which multiply: weights (token, turn, sequence, geometric), masks "
        "(icepop, kpop, dppo, m2po, sequence_mask, geometric_mask), or module:function",
    )
    cap: float = Field(2.0, gt=0, description="weights: w is at most this")
    icepop: Band = Field((0.5, 5.0), description="icepop: a token counts w within this range of w, else nothing")
    kpop: float = Field(0.05, gt=0, description="kpop: drops a token whose KL, as a coin flip, is above this")
    dppo: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="dppo: drops a token whose probability moved this far the way its advantage points",
    )
    m2po: float = Field(
        0.04, gt=0, description="m2po: drops the largest (log w)^2 of a pass until the mean of the rest is at most this"
    )
    sequence_mask: Band = Field((0.5, 2.0), description="sequence_mask: range of the product of w over a sequence")
    geometric_mask: Band = Field((0.9, 1.1), description="geometric_mask: range of the geometric mean of w over it")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"use": (value,)}
        return {"use": tuple(value)} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _ranges(self) -> "CorrectionConfig":
        for name in ("icepop", "sequence_mask", "geometric_mask"):
            low, high = getattr(self, name)
            if not 0 <= low < high:
                raise Conflict(
                    f"{name} must be a range of positive numbers, [low, high], not [{low:g}, {high:g}]", name
                )
        return self


CRITIC_ADVANTAGES = ("gae",)  # of those that rollart ships
TOP_LOSSES = ("reverse_kl", "forward_kl", "jensen_shannon")  # over a teacher's likeliest tokens
TEACHER_LOSSES = ("opd", *TOP_LOSSES)


class CriticConfig(Section):
    """The value model, which is there if an advantage needs one (`gae`): the model that RL starts from, with a head for
    one number, trained whole on the trainer's ranks."""

    lr: float | None = Field(None, gt=0, description="peak learning rate; null: that of the policy")
    warmup: Natural = Field(0, description="first steps of the run that train the critic alone")
    epochs: int = Field(1, ge=1, description="passes over a batch, beside those of the policy")
    clip: float | None = Field(
        0.2, gt=0, description="a value that moved further than this in a step is not trained further; null: any"
    )


class AlgorithmConfig(Section):
    """How rewards become advantages, and advantages a loss."""

    advantage: str = Field("grpo", description="grpo, another that rollart ships, or module:function")
    normalise: Literal["none", "group", "batch", "task"] = Field(
        "none", description="advantages are whitened once more: by their group, the batch, or their task in it"
    )
    clip_advantage: float | None = Field(None, gt=0, description="largest absolute advantage; null: any")
    discount: float = Field(1.0, gt=0, le=1, description="turn_returns, gigpo, gae: of the rewards of later turns")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="gae: 0 trusts the critic's value of the next step, 1 the rewards alone"
    )
    gae_level: Literal["token", "turn"] = Field(
        "token", description="gae: what a step is, to which `discount` and `gae_lambda` apply"
    )
    teacher_weight: float = Field(
        1.0,
        ge=0,
        description="of tasks with a teacher: weight of log teacher - log policy of each token, which is added to its "
        "advantage; `advantage: opd` is that alone",
    )
    teacher_top: int = Field(
        16, ge=1, description="reverse_kl, forward_kl, jensen_shannon: how many of the teacher's likeliest tokens"
    )
    step_weight: float = Field(1.0, ge=0, description="gigpo: weight of the advantage among equal states")
    length_penalty: float = Field(
        0.0,
        ge=0,
        description="reward between the shortest and the longest answer of a group: half is given, half taken",
    )
    overlong_tokens: Natural = Field(
        0, description="action tokens of a trajectory from which on its reward falls, by 1 at most; 0: never"
    )
    overlong_buffer: int = Field(64, ge=1, description="tokens over which the reward falls by 1")
    mask_truncated: bool = Field(False, description="trajectories that a limit ended are not trained")
    solved_advantage: float = Field(
        0.15, ge=0, description="advantage of groups whose members all got the top reward: keeps them learnt"
    )
    evidence_power: float = Field(
        1.0, ge=0, description="power of the share of groups with spread that scales the learning rate; 0: off"
    )
    loss: str = Field("ppo", description="ppo, another that rollart ships, or module:function")
    clip_low: float = Field(0.2, gt=0, description="the policy ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="and above 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="cap on the loss of a token with a negative advantage, in advantages; null: off"
    )
    sapo_temperatures: Band = Field(
        (1.0, 1.05), description="sapo: steepness of the gate of tokens with a positive and with a negative advantage"
    )
    beta: float = Field(
        0.1, gt=0, description="squared: weight of the squared log ratio; dpo, ipo: of the KL that they imply"
    )
    correction: CorrectionConfig = CorrectionConfig()
    kl: float = Field(0.0, ge=0, description="weight of the KL to the reference, the policy at the start of RL")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    expert_balance: float = Field(
        0.0,
        ge=0,
        description="mixtures: weight of the loss for an uneven load of experts, which is always measured",
    )
    aggregate: Literal["token", "sequence", "group"] = Field(
        "token",
        description="the loss is a mean over all tokens, over sequences (of their mean), or over groups (of theirs)",
    )

    @property
    def likeliest(self) -> int:
        """How many of a teacher's likeliest tokens the loss compares."""
        return self.teacher_top if self.loss in TOP_LOSSES else 0
