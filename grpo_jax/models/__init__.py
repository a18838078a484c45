"""A configurable Flax decoder, and the log-probs of completions under it. Depends only on jax, flax, chex and numpy."""
