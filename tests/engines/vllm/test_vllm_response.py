import base64
import io
from typing import Any

import numpy as np
import pytest

from rollart.core.errors import EngineFailed
from rollart.core.expert_choice import ChoiceShape, ExpertChoices
from rollart.engines.vllm.api import parse_metrics
from rollart.engines.vllm.response import (
    Choice,
    CompletionBuilder,
    GenerateResponse,
    Logprobs,
    PromptDetails,
    TokenLogprob,
    TokenUsage,
    VersionSpan,
)

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 1.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="policy"} 1e+03
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 300.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="policy"} 50.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 77.0
vllm:generation_tokens_created{engine="0",model_name="policy"} 1.79e+09
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="262144",num_gpu_blocks="8192"} 1.0
"""


def part(tokens: list[int], finish: str | None = None, spans: list[VersionSpan] | None = None) -> GenerateResponse:
    logprobs = Logprobs([TokenLogprob(token, -token / 10) for token in tokens])
    return GenerateResponse([Choice(tokens, finish, logprobs, spans)])


def test_the_parts_of_an_answer_become_one_completion_whose_tokens_have_their_versions() -> None:
    answer = CompletionBuilder(prompt=40)
    answer.add(part([5]))
    answer.add(part([6, 7], "stop", [VersionSpan("3", 0, 1), VersionSpan("4", 1, 3)]))
    answer.add(GenerateResponse(usage=TokenUsage(40, PromptDetails(32))))
    made = answer.completion()
    assert (made.tokens, made.versions, made.finish) == ([5, 6, 7], [3, 4, 4], "stop")
    assert made.logprobs == pytest.approx([-0.5, -0.6, -0.7])
    assert (made.prompt, made.cached, made.fetched) == (40, 32, 0)


def test_an_aborted_request_without_a_token_is_an_empty_completion() -> None:
    answer = CompletionBuilder(prompt=4)
    answer.add(GenerateResponse([Choice([], "abort", Logprobs([]), [])]))
    assert (answer.completion().tokens, answer.completion().finish) == ([], "abort")


@pytest.mark.parametrize(
    ("answer", "reported"),
    [
        (part([5], "stop", [VersionSpan("default", 0, 1)]), "the label 'default', which is not a version"),
        (part([5, 6], "stop", [VersionSpan("1", 0, 1)]), "of 1 of 2 tokens"),
        (part([5], "stop", None), "of 0 of 1 tokens"),
        (part([5], "error", [VersionSpan("1", 0, 1)]), "unknown reason: error"),
        (GenerateResponse([Choice([5], "stop", None, [VersionSpan("1", 0, 1)])]), "0 logprobs for 1 tokens"),
    ],
)
def test_what_could_not_be_trained_on_is_a_failure(answer: GenerateResponse, reported: str) -> None:
    assembled = CompletionBuilder(prompt=4)
    assembled.add(answer)
    with pytest.raises(EngineFailed, match=reported):
        assembled.completion()


def test_gauges_are_summed_over_the_engines_of_a_server() -> None:
    gauges = parse_metrics(METRICS)
    assert (gauges.running, gauges.waiting, gauges.kv_use, gauges.kv_tokens) == (4, 2, 0.5, 262144)
    assert (gauges.prefilled, gauges.cached, gauges.fetched, gauges.generated) == (650, 300, 50, 77)


def test_a_server_that_tells_nothing_has_nothing() -> None:
    assert parse_metrics("").running == 0 and parse_metrics("").kv_use == 0.0


@pytest.mark.parametrize(("experts", "sent", "width"), [(8, np.uint8, 1), (256, np.uint8, 2), (512, np.uint16, 2)])
def test_experts_come_as_a_numpy_file_and_ids_with_all_bits_set_stay_free(experts: int, sent: Any, width: int) -> None:
    """vLLM uses one byte for 256 experts; with us, all ones are an expert that is not known."""
    file = io.BytesIO()
    np.save(file, np.array([[[0, experts - 1]] * 3] * 4, sent))
    last = Choice([9], "stop", Logprobs([TokenLogprob(9, -1.0)]), [VersionSpan("0", 0, 1)])
    last.routed_experts = base64.b64encode(file.getvalue()).decode()
    answer = CompletionBuilder(prompt=40, experts=experts, experts_known=36)
    answer.add(GenerateResponse([last]))
    row = (0).to_bytes(width, "little") + (experts - 1).to_bytes(width, "little")
    assert answer.completion().experts == ExpertChoices(36, ChoiceShape(3, 2, width), row * 12)
