"""The vLLM side of `engine.py`, in an environment of its own (`make vllm`): each line of its input asks for a batch.

Prints the CPU seconds of each call, of all threads. Nothing of rollart is imported, since that environment does not
have it.
"""

import json
import os
import sys
import time


def serve(folder: str, rows: int, eager: bool) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    if eager:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    out, sys.stdout = sys.stdout, sys.stderr
    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=eager,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=512 << 20,
        block_size=32,
        enable_prefix_caching=True,
    )
    for line in sys.stdin:
        ask = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in ask["prompts"]]
        settings = SamplingParams(
            max_tokens=ask["count"], temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True
        )
        began = time.process_time()
        llm.generate(prompts, settings, use_tqdm=False)
        print(json.dumps(time.process_time() - began), file=out, flush=True)
