"""Training updates: the state, the optimizer, the loss, and updates of padded and of packed sequences."""
