import pytest

from rollart.core.errors import EngineFailed
from rollart.engines.vllm.answer import Assembled
from rollart.engines.vllm.api import Answer, Choice, Chosen, Details, Logprobs, Span, Usage
from rollart.engines.vllm.gauges import read

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


def part(tokens: list[int], finish: str | None = None, spans: list[Span] | None = None) -> Answer:
    logprobs = Logprobs([Chosen(token, -token / 10) for token in tokens])
    return Answer([Choice(tokens, finish, logprobs, spans)])


def test_the_parts_of_an_answer_become_one_completion_whose_tokens_have_their_versions() -> None:
    answer = Assembled(prompt=40)
    answer.add(part([5]))
    answer.add(part([6, 7], "stop", [Span("3", 0, 1), Span("4", 1, 3)]))
    answer.add(Answer(usage=Usage(40, Details(32))))
    made = answer.completion()
    assert (made.tokens, made.versions, made.finish) == ([5, 6, 7], [3, 4, 4], "stop")
    assert made.logprobs == pytest.approx([-0.5, -0.6, -0.7])
    assert (made.prompt, made.cached, made.fetched) == (40, 32, 0)


def test_an_aborted_request_without_a_token_is_an_empty_completion() -> None:
    answer = Assembled(prompt=4)
    answer.add(Answer([Choice([], "abort", Logprobs([]), [])]))
    assert (answer.completion().tokens, answer.completion().finish) == ([], "abort")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (part([5], "stop", [Span("default", 0, 1)]), "the label 'default', which is no version"),
        (part([5, 6], "stop", [Span("1", 0, 1)]), "of 1 of 2 tokens"),
        (part([5], "stop", None), "of 0 of 1 tokens"),
        (part([5], "error", [Span("1", 0, 1)]), "not known here: error"),
        (Answer([Choice([5], "stop", None, [Span("1", 0, 1)])]), "0 logprobs for 1 tokens"),
    ],
)
def test_what_could_not_be_trained_on_is_a_failure(answer: Answer, told: str) -> None:
    assembled = Assembled(prompt=4)
    assembled.add(answer)
    with pytest.raises(EngineFailed, match=told):
        assembled.completion()


def test_gauges_are_summed_over_the_engines_of_a_server() -> None:
    gauges = read(METRICS)
    assert (gauges.running, gauges.waiting, gauges.kv_use, gauges.kv_tokens) == (4, 2, 0.5, 262144)
    assert (gauges.prefilled, gauges.cached, gauges.fetched, gauges.generated) == (650, 300, 50, 77)


def test_a_server_that_tells_nothing_has_nothing() -> None:
    assert read("").running == 0 and read("").kv_use == 0.0
