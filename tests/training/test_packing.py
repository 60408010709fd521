import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCABULARY, save_tiny, tiny_model

from rollart.training import score
from rollart.training.packing import families, pack, plan, split_over_ranks
from rollart.training.policy import PolicyModel

ARCHITECTURES = ("qwen3", "llama", "qwen3_moe")


def sequences(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def all_but_first(rows: list[list[int]]) -> list[list[int]]:
    return [[0] + [1] * (len(row) - 1) for row in rows]


def packed_logits(policy: PolicyModel, rows: list[list[int]]) -> torch.Tensor:
    packed = pack(rows, [[0] * len(row) for row in rows])
    states = policy.model.base_model(input_ids=packed.tokens, position_ids=packed.positions, packed=packed)
    return policy.model.get_output_embeddings()(states.last_hidden_state)[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logits_are_those_of_each_sequence_alone(architecture: str, tmp_path: Path) -> None:
    rows = sequences(17, 1, 40, 2, 17)
    model = tiny_model(architecture)
    policy = PolicyModel(save_tiny(tmp_path, architecture))
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
        assert (packed_logits(policy, rows) - alone).abs().max() < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_gradients_are_those_of_each_sequence_alone(architecture: str, tmp_path: Path) -> None:
    rows = sequences(9, 3, 21)
    model = tiny_model(architecture)
    policy = PolicyModel(save_tiny(tmp_path, architecture))
    policy.logprobs(pack(rows, all_but_first(rows)))[0].sum().backward()
    for row in rows:
        logits = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        logits.gather(-1, torch.tensor(row[1:])[:, None]).sum().backward()
    expected = dict(model.named_parameters())
    for name, parameter in policy.parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-4)


def a_group(prompt: int, *answers: int) -> tuple[list[list[int]], list[list[int]]]:
    """Sequences that begin with the same prompt, and one of another, with what is trained of them: not every token."""
    (start,) = sequences(prompt)
    rows = [start + answer for answer in sequences(*answers)] + [sequences(prompt + 3)[0][::-1]]
    return rows, [[0] * prompt + [1] + [at % 3 > 0 for at in range(len(row) - prompt - 1)] for row in rows]


@pytest.mark.parametrize("options", [{}, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}])
def test_a_shared_prompt_changes_neither_logprobs_nor_gradients(options: dict[str, object], tmp_path: Path) -> None:
    policy = PolicyModel(save_tiny(tmp_path, **options))
    rows, masks = a_group(9, 4, 12, 1, 7)

    def run(share: bool) -> list[torch.Tensor]:
        policy.model.zero_grad()
        packed = pack(rows, masks, share=share)
        assert packed.tokens.shape[1] == sum(map(len, rows)) - (3 * 9 if share else 0)
        logprobs, entropy = policy.logprobs(packed)
        (logprobs.sin() + entropy).sum().backward()
        return [logprobs, entropy, *(each.grad.clone() for each in policy.parameters().values())]

    for shared, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(shared, expected, atol=1e-5, rtol=1e-5)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 60)), max_size=30),
    st.integers(1, 400),
    st.integers(1, 3),
)
def test_what_shares_a_prompt_comes_together_within_the_bound(
    drawn: list[tuple[int, int, int]], bound: int, ranks: int
) -> None:
    tokens = [np.array([kind] * prompt + [9] * answer) for kind, prompt, answer in drawn]
    masks = [np.array([0] * prompt + [1] * answer) for _, prompt, answer in drawn]
    units = families(tokens, masks, bound)
    assert sorted(index for unit in units for index in unit) == list(range(len(drawn)))
    for unit in units:
        assert len({drawn[index][:2] for index in unit}) == 1
    hands = split_over_ranks([len(each) for each in tokens], bound, ranks, units)
    parts = [part for passes in hands for part in passes]
    assert sorted(index for part in parts for index in part) == list(range(len(drawn)))
    assert len({len(passes) for passes in hands}) == 1
    assert all(any(set(unit) <= set(part) for part in parts) for unit in units)
    for part in parts:
        assert len(part) <= 1 or sum(len(tokens[index]) for index in part) <= bound


def test_a_sliding_window_is_respected(tmp_path: Path) -> None:
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    model = tiny_model(**options)
    policy = PolicyModel(save_tiny(tmp_path, **options))
    rows = sequences(20, 3, 12)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
        assert (packed_logits(policy, rows) - alone).abs().max() < 1e-5


def test_sequences_of_one_length_need_no_grid() -> None:
    packed = pack(sequences(6, 6), [[0] * 6] * 2)
    assert packed.grid is None
    assert packed.slots is None


def test_only_the_masked_tokens_are_targets() -> None:
    packed = pack([[5, 6, 7, 8], [9, 10]], [[0, 1, 0, 1], [0, 1]])
    assert packed.targets.tolist() == [6, 8, 10]
    assert packed.predict.tolist() == [0, 2, 4]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1]]


def test_the_first_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="first token"):
        pack([[1, 2], [3, 4]], [[0, 1], [1, 0]])


def test_chunked_logprobs_and_gradients_are_those_of_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyModel(save_tiny(tmp_path))
    rows = sequences(15, 8)
    packed = pack(rows, all_but_first(rows))

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        policy.model.zero_grad()
        logprobs, entropy = policy.logprobs(packed)
        (logprobs.sum() + entropy.sum()).backward()
        return logprobs, entropy, policy.model.get_output_embeddings().weight.grad.clone()

    whole = run()
    monkeypatch.setattr(score, "scorer_rows", lambda columns: 4)
    for chunked, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(chunked, expected)


def test_entropy_by_hand(tmp_path: Path) -> None:
    policy = PolicyModel(save_tiny(tmp_path))
    policy.model.get_output_embeddings().weight.data.zero_()
    logprobs, entropy = policy.logprobs(pack([[1, 2, 3]], [[0, 1, 1]]))
    uniform = torch.full((2,), float(VOCABULARY)).log()
    torch.testing.assert_close(entropy, uniform)
    torch.testing.assert_close(logprobs, -uniform)


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 2000))
def test_a_plan_holds_every_sequence_once_within_the_bound(lengths: list[int], bound: int) -> None:
    batches = plan(lengths, bound)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        packed = pack([[0] * lengths[index] for index in batch], [[0] * lengths[index] for index in batch])
        assert len(batch) == 1 or sum(rows * width for rows, width in packed.bands) <= bound


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 2000), st.integers(1, 5))
def test_ranks_are_dealt_as_many_passes_and_about_as_many_tokens(lengths: list[int], bound: int, ranks: int) -> None:
    hands = split_over_ranks(lengths, bound, ranks)
    assert sorted(index for passes in hands for part in passes for index in part) == list(range(len(lengths)))
    assert len({len(passes) for passes in hands}) == 1
    for part in (part for passes in hands for part in passes):
        assert len(part) <= 1 or sum(lengths[index] for index in part) <= bound
    tokens = [sum(lengths[index] for part in passes for index in part) for passes in hands]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 2000))
def test_one_rank_is_dealt_the_plan(lengths: list[int], bound: int) -> None:
    assert split_over_ranks(lengths, bound, 1) == [plan(lengths, bound)]
