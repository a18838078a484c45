"""The math of GRPO: pure functions on arrays that depend only on jax and chex.

Suggested reading order: `advantages` (rewards to advantages), `credit` (turn and token rewards to advantages),
`sampling` (logits to tokens), `log_probs`, `kl`, `surrogates` (ratios, per-token losses, reductions), `losses` (the
objective), `supervised` (SFT and distillation), `reference` (the reference policy), `stops` (stop strings).
"""
