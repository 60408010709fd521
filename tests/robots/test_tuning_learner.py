"""RL of an imitated policy: exact log-probabilities, what is imitated, exploration, resume."""

import asyncio
import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load
from tuned_obstacle import Exploring, LocalPool, batch_of, exported, run_file, tuner

from rollart.core.types import Trajectory
from rollart.robots.exploration import chunk_batch
from rollart.robots.learner import DivergedError, TrainedPolicy
from rollart.robots.tuning_learner import ChunkBatch


def test_the_log_probabilities_of_the_choices_are_those_of_the_learner(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)
    first = batch_of(learner, tmp_path, run)
    assert torch.allclose(first.logprobs, torch.tensor(-math.log(4)).expand_as(first.logprobs))
    learner.update(first)
    torch.nn.init.normal_(learner.scorer.leave.weight, std=30.0, generator=torch.Generator().manual_seed(0))
    batch = batch_of(learner, tmp_path, run)
    assert batch.logprobs.std() > 0.01
    now = learner.logprobs(batch.conditions, batch.candidates, batch.chosen)
    assert torch.allclose(now, batch.logprobs, atol=1e-5)
    same = ChunkBatch.decode(batch.encode())
    assert torch.equal(same.candidates, batch.candidates) and torch.equal(same.chosen, batch.chosen)


def test_choices_that_lead_to_success_become_likelier(tmp_path: Path) -> None:
    """A bandit: a candidate succeeds if its first number is positive."""
    run = run_file(imitate=False, optimizer_steps=20, scorer_lr=1e-2)
    learner, generator = tuner(tmp_path, run), torch.Generator().manual_seed(0)
    shares = []
    for _ in range(20):
        conditions, candidates = torch.zeros(128, 2), torch.randn(128, 4, 16, generator=generator)
        with torch.no_grad():
            logprobs = learner.scorer(conditions, candidates).log_softmax(-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        good = (candidates[torch.arange(128), chosen, 0] > 0).float()
        shares.append(good.mean().item())
        learner.update(
            ChunkBatch(
                conditions=conditions,
                candidates=candidates,
                chosen=chosen,
                logprobs=logprobs.gather(-1, chosen[:, None])[:, 0],
                advantages=good - good.mean(),
                sequences=torch.arange(128),
                imitated=torch.zeros(0, 2),
                imitated_chunks=torch.zeros(0, 16),
            )
        )
    assert shares[0] < 0.7 and shares[-1] > 0.85


def test_a_policy_that_is_tuned_starts_as_the_imitated_one_and_acts_by_the_best_candidate(tmp_path: Path) -> None:
    learner = tuner(tmp_path, run_file())
    policy, start = exported(learner, tmp_path), TrainedPolicy(tmp_path / "start")
    noise = torch.randn(3, policy.noise_size, generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(3, 1, 2)
    assert policy.noise_size == 4 * start.noise_size
    assert torch.allclose(policy.act(seen, noise), start.act(seen, noise[:, : start.noise_size]), atol=1e-6)
    torch.nn.init.normal_(policy.scorer.leave.weight, std=30.0, generator=torch.Generator().manual_seed(0))
    proposal = policy.propose(seen, noise)
    best = proposal.candidates[torch.arange(3), proposal.scores.argmax(-1)]
    assert torch.equal(policy.act(seen, noise), policy.commands(best))


def test_successes_are_imitated_and_the_oldest_forgotten(tmp_path: Path) -> None:
    run = run_file(keep=25, optimizer_steps=1)
    learner = tuner(tmp_path, run)
    shown = len(learner.data[0].chunks)
    batch = batch_of(learner, tmp_path, run)
    for value in (1.0, 2.0):
        own = {"imitated": torch.full((20, 2), value), "imitated_chunks": torch.ones(20, 16)}
        learner.update(ChunkBatch(**{**vars(batch), **own}))
    kept = learner._conditions[shown:]
    assert len(kept) == 25 and (kept[:5] == 1).all() and (kept[5:] == 2).all()
    assert torch.equal(learner._conditions[:shown], learner.data[0].conditions)


@pytest.mark.parametrize("explore", [0.0, 0.5])
def test_all_episodes_of_a_group_but_the_first_see_what_is_off(tmp_path: Path, explore: float) -> None:
    run = run_file(explore=explore, group_size=3)
    batch = batch_of(tuner(tmp_path, run), tmp_path, run)
    starts = torch.stack([batch.conditions[batch.sequences == number][0] for number in range(3)])
    different = len({tuple(row.tolist()) for row in starts})
    assert different == (3 if explore else 1)


@pytest.mark.parametrize("best", [0, 1])
def test_of_each_group_the_success_with_the_most_reward_per_step_is_imitated(tmp_path: Path, best: int) -> None:
    run = run_file(explore=0.5)
    exploring = Exploring(tuner(tmp_path, run), tmp_path, run, LocalPool())
    imitated = []

    class AllSucceeded:
        def trajectory(self, id: str) -> Trajectory:
            found = exploring.ledger.trajectory(id)
            rate = float(found.member == best)
            if rate:
                imitated.append(load(found.info["chunks"])["observations"])
            return replace(found, success=True, info={**found.info, "reward_per_step": rate})

    async def take() -> ChunkBatch:
        try:
            batch = await exploring.scheduler.take_batch()
            return chunk_batch(batch, AllSucceeded(), run.tuning.advantage, exploring.acting.policy)
        finally:
            await exploring.scheduler.stop()

    made = asyncio.run(take())
    assert len(imitated) == run.tuning.groups
    assert torch.equal(made.imitated, exploring.acting.policy.scaling.observations(torch.cat(imitated)))


def test_the_learning_rate_of_the_imitation_is_annealed_in_every_update(tmp_path: Path) -> None:
    """A policy that acts in the middle of a schedule is worse than the one that it started from."""
    run = run_file(optimizer_steps=20, steps=3)
    learner = tuner(tmp_path, run)
    batch = batch_of(learner, tmp_path, run)
    for _ in range(2):
        learner.update(batch)
        assert learner.optimizer.param_groups[0]["lr"] < 0.01 * run.tuning.lr
    learner.train(10)
    assert learner.optimizer.param_groups[0]["lr"] > 0.5 * run.tuning.lr


def test_a_resumed_tuning_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)
    batch = batch_of(learner, tmp_path, run)
    learner.update(batch)
    learner.save(tmp_path / "000001")
    learner.update(batch)
    second = tuner(tmp_path / "other", run)
    second.load(tmp_path / "000001")
    second.update(batch)
    for ours, theirs in ((learner.network, second.network), (learner.scorer, second.scorer)):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert second.step == learner.step and torch.equal(second._chunks, learner._chunks)


def test_a_scorer_that_diverges_stops_the_tuning(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)
    batch = batch_of(learner, tmp_path, run)
    with pytest.raises(DivergedError, match=r"lower tuning\.lr or tuning\.scorer_lr"):
        learner.update(ChunkBatch(**{**vars(batch), "advantages": batch.advantages * math.nan}))
