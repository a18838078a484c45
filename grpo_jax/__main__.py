"""`python -m grpo_jax`: the command `grpo-jax`."""

from grpo_jax.cli.main import main

if __name__ == "__main__":
    main()
