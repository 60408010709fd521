import random
import time
from typing import Any

import pytest
import torch
from steppers import engine, run, text
from tiny_decoders import ARCHITECTURES, VOCABULARY, decoder, request, worst

from rollart.core.errors import EngineFailed
from rollart.core.types import Completion, GenerationRequest
from rollart.engines.torch.kv_cache import FetchedKV
from rollart.engines.torch.sequence import EngineSequence


class Chaos:
    """Turns, evictions, chunks, aborts, shared prompts and weight swaps, all at once, from one seed."""

    def __init__(self, architecture: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.networks = {0: decoder(architecture, seed=100)}
        self.stepper = engine(
            self.networks[0], max_batch=6, prefill_chunk=self.rng.choice([7, 40, 200]), kv_megabytes=1
        )
        self.histories: dict[str, list[int]] = {}
        self.asked: dict[str, GenerationRequest] = {}
        self.done: list[tuple[GenerationRequest, Completion]] = []
        self.prompts = [text(self.rng, 40), text(self.rng, 70)]
        self.names = iter(range(10_000))
        self.architecture = architecture

    def ask(self) -> None:
        rng = self.rng
        busy = {asked.session for asked in self.asked.values()}
        idle = [session for session in self.histories if session not in busy]
        name = str(next(self.names))
        session = rng.choice(idle) if idle and rng.random() < 0.6 else f"s{name}"
        history = self.histories.get(session) or list(rng.choice(self.prompts))
        if rng.random() < 0.1:
            history = history[: rng.randrange(1, len(history) + 1)]
        tokens = history + text(rng, rng.randrange(0 if session not in self.histories else 1, 30))
        if len(tokens) > 400:
            del self.histories[session]
            return
        sampling = {
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([1.0, 1.0, 0.6]),
            "top_k": rng.choice([0, 0, 7]),
            "top_p": rng.choice([1.0, 1.0, 0.8]),
            "stop": tuple(text(rng, 1)),
        }
        self.asked[name] = request(name, tokens, session, **sampling)
        sequence = self.stepper.accept(self.asked[name])
        self.stepper.add(sequence, self.fetched(sequence) if rng.random() < 0.3 else None)

    def fetched(self, sequence: EngineSequence) -> FetchedKV | None:
        """A part of what is kv_cache here, as if it had been elsewhere: only the beginning is left."""
        kv_cache = self.stepper.kv_cache
        entry, length, version = kv_cache.find(sequence.session, sequence.tokens, sequence.blocks)
        if entry is None:
            return None
        start = self.rng.randrange(length)
        part = FetchedKV(version, start, entry.kv[:, :, start:length].clone())
        kv_cache.store(sequence.session, sequence.tokens[:start], entry.kv[:, :, :start].clone())
        return part

    def swap(self) -> None:
        version = len(self.networks)
        self.networks[version] = decoder(self.architecture, seed=100 + version)
        weights = self.stepper._model.prepare(self.networks[version].state_dict())
        self.stepper.swap(version, weights)

    def collect(self) -> None:
        for sequence in self.stepper.ended():
            asked, completion = self.asked.pop(sequence.id), sequence.completion()
            self.done.append((asked, completion))
            self.histories[asked.session] = asked.tokens + completion.tokens

    def play(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                if len(self.asked) < 16:
                    self.ask()
            if self.asked and self.rng.random() < 0.03:
                self.stepper.abort(self.rng.choice(list(self.asked)))
            if self.rng.random() < 0.02:
                self.swap()
            if self.stepper.busy:
                self.stepper.step()
            status = self.stepper.status()
            assert status.kv_bytes <= status.kv_budget
            self.collect()
        while self.stepper.busy:
            self.stepper.step()
        self.collect()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_a_plain_forward_pass_through_everything_at_once(architecture: str) -> None:
    chaos = Chaos(architecture, seed=sum(map(ord, architecture)))
    chaos.play(200)
    assert not chaos.asked
    finishes = {completion.finish for _, completion in chaos.done}
    mixed = [completion for _, completion in chaos.done if len(set(completion.versions)) > 1]
    reused = [completion for _, completion in chaos.done if completion.cached]
    fetched = [completion for _, completion in chaos.done if completion.fetched]
    assert finishes == {"stop", "length", "abort"} and mixed and reused and fetched
    assert chaos.stepper.kv_cache.evicted > 0
    gaps = [worst(chaos.networks, asked, completion) for asked, completion in chaos.done if completion.tokens]
    assert len(gaps) > 50
    assert max(gaps) <= 1e-4


def test_a_turn_prefills_only_what_is_new() -> None:
    network = decoder()
    stepper = engine(network)
    first = run(stepper, request("1", list(range(20)), "s", max_tokens=5))["1"]
    before = stepper.status().prefilled
    second = run(stepper, request("2", [*range(20), *first.tokens, 1, 2, 3], "s", max_tokens=5))["2"]
    assert (first.cached, second.cached, second.prompt) == (0, 24, 28)
    assert stepper.status().prefilled - before == 4


def test_the_same_prompt_again_leaves_one_token_to_compute() -> None:
    network = decoder()
    stepper = engine(network)
    asked = request("1", list(range(20)), "s", max_tokens=1, seed=1)
    once = run(stepper, asked)["1"]
    again = run(stepper, asked)["1"]
    assert again.cached == 19 and again.tokens == once.tokens


def test_members_of_a_group_that_arrive_together_prefill_their_prompt_once() -> None:
    network = decoder()
    stepper = engine(network)
    prompt = [index % VOCABULARY for index in range(100)]
    group = [request(str(member), prompt, max_tokens=8) for member in range(6)]
    done = run(stepper, *group)
    assert sorted(done[asked.id].cached for asked in group) == [0, 99, 99, 99, 99, 99]
    assert stepper.status().prefilled <= 100 + 5
    assert max(worst({0: network}, asked, done[asked.id]) for asked in group) <= 1e-4


def test_what_a_request_gets_does_not_depend_on_its_neighbours() -> None:
    network, rng = decoder(), random.Random(3)
    group = [request(str(index), text(rng, 10 + index), max_tokens=20, seed=index) for index in range(8)]
    together = run(engine(network, prefill_chunk=13), *group)
    for asked in group:
        assert run(engine(network), asked)[asked.id].tokens == together[asked.id].tokens


def test_requests_without_a_seed_differ_from_each_other_and_repeat_in_another_run() -> None:
    network = decoder()
    pair = [request(name, [1, 2, 3], max_tokens=12) for name in "ab"]
    first, again = run(engine(network), *pair), run(engine(network), *pair)
    assert first["a"].tokens != first["b"].tokens
    assert [first[name].tokens for name in "ab"] == [again[name].tokens for name in "ab"]


def test_an_abort_returns_the_tokens_so_far_and_leaves_the_neighbours_alone() -> None:
    network = decoder()
    pair = [request(name, [1, 2, 3], max_tokens=40, seed=ord(name)) for name in "ab"]
    alone = run(engine(network), pair[1])["b"]
    stepper = engine(network)
    for asked in pair:
        stepper.add(stepper.accept(asked))
    for _ in range(5):
        stepper.step()
    stepper.abort("a")
    stepper.abort("no such request")
    done = run(stepper)
    assert done["a"].finish == "abort" and len(done["a"].tokens) == len(done["a"].versions) == 5
    assert done["b"].tokens == alone.tokens and done["b"].finish == "length"


def test_more_requests_than_memory_all_get_served() -> None:
    network = decoder()
    stepper = engine(network, kv_megabytes=1, max_batch=64)
    token_bytes = stepper.rows.layout.token_bytes
    fit = (1 << 20) // (token_bytes * 400)
    rng = random.Random(0)
    group = [request(str(index), text(rng, 390), max_tokens=10) for index in range(3 * fit)]
    for asked in group:
        stepper.add(stepper.accept(asked))
    most = 0
    while stepper.busy:
        stepper.step()
        most = max(most, stepper.batch.size)
        assert stepper.status().kv_bytes <= stepper.budget
    assert most <= fit and len(stepper.ended()) == len(group)


def test_a_request_that_can_never_be_served_is_refused_with_the_reason() -> None:
    network = decoder()
    network.config.max_position_embeddings = 100_000
    stepper = engine(network, kv_megabytes=1)
    for bad, reason in (
        (request("1", [1] * 9000, max_tokens=10), "raise engine.kv_megabytes above 1"),
        (request("1", []), "no tokens"),
        (request("1", [VOCABULARY]), "vocabulary"),
        (request("1", [1], max_tokens=0), "max_tokens >= 1"),
        (request("1", [1], top_p=0.0), "top_p"),
        (request("1", [1] * 100_000), "context"),
    ):
        with pytest.raises(EngineFailed, match=reason):
            stepper.accept(bad)


def test_generation_ends_where_the_context_ends() -> None:
    done = run(engine(decoder()), request("1", [1] * 500, max_tokens=100))["1"]
    assert len(done.tokens) == 12 and done.finish == "length"


def test_logits_that_are_not_finite_fail_the_request_and_not_the_engine() -> None:
    network = decoder()
    stepper = engine(network)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in network.state_dict().items()}
    stepper.swap(1, stepper._model.prepare(broken))
    stepper.add(stepper.accept(request("1", [1, 2, 3])))
    stepper.step()
    [sequence] = stepper.ended()
    with pytest.raises(EngineFailed, match="version 1 of the model gave logits that are not finite"):
        sequence.completion()
    stepper.swap(2, stepper._model.prepare(network.state_dict()))
    assert len(run(stepper, request("2", [1, 2, 3], max_tokens=4))["2"].tokens) == 4


def test_a_prefill_parks_all_but_the_last_token_samples_nothing_and_shares_what_is_there() -> None:
    network = decoder()
    stepper = engine(network, prefill_chunk=20)
    prompt = [index % VOCABULARY for index in range(50)]
    stepper.add(stepper.accept_prefill(request("1", prompt, "s", max_tokens=10_000)))
    done = run(stepper)["1"]
    assert (done.tokens, done.logprobs, done.cached, done.prompt) == ([], [], 0, 49)
    status = stepper.status()
    assert (status.prefilled, status.generated, status.kv_reserved) == (49, 0, 0)
    stepper.add(stepper.accept_prefill(request("2", [*prompt, 1, 2, 3], "t")))
    assert run(stepper)["2"].cached == 49
    asked = request("3", prompt, "s", max_tokens=10, seed=1)
    generated = run(stepper, asked)["3"]
    assert generated.cached == 49 and worst({0: network}, asked, generated) <= 1e-4


def test_a_prefill_and_decoding_share_the_steps() -> None:
    network = decoder()
    stepper = engine(network, prefill_chunk=8)
    asked = request("1", [1, 2, 3], max_tokens=20, seed=1)
    stepper.add(stepper.accept(asked))
    stepper.step()
    stepper.add(stepper.accept_prefill(request("2", [5] * 60)))
    stepper.step()
    assert stepper.batch.size == 2 and stepper.batch.decoding == 1
    done = run(stepper)
    assert len(done["1"].tokens) == 20 and stepper.status().generated == 20
    assert worst({0: network}, asked, done["1"]) <= 1e-4


def test_prefill_lasts_from_admission_to_the_first_token_and_decoding_from_there_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that moves by one second a forward pass, and otherwise not at all."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stepper = engine(decoder(), prefill_chunk=10, max_batch=1)
    forward = stepper._model.forward

    def slow(step: Any) -> torch.Tensor:
        now[0] += 1.0
        return forward(step)

    def add(asked: GenerationRequest) -> None:
        sequence = stepper.accept(asked)
        sequence.arrived = now[0]
        stepper.add(sequence)

    monkeypatch.setattr(stepper._model, "forward", slow)
    add(request("1", [1] * 30, max_tokens=5))
    add(request("2", [2] * 20, max_tokens=3))
    done = run(stepper)
    # Three chunks, of which the last gives the first of five tokens; the second request waits for all that.
    assert (done["1"].queue_s, done["1"].prefill_s, done["1"].decode_s) == (0, 3, 4)
    assert (done["2"].queue_s, done["2"].prefill_s, done["2"].decode_s) == (7, 2, 2)
    assert stepper.status().busy_s == 11
    add(request("3", [3] * 30))
    add(request("4", [4] * 30))
    stepper.step()
    stepper.abort("3")
    now[0] += 5.0
    stepper.abort("4")
    ended = {sequence.id: sequence.completion() for sequence in stepper.ended()}
    now[0] += 5.0
    assert (ended["3"].queue_s, ended["3"].prefill_s, ended["3"].decode_s) == (0, 1, 0)
    assert (ended["4"].queue_s, ended["4"].prefill_s, ended["4"].decode_s) == (6, 0, 0)


def test_what_running_and_waiting_requests_may_grow_to_is_reserved() -> None:
    stepper = engine(decoder(), max_batch=1)
    size = stepper.rows.layout.token_bytes
    for name in "ab":
        stepper.add(stepper.accept(request(name, [1] * 30, max_tokens=20)))
    stepper.step()
    assert (stepper.status().running, stepper.status().waiting) == (1, 1)
    assert stepper.status().kv_reserved == 100 * size
    stepper.abort("a")
    assert stepper.status().kv_reserved == 50 * size
    run(stepper)
    assert stepper.status().kv_reserved == 0
