"""Hugging Face checkpoints, PEFT adapters, and the table of supported model families."""
