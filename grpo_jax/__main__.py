"""Entry point of `python -m grpo_jax`, which is equivalent to the command `grpo-jax`."""

from grpo_jax.cli.main import main

if __name__ == "__main__":
    main()
