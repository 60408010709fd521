"""The other side of `trainer.py`: TRL's training step on given completions, in an environment of its own (`make trl`).

It reads a batch, then runs one step for each line of its input and prints what the step took. Only generation and
rewards are replaced: shuffling, splitting, loss, backward pass, clipping and optimizer are TRL's. Nothing of rollart is
imported, since that environment does not have it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad


class GivenCompletions(GRPOTrainer):  # type: ignore[misc]
    """Trains on `given`: for each sequence tokens, mask and advantage. What comes before the first generated token is
    the prompt; tokens that were observed later are TRL's tool tokens."""

    given: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        starts = [row["mask"].index(1) for row in self.given]
        rows = list(zip(self.given, starts, strict=True))
        prompts = [torch.tensor(row["tokens"][:start]) for row, start in rows]
        completions = [torch.tensor(row["tokens"][start:]) for row, start in rows]
        tool_mask = pad([torch.tensor(row["mask"][start:]) for row, start in rows], padding_value=0)
        return {
            "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
            "prompt_mask": pad([torch.ones_like(one) for one in prompts], padding_value=0, padding_side="left"),
            "completion_ids": pad(completions, padding_value=0),
            "completion_mask": pad([torch.ones_like(one) for one in completions], padding_value=0),
            "advantages": torch.tensor([row["advantage"] for row in self.given]),
            "num_items_in_batch": tool_mask.sum(),
            "tool_mask": tool_mask,
        }


def make_trainer(folder: Path, given: list[dict[str, Any]], rows: int) -> GivenCompletions:
    passes = len(given) // rows
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        num_generations=8,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    vocabulary = {"<pad>": 0, "<eos>": 1, "x": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="x")), pad_token="<pad>", eos_token="<eos>"
    )
    trainer = GivenCompletions(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(given)}),
        processing_class=tokenizer,
    )
    trainer.given = given
    trainer.current_gradient_accumulation_steps = passes
    trainer.create_optimizer()
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model.train()
    return trainer


def step(trainer: GivenCompletions) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    loss = 0.0
    for _ in range(trainer.args.gradient_accumulation_steps):
        loss += trainer.training_step(trainer.model, [{}], None).item()
    norm = float(trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "loss": loss, "norm": norm}


def serve(folder: str, batch: str, rows: int, threads: int) -> None:
    torch.set_num_threads(threads)
    out, sys.stdout = sys.stdout, sys.stderr  # what TRL prints goes elsewhere
    trainer = make_trainer(Path(folder), json.loads(Path(batch).read_text()), rows)
    for _ in sys.stdin:
        print(json.dumps(step(trainer)), file=out, flush=True)
