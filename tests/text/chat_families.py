"""Chat templates modeled on those of each family that supports tool calls, and a tokenizer trained on a few lines."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_jax.text.calls import Parsed, ToolCall, assistant_message

# Qwen 3: earlier thoughts are omitted, tool results form a user turn, and thinking can be disabled.
HERMES = """{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
ToolCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.user %}{{ '<think>\n\n</think>\n\n' if '</think>' not in m.content else '' }}{{ m.content }}
{%- else %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n' if m.content or not loop.first else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' }}
<tool_response>
{{ m.content }}
</tool_response>
{{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '' }}
{%- endif %}"""

# Qwen 3.5: the same with tags for call parameters and a generation prompt that opens a thought.
QWEN_XML = (
    HERMES.replace('{"name": ..., "arguments": ...}', "<function=...><parameter=...>")
    .replace(
        """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
""",
        """<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() -%}
<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor -%}
</function>
""",
    )
    .replace("if enable_thinking is false else ''", "if enable_thinking is false else '<think>\n'")
)

# Llama 3: a leading BOS, one call as the entire message, and tool results in a turn with the role "ipython".
LLAMA = """{{- bos_token }}<|start_header_id|>system<|end_header_id|>

{% if tools %}Respond in the format {"name": function name, "parameters": its arguments}.
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}{% endif %}<|eot_id|>
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{{ '<|python_tag|>' if tagged else '' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}<|eot_id|>
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# gpt-oss: a call is a message to functions.<name>, and its result takes the name from the call. The last turn ends
# with <|return|>, earlier turns with <|end|>.
HARMONY = """<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions: {{ tools | tojson }}<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{%- if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + call.name }} <|constrain|>json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- set last.name = call.name %}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('an answer without a call') }}{% endif %}
{{- '<|start|>functions.' + last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)

SPECIAL = [
    "<|begin|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|python_tag|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>",
    "<|end|>", "<|call|>", "<|return|>",
]  # fmt: skip
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added tokens that decoding does not skip
LINES = [
    "The policy calls a tool and sees what it says: higher, lower, or an error.",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "<|im_start|>assistant\n<|im_start|>user\nassistant user system tool functions commentary analysis final",
]

CALL = assistant_message(Parsed("", (ToolCall("add", {"a": 1, "b": 2}),)))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


# Name: template, EOS, all tokens that end a turn.
FAMILIES = {
    "hermes": (HERMES, "<|im_end|>", ("<|im_end|>",)),
    "qwen_xml": (QWEN_XML, "<|im_end|>", ("<|im_end|>",)),
    "llama3": (LLAMA, "<|eot_id|>", ("<|eot_id|>",)),
    "harmony": (HARMONY, "<|return|>", ("<|return|>", "<|call|>")),
}


@functools.cache
def trained() -> str:
    """Train a byte-level BPE with some merges, and return it as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return tokenizer.to_str()


def tokenizer_of(template: str | None, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained()), bos_token="<|begin|>", eos_token=eos
    )
    tokenizer.chat_template = template
    return tokenizer


def family(name: str):
    """Return a family's tokenizer and the ids of the tokens that end a turn."""
    template, eos, ends = FAMILIES[name]
    tokenizer = tokenizer_of(template, eos)
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids(list(ends)))
