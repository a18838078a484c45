"""Make `distillation.npz`: what TRL 1.16's distillation, GKD and SDPO trainers compute of the same logits.

    python tests/maths/golden/make_run_teacher.py

Needs torch and trl 1.16. For each case the loss, and its gradient with respect to the policy's logits.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

B, T, V, K = 3, 5, 11, 4
WEIGHTS = {"forward_kl": 0.0, "jsd": 0.3, "reverse_kl": 1.0}
"""TRL's weight, `beta` or `distillation_alpha`, of each divergence."""


def inputs():
    """Logits of policy and teacher, drawn tokens, the mask, and which rows SDPO compares."""
    rng = np.random.default_rng(0)
    return {
        "logits": rng.normal(0, 1.5, (B, T, V)).astype(np.float32),
        "teacher": rng.normal(0, 1.5, (B, T, V)).astype(np.float32),
        "tokens": rng.integers(0, V, (B, T)),
        "mask": np.arange(T) < np.array([[5], [3], [4]]),
        "taught": np.array([True, False, True]),
        "old": rng.normal(-2.4, 0.1, (B, T)).astype(np.float32),
    }


def with_gradient(function, logits):
    import torch

    logits = torch.tensor(logits, requires_grad=True)
    loss = function(logits)
    loss.backward()
    return loss.detach().numpy(), logits.grad.numpy()


def cases(given):
    """(name, function of the policy's logits) of each of TRL's losses."""
    import torch
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.sdpo.sdpo_trainer import DistillationLogits, SDPOTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    teacher, tokens, mask = (torch.tensor(given[name]) for name in ("teacher", "tokens", "mask"))
    labels = torch.where(mask, tokens, -100)
    loss_mask = mask & torch.tensor(given["taught"])[:, None]

    def sdpo(**settings):
        args = {"distillation_topk": None, "distillation_add_tail": True, "distillation_is_clip": None} | settings
        trainer = SimpleNamespace(
            args=SimpleNamespace(**args),
            accelerator=SimpleNamespace(gather=lambda x: x),
            _log_self_distillation_metric=lambda mode, value: None,
        )

        def loss(logits):
            both = DistillationLogits(tokens, mask, loss_mask, logits, teacher)
            model = SimpleNamespace(training=True)
            return SDPOTrainer._compute_self_distillation_loss(trainer, model, {}, both)

        return loss

    head = torch.eye(V)
    for kind, weight in WEIGHTS.items():
        yield (
            f"gkd_{kind}",
            lambda logits, w=weight: GKDTrainer.generalized_jsd_loss(
                logits, teacher, labels, beta=w, num_items_in_batch=int(mask.sum())
            ),
        )
        yield (
            f"distillation_{kind}",
            lambda logits, w=weight: _chunked_divergence_loss(logits, teacher, head, head, mask, w)[0],
        )
        yield f"sdpo_{kind}", sdpo(distillation_mode="full_logits", distillation_alpha=weight)
        yield f"sdpo_topk_{kind}", sdpo(distillation_mode="topk_logits", distillation_alpha=weight, distillation_topk=K)
    yield "sdpo_sampled", sdpo(distillation_mode="sampled_token", distillation_alpha=1.0)


if __name__ == "__main__":
    given = inputs()
    made = {}
    for name, function in cases(given):
        made[name], made[f"{name}/gradient"] = with_gradient(function, given["logits"])
        print(name, float(made[name]))
    np.savez_compressed(Path(__file__).with_name("distillation.npz"), **given, **made)
