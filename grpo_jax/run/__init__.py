"""Stages of a run: `prepare`, `collect` (rollout, rewards, advantages), `train` and `evaluate`. Dry run: `rehearse`."""
