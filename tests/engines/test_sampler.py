import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_decoders import request

from rollart.engines.torch.kernels import CompiledKernels, kernels_for
from rollart.engines.torch.kv_rows import KVLayout
from rollart.engines.torch.sampler import draw, keep_top, mix_seed, sample, uniforms
from rollart.engines.torch.sequence import accepted

GOLDEN = [0.490537, 0.45856, 0.865323]


def numbers(seed: int, count: int) -> np.ndarray:
    seeds = np.full(count, mix_seed(seed), dtype=np.uint64)
    return uniforms(seeds, np.arange(count, dtype=np.uint64))


def test_random_numbers_are_even_and_streams_of_neighbouring_seeds_are_unrelated() -> None:
    first, second = numbers(1, 20_000), numbers(2, 20_000)
    assert first.min() >= 0 and first.max() < 1
    counts = np.histogram(first, bins=20, range=(0, 1))[0]
    assert abs(counts - 1000).max() < 150
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03


def test_random_numbers_stay_the_same_for_ever_so_that_old_runs_replay() -> None:
    assert [round(float(number), 6) for number in numbers(7, 3)] == GOLDEN


def test_an_even_grid_of_numbers_gives_every_token_its_share() -> None:
    logits = torch.tensor([[0.1, 2.0, -1.0, 0.7, -30.0]])
    count = 4096
    tokens, logprobs = draw(logits.expand(count, -1), (torch.arange(count) + 0.5) / count)
    shares = torch.bincount(tokens, minlength=5) / count
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=1 / count, rtol=0)
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[tokens])


def test_the_ends_of_the_unit_interval_never_give_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]] * 2)
    tokens, logprobs = draw(logits, torch.tensor([0.0, 1 - 2**-24]))
    assert tokens.tolist() == [1, 2]
    assert torch.isfinite(logprobs).all()


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0.05, 1.0)), min_size=1, max_size=6), st.integers(0, 999))
def test_top_k_and_top_p_keep_the_fewest_best_tokens_that_suffice(knobs: list[tuple[int, float]], seed: int) -> None:
    logits = torch.randn((len(knobs), 10), generator=torch.Generator().manual_seed(seed))
    top_k, top_p = torch.tensor([k for k, _ in knobs]), torch.tensor([p for _, p in knobs])
    for row, kept in enumerate(keep_top(logits, top_k, top_p)):
        k, p = knobs[row]
        order = logits[row].argsort(descending=True)[: k or None]
        probabilities = logits[row][order].softmax(-1)
        wanted, mass = [], 0.0
        for token, probability in zip(order.tolist(), probabilities.tolist(), strict=True):
            if mass >= p - 1e-6 and p < 1:
                break
            wanted.append(token)
            mass += probability
        assert torch.isfinite(kept).nonzero().flatten().tolist() == sorted(wanted)
        assert torch.equal(kept[wanted], logits[row][wanted])


def test_a_row_is_sampled_the_same_whatever_stands_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    settings = [{}, {"top_k": 3}, {"temperature": 0.5}, {"top_p": 0.6, "temperature": 2.0}, {"temperature": 0.0}]
    rows = [
        accepted(request(str(index), [1], seed=index, **setting), vocabulary=40, context=99, seed=0)
        for index, setting in enumerate(settings)
    ]
    logits = torch.randn((len(rows), 40), generator=generator)
    together = sample(logits, rows)
    for index, row in enumerate(rows):
        token, logprob = sample(logits[index : index + 1], [row])
        assert token.item() == together[0][index].item()
        assert abs(logprob.item() - together[1][index].item()) < 1e-6
    assert together[0][4] == logits[4].argmax() and together[1][4] == 0


@pytest.mark.parametrize("vocabulary", [5, 256, 300, 1031])
def test_compiled_draws_are_those_of_the_operators(vocabulary: int) -> None:
    layout = KVLayout(tensors=2, heads=1, dim=8, dtype=torch.float32, device=torch.device("cpu"))
    compiled = kernels_for(layout, heads=2)
    assert isinstance(compiled, CompiledKernels)
    logits = 3 * torch.randn((64, vocabulary), generator=torch.Generator().manual_seed(vocabulary))
    logits[1::2, vocabulary // 2 :] = -torch.inf
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(1))
    uniform[:4] = torch.tensor([0.0, 0.0, 1 - 2**-24, 1 - 2**-24])
    tokens, logprobs = compiled.draw(logits, uniform)
    expected, expected_logprobs = draw(logits, uniform)
    assert (tokens == expected).sum() >= 63  # a number on the edge of two tokens may round to either
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], atol=1e-5, rtol=0)
    assert torch.isfinite(logprobs).all()
    assert not torch.isfinite(compiled.draw(torch.full((1, 300), torch.nan), torch.tensor([0.5]))[1]).any()
