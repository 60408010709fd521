"""Tokens per second of a training step, against a plain padded transformers step on the same data, in the same run.

    python benchmarks/trainer.py

The two take turns, and the median of each is compared. The last line is one JSON object.
"""

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollart.config import TrainingConfig
from rollart.core.types import Batch, Sample, SampleGroup
from rollart.training.trainer import Trainer

VOCABULARY, GROUP = 100, 8


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_sample(number: int, length: int, draw: random.Random) -> Sample:
    """Turns of 20 observed and 8 generated tokens."""
    mask = [int(position % 28 >= 20) for position in range(length)]
    return Sample(
        id=str(number),
        task="bench",
        tokens=[draw.randrange(VOCABULARY) for _ in range(length)],
        mask=mask,
        logprobs=[-4.6] * length,
        versions=[0] * length,
        reward=draw.random(),
    )


def make_groups(sequences: int) -> tuple[SampleGroup, ...]:
    draw = random.Random(0)
    samples = [make_sample(number, draw.randint(30, 400), draw) for number in range(sequences)]
    return tuple(
        SampleGroup(str(start), "bench", tuple(samples[start : start + GROUP])) for start in range(0, sequences, GROUP)
    )


class PlainStep:
    """What one writes first: pad to the longest in the micro-batch, mask, take the logits of every position."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.rows = rows

    def __call__(self, groups: tuple[SampleGroup, ...]) -> None:
        samples: list[Sample] = []
        advantages: list[float] = []
        for group in groups:
            rewards = torch.tensor([sample.reward for sample in group.samples])
            samples += group.samples
            advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        total = sum(sum(sample.mask) for sample in samples)
        for start in range(0, len(samples), self.rows):
            part = samples[start : start + self.rows]
            width = max(len(sample.tokens) for sample in part)
            tokens = torch.tensor([sample.tokens + [0] * (width - len(sample.tokens)) for sample in part])
            seen = torch.tensor([[1] * len(sample.tokens) + [0] * (width - len(sample.tokens)) for sample in part])
            mask = torch.tensor([sample.mask + [0] * (width - len(sample.mask)) for sample in part])[:, 1:]
            old = torch.tensor([sample.logprobs + [0.0] * (width - len(sample.tokens)) for sample in part])[:, 1:]
            logits = self.model(input_ids=tokens, attention_mask=seen).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            advantage = torch.tensor(advantages[start : start + self.rows])[:, None]
            ratio = (logprobs - old).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            torch.autograd.backward((loss * mask).sum() / total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(
    sequences: int = 128, rounds: int = 5, threads: int = 1, pack_tokens: int = 0, rows: int = 16, smoke: bool = False
) -> None:
    if smoke:  # tiny sizes, to check that it runs
        sequences, rounds = 16, 1
    torch.set_num_threads(threads)
    groups = make_groups(sequences)
    tokens = sum(len(sample.tokens) for group in groups for sample in group.samples)
    config = TrainingConfig(threads=threads, **({"pack_tokens": pack_tokens} if pack_tokens else {}))
    times: dict[str, list[float]] = {"rollart": [], "padded": []}
    with tempfile.TemporaryDirectory() as root:
        make_model(Path(root))
        trainer, plain = Trainer(Path(root), config), PlainStep(Path(root), rows)
        for turn in range(rounds + 1):
            began = time.process_time()
            trainer.step(Batch(turn, groups))
            middle = time.process_time()
            plain(groups)
            ended = time.process_time()
            if turn > 0:
                times["rollart"].append(middle - began)
                times["padded"].append(ended - middle)
    ours, theirs = statistics.median(times["rollart"]), statistics.median(times["padded"])
    print(
        json.dumps(
            {
                "sequences": sequences,
                "tokens": tokens,
                "tokens_per_s": round(tokens / ours),
                "padded_tokens_per_s": round(tokens / theirs),
                "vs_padded": round(theirs / ours, 2),
                "pack_tokens": config.pack_tokens,
                "threads": threads,
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
