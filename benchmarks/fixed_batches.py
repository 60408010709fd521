"""The part of `engine.py` with fixed batches: the engine, vLLM and transformers' continuous batching by turns, and the
share of the roofline that the engine reaches.

All requests of a batch have the same lengths and are there from the start, so nobody waits for anybody. All three
return log probabilities except transformers, which makes none.
"""

import asyncio
import json
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from rollart.config import EngineConfig
from rollart.core.types import GenerationRequest, Sampling
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel

PROMPT = 32
SERVE = "import sys; from benchmarks.engine_vllm import serve; serve(sys.argv[1], int(sys.argv[2]), sys.argv[3] == '1')"


@dataclass(frozen=True, slots=True)
class Machine:
    """Of one thread, measured: the fastest of several sizes counts."""

    flops: float
    bytes_s: float

    @classmethod
    def measure(cls) -> "Machine":
        square = torch.randn(512, 512)
        flops = max(2 * 512**3 / _seconds(lambda: square @ square) for _ in range(5))
        large = torch.randn(1 << 24)
        return cls(flops, max(large.nbytes / _seconds(lambda: large.sum()) for _ in range(5)))

    def least_seconds(self, network: Any, batch: int, count: int) -> float:
        """What `batch` requests must take at least: a prefill of all but the last token of their prompts, without head
        and last layer, then `count` steps. In each, weights and KV are read once and all products are computed."""
        config, weights = network.config, sum(one.numel() for one in network.parameters())
        layers = weights - network.get_input_embeddings().weight.numel()
        before = layers * (config.num_hidden_layers - 1) / config.num_hidden_layers
        context = PROMPT + count / 2
        kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context * batch
        attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context * batch
        prefill = self._pass_seconds(2 * before * batch * (PROMPT - 1), before)
        return prefill + count * self._pass_seconds(2 * weights * batch + attention, weights + kv)

    def _pass_seconds(self, operations: float, numbers: float) -> float:
        return max(operations / self.flops, 4 * numbers / self.bytes_s)


def _seconds(call: Any) -> float:
    call()
    began = time.process_time()
    for _ in range(4):
        call()
    return (time.process_time() - began) / 4


class Vllm:
    """A vLLM process with one thread; compiled, unless `eager`."""

    def __init__(self, python: Path, folder: Path, rows: int, eager: bool) -> None:
        root = Path(__file__).resolve().parent.parent
        environment = {
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
            "HOME": str(Path.home()),
        }
        self._log: IO[str] = (folder / "vllm.log").open("w")
        self._process = subprocess.Popen(
            [str(python), "-c", SERVE, str(folder), str(rows), str(int(eager))],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def seconds(self, prompts: list[list[int]], count: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended; the end of its log:\n{Path(self._log.name).read_text()[-2000:]}")
        return float(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def engine_seconds(model: EngineModel, prompts: list[list[int]], count: int) -> float:
    async def main() -> float:
        async with TorchEngine(model, EngineConfig(max_batch=max(8, len(prompts)), kv_megabytes=1024)) as engine:
            asked = [
                GenerationRequest(str(n), str(n), "bench", 0, prompt, Sampling(max_tokens=count, seed=n))
                for n, prompt in enumerate(prompts)
            ]
            began = time.process_time()
            await asyncio.gather(*map(engine.generate, asked))
            return time.process_time() - began

    return asyncio.run(main())


def batching_seconds(plain: Any, prompts: list[list[int]], count: int) -> float:
    """transformers' continuous batching, with as many blocks as the batch needs."""
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=count, pad_token_id=0
    )
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=(len(prompts) + 1) * -(-(PROMPT + count) // 32), max_batch_tokens=512
    )
    began = time.process_time()
    plain.generate_batch(inputs=prompts, generation_config=settings, continuous_batching_config=config)
    return time.process_time() - began


def fixed_batches(
    model: EngineModel,
    plain: Any,
    *,
    sizes: tuple[int, ...],
    count: int,
    rounds: int,
    vllm: Vllm | None,
    batching: bool = True,
) -> dict[str, Any]:
    """By batch size: tokens per CPU second, speed against the others, share of the roofline."""
    machine, rng = Machine.measure(), random.Random(0)
    result: dict[str, Any] = {"gflops": round(machine.flops / 1e9, 1), "gb_s": round(machine.bytes_s / 1e9, 1)}
    for size in sizes:
        best: dict[str, float] = {}
        for _ in range(rounds + 1):  # the first one warms up
            prompts = [[rng.randrange(1, model.vocabulary) for _ in range(PROMPT)] for _ in range(size)]
            made = {
                "engine": engine_seconds(model, prompts, count),
                **({"hf_batching": batching_seconds(plain, prompts, count)} if batching else {}),
                **({} if vllm is None else {"vllm": vllm.seconds(prompts, count)}),
            }
            best = {side: min(seconds, best.get(side, seconds)) for side, seconds in made.items()}
        least = machine.least_seconds(plain, size, count)
        result[str(size)] = {
            "tokens_per_s": round(size * count / best["engine"]),
            "roofline_share": round(least / best["engine"], 3),
            **({"vs_hf_batching": round(best["hf_batching"] / best["engine"], 2)} if batching else {}),
            **({"vs_vllm_cpu": round(best["vllm"] / best["engine"], 2)} if vllm else {}),
        }
    return result
