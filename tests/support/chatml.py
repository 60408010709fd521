"""A ChatML template and a byte-level BPE tokenizer with few merges."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_end|>", "<|im_start|>"]
MERGES = [("\u010a", "\u010a"), ("l", "l"), ("\u0120", "a"), ("u", "s"), ("us", "e"), ("use", "r")]


def byte_pairs(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges, so that text tokenizes differently when cut in the wrong place."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*SPECIAL, *alphabet, *("".join(merge) for merge in MERGES)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:], chat_template=template
    )
