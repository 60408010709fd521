from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollart.config import TinyModelConfig
from rollart.models import tiny

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}


def small(architecture: str) -> TinyModelConfig:
    return TinyModelConfig.model_validate(SMALL | {"architecture": architecture})


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_the_auto_classes_load_what_was_made(architecture: str, tmp_path: Path) -> None:
    tiny.make(small(architecture), tmp_path / "model", seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.model_type == architecture
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answer.shape == (1, prompt["input_ids"].shape[1] + 4)


def test_the_same_seed_makes_the_same_folder(tmp_path: Path) -> None:
    first, again, other = (
        contents(tiny.make(small("qwen3"), tmp_path / str(number), seed)) for number, seed in enumerate((7, 7, 8))
    )
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]


def test_making_a_model_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    tiny.make(small("qwen3"), tmp_path / "model", seed=1)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_a_fresh_model_is_nearly_undecided(architecture: str, tmp_path: Path) -> None:
    tiny.make(small(architecture), tmp_path / "model", seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.randint(0, model.config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        likely = model(tokens).logits.softmax(-1).amax(-1)
    assert likely.median() < 0.25


def test_a_turn_costs_two_tokens_and_an_action_its_end(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(64)
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
    assert len(ids) == len("abc" + "d") + 2 + 1


def test_every_printable_character_has_its_own_token() -> None:
    tokenizer = tiny.tokenizer(64)
    ids = tokenizer.encode(tiny.CHARACTERS)
    assert len(set(ids)) == len(tiny.CHARACTERS) == 96
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == tiny.CHARACTERS
