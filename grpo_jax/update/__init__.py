"""Training updates: `objective` computes the loss, `step` updates any model on any mesh, `packed` avoids padding for
this package's models, and `state` and `optimizer` define the training state.
"""
