"""Checkpoints in Hugging Face's layout: policies in and out, the families of models, adapters in PEFT's format."""
