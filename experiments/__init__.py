"""Scripts that run: each starts with its command, its time and what to expect."""
