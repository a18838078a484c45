"""Updates of the reference policy (TR-DPO)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grpo_jax.types import Params


def _check_alpha(alpha: float | jax.Array) -> None:
    """Raise ValueError for a Python number outside [0, 1]. Traced values are not checked."""
    if isinstance(alpha, int | float) and not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1]; got {alpha}. Pass the weight of the new params.")


def _check_trees(ref_params: Params, params: Params) -> None:
    """Raise ValueError unless both trees have the same structure and shapes and only floating-point leaves."""
    ref_leaves, leaves = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (ref_params, params)
    )
    if ref_leaves.keys() != leaves.keys():
        names = sorted(ref_leaves.keys() ^ leaves.keys())
        raise ValueError(
            f"ref_params and params differ in structure; these leaves are missing from one of them: {', '.join(names)}."
        )
    for name, ref_leaf in ref_leaves.items():
        leaf = leaves[name]
        if jnp.shape(ref_leaf) != jnp.shape(leaf):
            raise ValueError(
                f"Leaf {name}: ref_params has shape {jnp.shape(ref_leaf)} and params has shape {jnp.shape(leaf)}; "
                "the shapes must be equal."
            )
        for which, x in (("ref_params", ref_leaf), ("params", leaf)):
            if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
                raise ValueError(
                    f"Leaf {name} of {which} has dtype {jnp.result_type(x)}; expected a floating-point dtype. "
                    "Exclude integer leaves from the params."
                )


def mixup(ref_params: Params, params: Params, alpha: float | jax.Array) -> Params:
    """Return the reference params, moved towards `params`.

        θ_ref ← alpha·θ + (1 − alpha)·θ_ref

    The arithmetic is float32 (float64 for float64 leaves), since in bfloat16 a small alpha would have no effect. Each
    leaf is mixed separately. For adapters, whose weights are products A·B, use `models.lora.sync_adapter_products`.

    Args:
      ref_params: pytree of float leaves of any shape; `None` leaves are unchanged.
      params: pytree with the same structure and shapes. The dtypes may differ.
      alpha: [] float in [0, 1], weight of the *new* params (1 copies them, 0 keeps the reference).

    Returns:
      A pytree with the structure and dtypes of `ref_params`, in new buffers. A bfloat16 reference approaches the params
      only up to the resolution of bfloat16; if alpha is small, store the reference in float32.

    Raises:
      ValueError: if the trees differ in structure or shapes, a leaf is not floating-point, or alpha is not in [0, 1].

    References:
      TR-DPO (arXiv:2404.09656), equation 2, soft update. TRL's `ref_model_mixup_alpha` and the `step_size` of
      `optax.incremental_update` are also weights of the new params; optax computes in the dtype of the leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> mixup({"w": jnp.array([0.0, 1.0])}, {"w": jnp.array([1.0, 1.0])}, 0.25)["w"].tolist()
      [0.25, 1.0]
    """
    _check_alpha(alpha)
    _check_trees(ref_params, params)

    def mix(ref_leaf: jax.Array, leaf: jax.Array) -> jax.Array:
        ref_leaf, leaf = jnp.asarray(ref_leaf), jnp.asarray(leaf)
        dtype = jnp.promote_types(jnp.promote_types(ref_leaf.dtype, leaf.dtype), jnp.float32)
        mixed = alpha * leaf.astype(dtype) + (1 - alpha) * ref_leaf.astype(dtype)
        return mixed.astype(ref_leaf.dtype)

    return jax.tree.map(mix, ref_params, params)


def sync_reference(
    ref_params: Params, params: Params, step: int | jax.Array, *, every: int, alpha: float | jax.Array
) -> Params:
    """Apply `mixup` to the reference every `every` steps.

        θ_ref ← alpha·θ + (1 − alpha)·θ_ref   if step % every == 0,   else θ_ref

    If the params are fixed, n syncs multiply their distance to the reference by (1 − alpha)ⁿ.

    Args:
      ref_params: as in `mixup`.
      params: as in `mixup`.
      step: [] integer, number of completed optimizer steps (1 after the first); may be traced.
      every: integer ≥ 1, number of steps between syncs (TRL's `ref_model_sync_steps`).
      alpha: as in `mixup`.

    Returns:
      A pytree with the structure and dtypes of `ref_params`.

    Raises:
      ValueError: if every < 1 or `mixup` rejects an argument.

    References:
      TR-DPO (arXiv:2404.09656), section 3. Step 0 is a multiple of `every`, so the reference is also mixed at step 0.

    Example:
      >>> import jax.numpy as jnp
      >>> old, new = {"w": jnp.array(0.0)}, {"w": jnp.array(1.0)}
      >>> [float(sync_reference(old, new, step, every=2, alpha=0.5)["w"]) for step in (1, 2, 3, 4)]
      [0.0, 0.5, 0.0, 0.5]
    """
    if isinstance(every, int) and every < 1:
        raise ValueError(f"every must be at least 1; got {every}. Pass the number of optimizer steps between syncs.")
    # Use `cond` instead of `where`, so that the params are not read at other steps.
    return jax.lax.cond(
        step % every == 0, lambda: mixup(ref_params, params, alpha), lambda: jax.tree.map(jnp.asarray, ref_params)
    )
