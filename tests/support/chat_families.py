# ruff: noqa: E501
"""Small tokenizers with chat templates built as those of public model families are, written for these tests."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollart.models.tool_calls import CALL_BEGIN, CALL_END, CALL_SEPARATOR, CALLS_BEGIN, CALLS_END

BAR = "\uff5c"
DS_BOS, DS_EOS = f"<{BAR}begin\u2581of\u2581sentence{BAR}>", f"<{BAR}end\u2581of\u2581sentence{BAR}>"
DS_USER, DS_ASSISTANT = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"
DS_OUT, DS_OUT_END = f"<{BAR}tool\u2581output\u2581begin{BAR}>", f"<{BAR}tool\u2581output\u2581end{BAR}>"

# Tools in the system message; reasoning of earlier rounds is dropped; results side by side in one user turn.
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content or '' %}{%- set thought = '' %}
{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

# A system message is always there; content is trimmed; results have the role ipython and are JSON; one call at a time.
LLAMA3 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n' }}
{%- if tools %}{{- 'Respond with {"name": function name, "parameters": dictionary}.\\n\\n' }}{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role in ['tool', 'ipython'] %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# No end of turn: the next header is what the model stops at.
GLM = """{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n# Tools' }}{%- for t in tools %}{{- '\\n' + (t | tojson) }}{%- endfor %}{{- '\\n<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}{%- if enable_thinking is defined and not enable_thinking %}{{- '/nothink' }}{%- endif %}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>\\n<think></think>' }}{%- if m.content %}{{- '\\n' + m.content.strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name + '\\n' }}{%- for k, v in call.function.arguments.items() %}{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'system' %}{{- '<|system|>\\n' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}{%- endif %}"""

# The prompt opens the reasoning, or closes it; arguments of calls are text; no header after results.
DEEPSEEK = """{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}
{%- set ns = namespace(user=false, system='') %}{%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.system = ns.system + m.content %}{%- endif %}{%- endfor %}
{{- bos_token + ns.system }}{%- if tools %}{%- for t in tools %}{{- '\\n' + (t | tojson) }}{%- endfor %}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.user = true %}{{- 'USER' + m.content }}
{%- elif m.role == 'assistant' %}{%- if ns.user %}{{- 'ASSISTANT</think>' }}{%- endif %}{%- set ns.user = false %}
{%- set content = m.content or '' %}{{- content.split('</think>')[-1] }}
{%- if m.tool_calls %}{{- 'CALLS_BEGIN' }}{%- for call in m.tool_calls %}{{- 'CALL_BEGIN' + call.function.name + 'SEPARATOR' + call.function.arguments + 'CALL_END' }}{%- endfor %}{{- 'CALLS_END' }}{%- endif %}{{- eos_token }}
{%- elif m.role == 'tool' %}{%- set ns.user = false %}{{- 'OUT_BEGIN' + m.content + 'OUT_END' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and ns.user %}{{- 'ASSISTANT' }}{{- '<think>' if thinking else '</think>' }}{%- endif %}"""
for name, token in {
    "CALLS_BEGIN": CALLS_BEGIN,
    "CALLS_END": CALLS_END,
    "CALL_BEGIN": CALL_BEGIN,
    "CALL_END": CALL_END,
    "SEPARATOR": CALL_SEPARATOR,
    "OUT_BEGIN": DS_OUT,
    "OUT_END": DS_OUT_END,
    "USER": DS_USER,
    "ASSISTANT": DS_ASSISTANT,
}.items():
    DEEPSEEK = DEEPSEEK.replace(f"'{name}", f"'{token}")

# Neither a system message nor tools; roles must alternate; content is trimmed.
GEMMA = """{{- bos_token }}{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Conversation roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# A default system message; no tools.
SMOLLM = """{%- for m in messages %}{%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM.<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

CHATML_TOKENS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
# Template, control tokens (the first is the end of the text), other tokens of their own, tokens that end generation.
FAMILIES: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "qwen3": (
        QWEN3,
        CHATML_TOKENS,
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "llama3": (
        LLAMA3,
        ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "glm": (
        GLM,
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[MASK]", "<eop>", "<|begin_of_image|>", "<|end_of_image|>", "/nothink"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "deepseek": (
        DEEPSEEK,
        [DS_EOS, DS_BOS],
        [DS_USER, DS_ASSISTANT, "<think>", "</think>", CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, CALL_SEPARATOR, DS_OUT, DS_OUT_END],
        [DS_EOS],
    ),
    "gemma": (GEMMA, ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], [], ["<eos>", "<end_of_turn>"]),
    "smollm": (SMOLLM, CHATML_TOKENS, [], ["<|im_end|>"]),
}  # fmt: skip
MERGES = [("\u010a", "\u010a"), ("l", "l"), ("\u0120", "a"), ("u", "s"), ("us", "e"), ("use", "r")]


def make_folder(name: str, path: Path) -> Path:
    """A folder with the tokenizer of this family."""
    template, special, other, ends = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *("".join(merge) for merge in MERGES)]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in other])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], bos_token=special[1], chat_template=template
    )
    tokenizer.save_pretrained(path)
    listed = [backend.token_to_id(token) for token in ends]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    return path
