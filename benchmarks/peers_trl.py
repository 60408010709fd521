"""The other side of `peers.py`: TRL's GRPOTrainer with transformers `generate`, in an environment of its own.

Tasks of one turn go TRL's plain way, a dataset of prompts and a reward function. For several turns it offers tool
calls, which need a chat template that has them, and `rollout_func`, used here: each turn is generated in one batch, and
the environments of a batch step in parallel, each in a thread of its own. Prints one JSON object a line: the success of
held-out episodes, whose time does not count, and the seconds of each step.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_tasks import make_env

OUT = sys.stdout


class Player:
    """Plays episodes turn by turn, all of a batch at once."""

    def __init__(self, spec: dict[str, Any], tokenizer: Any) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self._pool = ThreadPoolExecutor(spec["groups"] * spec["group_size"])
        self._settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=spec["max_tokens"],
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )

    def render(self, observation: Any) -> list[int]:
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return [int(one) for one in ids]

    def play(self, model: Any, seeds: list[int], held_out: bool) -> dict[str, list[Any]]:
        """Prompt, completion and its mask (1: generated), reward and success of each episode."""
        envs = [make_env(self._spec, held_out) for _ in seeds]
        prompts = [self.render(one) for one in self._pool.map(lambda env, seed: env.reset(seed), envs, seeds)]
        completions: list[list[int]] = [[] for _ in seeds]
        masks: list[list[int]] = [[] for _ in seeds]
        rewards, successes = [0.0] * len(seeds), [False] * len(seeds)
        going = list(range(len(seeds)))
        for _ in range(self._spec["max_turns"]):
            made = self._generate(model, [prompts[i] + completions[i] for i in going])
            texts = self._tokenizer.batch_decode(made, skip_special_tokens=True)
            replies = list(self._pool.map(lambda i, text: envs[i].step(text), going, texts))
            still = []
            for i, tokens, reply in zip(going, made, replies, strict=True):
                completions[i] += tokens
                masks[i] += [1] * len(tokens)
                rewards[i] += reply["reward"]
                if reply["done"]:
                    successes[i] = bool(reply["info"].get("success"))
                    continue
                ended = tokens[-1] == self._tokenizer.eos_token_id
                more = [*([] if ended else [self._tokenizer.eos_token_id]), *self.render(reply["messages"])]
                completions[i] += more
                masks[i] += [0] * len(more)
                still.append(i)
            going = still
            if not going:
                break
        for i in going:  # ended by the number of turns: the last observation is not trained on
            while masks[i][-1] == 0:
                masks[i].pop()
                completions[i].pop()
        return {"prompt": prompts, "completion": completions, "mask": masks, "reward": rewards, "success": successes}

    @torch.no_grad()
    def _generate(self, model: Any, contexts: list[list[int]]) -> list[list[int]]:
        longest, pad = max(map(len, contexts)), self._tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(one)) + one for one in contexts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in contexts])
        was_training = model.training
        model.eval()
        out = model.generate(ids, attention_mask=mask, generation_config=self._settings)[:, longest:].tolist()
        model.train(was_training)
        eos = self._tokenizer.eos_token_id
        return [row[: row.index(eos) + 1] if eos in row else row for row in out]


class Watch(TrainerCallback):  # type: ignore[misc]
    """Times steps, and evaluates between them."""

    def __init__(self, spec: dict[str, Any], player: Player) -> None:
        self._spec, self._player = spec, player
        self._began = 0.0
        self._steps: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._evaluate(model, 0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._steps.append(time.perf_counter() - self._began)
        self._write({"step_s": self._steps[-1]})
        if state.global_step % self._spec["every"] == 0 or state.global_step == self._spec["steps"]:
            self._evaluate(model, state.global_step)

    def _evaluate(self, model: Any, step: int) -> None:
        if not self._spec["episodes"]:
            return
        played = self._player.play(model, list(range(self._spec["episodes"])), held_out=True)
        success = sum(played["success"]) / len(played["success"])
        self._write({"step": step, "seconds": sum(self._steps), "success": success})

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=OUT, flush=True)


def single_turn(spec: dict[str, Any], player: Player) -> dict[str, Any]:
    """A dataset whose prompts are already text, so that both sides train on the same tokens."""
    env = make_env(spec, held_out=False)
    seeds = list(range(spec["steps"] * spec["groups"]))
    prompts = [player._tokenizer.decode(player.render(env.reset(seed))) for seed in seeds]

    def reward(completions: list[str], seed: list[int], **_: Any) -> list[float]:
        envs = [make_env(spec, held_out=False) for _ in seed]
        for one, number in zip(envs, seed, strict=True):
            one.reset(number)
        return [float(one.step(text)["reward"]) for one, text in zip(envs, completions, strict=True)]

    return {"train_dataset": Dataset.from_dict({"prompt": prompts, "seed": seeds}), "reward_funcs": reward}


def multi_turn(spec: dict[str, Any], player: Player) -> dict[str, Any]:
    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        played = player.play(model, [int(prompt) for prompt in prompts], held_out=False)
        return {
            "prompt_ids": played["prompt"],
            "completion_ids": played["completion"],
            "logprobs": None,
            "env_mask": played["mask"],
            "played_reward": played["reward"],
        }

    def reward(completions: list[str], played_reward: list[float], **_: Any) -> list[float]:
        return played_reward

    seeds = [str(seed) for seed in range(spec["steps"] * spec["groups"])]
    return {
        "train_dataset": Dataset.from_dict({"prompt": seeds}),
        "reward_funcs": reward,
        "rollout_func": rollout,
    }


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout = sys.stderr  # what TRL prints goes elsewhere
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    player = Player(spec, tokenizer)
    batch = spec["groups"] * spec["group_size"]
    config = GRPOConfig(
        output_dir=str(Path(sys.argv[1]).with_suffix("")),
        max_steps=spec["steps"],
        per_device_train_batch_size=batch // spec["passes"],
        gradient_accumulation_steps=spec["passes"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_tokens"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        adam_beta2=spec["beta2"],
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=spec["bf16"],
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=spec["seed"],
    )
    way = single_turn if spec["max_turns"] == 1 else multi_turn
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        args=config,
        processing_class=tokenizer,
        callbacks=[Watch(spec, player)],
        **way(spec, player),
    )
    trainer.train()
