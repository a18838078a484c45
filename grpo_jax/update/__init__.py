"""Training updates: the state, the optimizer, the loss, and optimizer steps on padded or packed sequences."""
