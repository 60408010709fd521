"""What a vLLM server tells of itself in `/metrics`, in the text format of Prometheus."""

import re
from dataclasses import dataclass

_LINE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total|prompt_tokens_total|"
    r"prefix_cache_hits_total|external_prefix_cache_hits_total)\{[^}]*\} (\S+)$",
    re.MULTILINE,
)
_TOKENS = re.compile(r'^vllm:cache_config_info\{.*\bkv_cache_size_tokens="(\d+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gauges:
    """`kv_use` is the share of its KV memory that running requests hold, `kv_tokens` what all of it has room for, 0 if
    the server does not tell. Tokens count from the server's start: those of prompts, and how many of these were found
    in its own cache or `fetched` from another server."""

    running: int
    waiting: int
    kv_use: float
    kv_tokens: int
    generated: int
    prompted: int
    cached: int
    fetched: int

    @property
    def prefilled(self) -> int:
        return self.prompted - self.cached - self.fetched


def read(text: str) -> Gauges:
    """Sums over all of the server's engines; the largest share of KV in use."""
    values: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        values.setdefault(name, []).append(float(value))

    def total(name: str) -> int:
        return int(sum(values.get(name, ())))

    return Gauges(
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        kv_use=max(values.get("kv_cache_usage_perc", (0.0,))),
        kv_tokens=sum(map(int, _TOKENS.findall(text))),
        generated=total("generation_tokens_total"),
        prompted=total("prompt_tokens_total"),
        cached=total("prefix_cache_hits_total"),
        fetched=total("external_prefix_cache_hits_total"),
    )
