"""`rollart reward-model`: it learns to rank made pairs, is exported as others load it, and is a reward of RL."""

import json
import random
import string
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import rollart
from rollart.config import RunFile, TinyModelConfig, TrainingConfig
from rollart.core.errors import ConfigError, RollartError
from rollart.core.events import Evaluated, ServiceStarted, StepDone
from rollart.core.types import Batch, Episode, EpisodeTurn, Message
from rollart.fleet.pairs import PairSamples, for_pairs, split_pairs
from rollart.models import tiny
from rollart.models.adapters import HEAD
from rollart.models.chat import ChatRenderer, conversation_tokens
from rollart.rewards.reward_model import reward_model
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.export import export_adapter, export_model
from rollart.training.trainer import Trainer
from rollart.training.value_models import RewardModel
from rollart.warmup.pairs import PairFile

TASK = {"name": "sums", "env": "rollart.envs.addition:Addition", "max_context": 96, "sampling": {"max_tokens": 4}}
MODEL = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 128}


def run_file(**more: Any) -> RunFile:
    plain: dict[str, Any] = {
        "model": {"tiny": MODEL},
        "tasks": [TASK],
        "evaluation": {"every": 0, "final_episodes": 64},
    }
    return RunFile.model_validate({**plain, **more})


def answer(draw: random.Random, sevens: int) -> str:
    letters = ["7"] * sevens + draw.choices(string.ascii_letters + "012345689", k=4 - sevens)
    return "".join(draw.sample(letters, 4))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The answer with more sevens is the better one."""
    draw, lines = random.Random(0), []
    for _ in range(600):
        few, many = sorted(draw.sample(range(5), 2))
        prompt = f"{draw.randrange(30)} + {draw.randrange(30)} ="
        lines.append({"prompt": prompt, "chosen": answer(draw, many), "rejected": answer(draw, few)})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def episode(text: str) -> Episode:
    return Episode("e", "sums", 0, (EpisodeTurn((Message("user", "3 + 4 ="),), text),))


@pytest.mark.slow
def test_a_reward_model_learns_to_rank_and_rl_learns_from_its_scores(pairs: Path, tmp_path: Path) -> None:
    run = run_file(preference={"pairs": str(pairs)}, training={"steps": 30, "batch_groups": 48, "lr": 1e-2})
    judge = rollart.train(run, folder=tmp_path / "judge", stage="reward-model")
    assert [step.version for step in judge.events(StepDone)] == [*range(1, 31)]
    ranked = [found.success for found in judge.events(Evaluated) if found.final]
    assert ranked[0] == 0.5 and ranked[-1] > 0.9, "all tie before the first step; most held-out pairs are right at last"
    assert {event.role for event in judge.events(ServiceStarted)} == {"train"}, "nothing is generated"
    assert [task.name for task in judge.snapshot().tasks] == ["pairs"], "no task was played"

    function = {"function": "reward_model", "args": {"model": str(judge.model)}}
    rl = {"steps": 12, "batch_groups": 8, "group_size": 8, "lr": 1e-2}
    run = run_file(tasks=[{**TASK, "reward": function}], training=rl, evaluation={"every": 0, "final_episodes": 8})
    trained = rollart.train(run, folder=tmp_path / "rl")
    rewards = [step.tasks["sums"]["reward"] for step in trained.events(StepDone)]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 1.0
    assert not [each for each in trained.trajectories() if each.outcome == "reward_failed"]


def trainer_and_batch(pairs: Path, source: Path, **training: Any) -> tuple[Trainer, Batch]:
    run = for_pairs(run_file(preference={"pairs": str(pairs)}), scored=True)
    settings = {"lr": 1e-2, "lr_warmup": 0, "algorithm": run.training.algorithm, **training}
    samples, file = PairSamples(run, ChatRenderer(source), scored=True), PairFile(run.preference)
    groups = [samples.group(n, file[n], 0) for n in range(32)]
    batch = Batch(0, tuple(group for group in groups if group is not None))
    return Trainer(source, TrainingConfig.model_validate(settings)), batch


@pytest.mark.parametrize("lora", [None, {"rank": 3, "alpha": 5}])
def test_the_exported_folder_scores_as_transformers_does(pairs: Path, tmp_path: Path, lora: Any) -> None:
    source = tiny.make(TinyModelConfig(**MODEL), tmp_path / "base", seed=0)
    trainer, batch = trainer_and_batch(pairs, source, lora=lora)
    file = PairFile(run_file(preference={"pairs": str(pairs)}).preference)
    first = trainer.step(batch)
    assert first.values["pair_accuracy"] == 0.5 and first.values["loss"] == pytest.approx(0.6931, abs=1e-4)
    margin = trainer.compare(batch)["pair_margin"]
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    export_model(tmp_path / "checkpoint", tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32)
    renderer, scores = ChatRenderer(tmp_path / "model"), []
    for text in ("7777", "abc"):
        tokens, _ = conversation_tokens(renderer, episode(text).turns)
        scores.append(model(torch.tensor([tokens])).logits.item())
    found = reward_model([episode("7777"), episode("abc")], model=str(tmp_path / "model"), passed=-100.0)
    assert [one.value for one in found] == pytest.approx(scores, abs=1e-5) and found[0].success is True
    played = [[Episode("e", "sums", 0, tuple(turns)) for turns in (pair.chosen, pair.rejected)] for pair in file[:32]]
    values = [[one.value for one in reward_model(pair, model=str(tmp_path / "model"))] for pair in played]
    assert fmean(chosen - rejected for chosen, rejected in values) == pytest.approx(margin, abs=1e-5)
    with pytest.raises(ValueError, match="is not a reward model"):
        reward_model([episode("7")], model=str(source))


def test_with_lora_the_head_is_trained_beside_the_adapters_and_nothing_else(pairs: Path, tmp_path: Path) -> None:
    source = tiny.make(TinyModelConfig(**MODEL), tmp_path / "base", seed=0)
    trainer, batch = trainer_and_batch(pairs, source, lora={"rank": 3, "alpha": 5}, dtype="bfloat16")
    policy = trainer.learner.policy
    assert isinstance(policy, RewardModel)
    trained = {name for name, each in policy.model.named_parameters() if each.requires_grad}
    assert trained == policy.parameters().keys()
    assert [name for name in trained if ".lora_" not in name] == [f"{HEAD}.weight"]
    kinds = {(name in trained, each.dtype) for name, each in policy.model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}, "the head is as exact as the adapters"
    trainer.step(batch)
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    resumed, _ = trainer_and_batch(pairs, source, lora={"rank": 3, "alpha": 5}, dtype="bfloat16")
    load_checkpoint(resumed, tmp_path / "checkpoint")
    assert resumed.compare(batch)["pair_margin"] == trainer.compare(batch)["pair_margin"] != 0.0


def test_the_adapter_of_a_reward_model_is_what_peft_loads(pairs: Path, tmp_path: Path) -> None:
    source = tiny.make(TinyModelConfig(**MODEL), tmp_path / "base", seed=0)
    trainer, batch = trainer_and_batch(pairs, source, lora={"rank": 3, "alpha": 5})
    for step in range(2):
        trainer.step(replace(batch, step=step))
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    export_model(tmp_path / "checkpoint", tmp_path / "merged")
    export_adapter(tmp_path / "checkpoint", tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.tensor([[5, 6, 7, 8]])
    scores = [model(tokens).logits.item() for model in (adapted, merged)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5) and abs(scores[0]) > 1e-3
    assert not any(name.startswith("lm_head") for name in load_file(tmp_path / "merged" / "model.safetensors"))
    with pytest.raises(RollartError, match="export its run without --adapter"):
        export_model(tmp_path / "adapter", tmp_path / "again")


def test_answers_to_one_question_are_on_one_side_of_the_split(pairs: Path) -> None:
    file = PairFile(run_file(preference={"pairs": str(pairs)}).preference)
    trained, held_out = split_pairs(file, 0.2, seed=0)
    assert len(trained) + len(held_out) == 600 and 60 < len(held_out) < 180

    def asked(some: Any) -> set[str]:
        return {pair.chosen[0].messages[0].content for pair in some}

    assert not asked(trained) & asked(held_out)
    assert len(split_pairs(file, 0.0, seed=0)[1]) == 0
    with pytest.raises(ConfigError, match="all of the pairs would be held out"):
        split_pairs(file, 1.0, seed=0)


def test_a_reward_model_has_losses_of_its_own() -> None:
    assert for_pairs(run_file(), scored=True).training.algorithm.loss == "bradley_terry"
    for loss, scored in (("dpo", True), ("bradley_terry", False)):
        with pytest.raises(ConfigError, match="which is not a loss of"):
            for_pairs(run_file(training={"algorithm": {"loss": loss}}), scored=scored)
