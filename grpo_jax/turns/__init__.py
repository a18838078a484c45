"""Several turns: `interaction` (who answers the policy, checked before a run), `episodes` (a rollout of it), `tools`
(functions and methods as the policy sees them), `formats` (how chat templates write calls, read back out of a turn),
`templates` (an observation's tokens after a turn), `roundtrip` (a call of our own, there and back).
"""

from grpo_jax.turns.calls import Format, Parsed, ToolCall, assistant_message, tool_message
from grpo_jax.turns.formats import FORMATS, format_of
from grpo_jax.turns.templates import check_template, observation_ids, opens_thinking
from grpo_jax.turns.tools import Tool, as_text, bind_arguments, environment_tools, read_tools

__all__ = [
    "FORMATS",
    "Format",
    "Parsed",
    "Tool",
    "ToolCall",
    "as_text",
    "assistant_message",
    "bind_arguments",
    "check_template",
    "environment_tools",
    "format_of",
    "observation_ids",
    "opens_thinking",
    "read_tools",
    "tool_message",
]
