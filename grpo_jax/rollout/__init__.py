"""Sampling of completions: the loop (`generate`), its compiled functions (`decode`) and array sizes (`decode_plan`)."""
