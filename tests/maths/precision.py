"""A context manager for 64-bit floats, which JAX disables by default."""

import jax


def x64():
    """Enable 64-bit floats in a `with` block; the name differs between jax versions."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()
