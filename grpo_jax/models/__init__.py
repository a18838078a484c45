"""A configurable Flax decoder, and the log-probs of completions under it. Depends only on jax and flax.

`transformer` is built from the layers in `block`, `attention`, `recurrent`, `experts`, `layers` and `rope`. `config`
defines its hyperparameters, and `context` defines the caches and layer inputs. `lora` adds adapters, `packing` packs
sequences, `scoring` computes log-probs of completions, and `sharding` defines the mesh and how parameters are sharded.
"""
