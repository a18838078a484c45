"""The math of GRPO as pure functions on arrays. Their only dependencies are jax (with NumPy) and chex.

Suggested reading order: `advantages` (rewards to advantages), `credit` (turn and token rewards to advantages),
`sampling` (logits to tokens), `log_probs`, `kl`, `surrogates` (ratios, per-token losses, reductions), `losses` (the
objective), `supervised` (SFT and distillation), `reference` (the reference policy), `stops` (stop strings).
"""
