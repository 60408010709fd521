"""From the rewards of groups to the advantage of every action token. No torch.

Why a solved task is forgotten: a group whose members all got the same reward has no spread, so every group-relative
estimator gives it zero, and between two rare failures nothing holds the task in place. The other tasks go on moving the
shared parameters, as far as a full batch would, since Adam divides by the size of recent gradients. The solved task
drifts until it fails everywhere at once; then its groups have no spread again, and it is gone for good.

Two cures, both on by default. The learning rate is scaled by the share of groups that have spread
(`algorithm.evidence_power`), which undoes what Adam does to batches that say little; this one matters most. And a group
whose members all got the top reward keeps a small positive advantage (`algorithm.solved_advantage`): its gradient
vanishes while the policy is sure of these actions and grows when it is pushed away from them. The top is the best
reward seen for that task, once a lower one has been seen too: a task that has always failed is not solved.

An estimator is added by writing it in `groups.py` (one value per trajectory), `turns.py` (one per turn) or `tokens.py`
(one per token) under `@ADVANTAGES.register`; `credit.py` has what is the same for all.
"""

from rollart.training.advantages import groups, tokens, turns
from rollart.training.advantages.base import (
    ADVANTAGES,
    UNSEEN,
    Advantage,
    Groups,
    PlayedTokens,
    PlayedTurns,
    RewardRange,
    TokenGroups,
    TurnGroups,
    critic_estimators,
    from_teacher,
    in_reward_units,
    needs_critic,
    of_tokens,
    of_turns,
    of_whole_trajectories,
)
from rollart.training.advantages.credit import (
    Assessed,
    TokenAdvantages,
    spread_over_tokens,
    token_advantages,
    token_targets,
)

__all__ = [
    "ADVANTAGES",
    "UNSEEN",
    "Advantage",
    "Assessed",
    "Groups",
    "PlayedTokens",
    "PlayedTurns",
    "RewardRange",
    "TokenAdvantages",
    "TokenGroups",
    "TurnGroups",
    "critic_estimators",
    "from_teacher",
    "groups",
    "in_reward_units",
    "needs_critic",
    "of_tokens",
    "of_turns",
    "of_whole_trajectories",
    "spread_over_tokens",
    "token_advantages",
    "token_targets",
    "tokens",
    "turns",
]
