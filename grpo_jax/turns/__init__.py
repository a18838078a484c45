"""Several turns: `tools` (functions and methods as the policy sees them, their arguments and returns), `formats` (how a
model's chat template writes calls, read back out of a turn), `templates` (an observation's tokens after a turn).
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
