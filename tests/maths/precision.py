"""Arrays of 64-bit floats, which JAX makes only when it is told to."""

import jax


def x64():
    """64-bit floats for a block; the name moved between jax versions."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()
