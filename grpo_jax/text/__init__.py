"""Dataset rows, prompts, chat templates, tool calls, and decoded completions."""
