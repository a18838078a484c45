"""Entry point for `python -m grpo_jax`, which is equivalent to the `grpo-jax` command."""

from grpo_jax.cli.main import main

if __name__ == "__main__":
    main()
