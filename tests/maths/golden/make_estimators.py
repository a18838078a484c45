"""Make `estimators.npz`: advantages, losses and gradients by TRL's trainers and by verl's functions, with PyTorch.

    python tests/maths/golden/make_estimators.py

Needs torch, trl 1.16 and verl 0.9.1 (`pip install --no-deps verl==0.9.1 omegaconf antlr4-python3-runtime==4.9.3` and
what importing `verl.trainer.ppo.core_algos` asks for), for this script only: the test reads the numbers.

TRL's losses are those of a real trainer's `_compute_loss`, whose log-probs are replaced by ours; its advantages are
those of a trainer's first batch, by a reward function that reads them off a table. Names in the file: `inputs/…`, then
`trl/…` and `verl/…` of each case in the tables below.
"""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2])]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

NAN = float("nan")
REWARDS = np.array([[3.0, 0.0, 0.0, 1.0], [2.0, 0.5, 0.0, 1.0], [0.25, 0.25, 0.25, 0.25]])
"""[B, G], for both libraries."""
TWO_REWARDS = np.stack([REWARDS, [[1.0, NAN, 0.0, 2.0], [0.0, 1.0, 1.0, 0.0], [NAN, NAN, 1.0, 0.0]]], axis=2)
"""[B, G, K] with completions that one function does not score, for TRL."""
WEIGHTS = [1.0, 0.5]
TRL_ADVANTAGES = {
    "grpo": {},
    "grpo batch": {"scale_rewards": "batch"},
    "grpo none": {"scale_rewards": "none"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    "rloo": None,  # of `RLOOTrainer`
}
VERL_ADVANTAGES = ("grpo", "grpo none", "rloo", "opo", "reinforce_pp")
TRL_LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "cispo": {"epsilon_high": 1.5},
    "sapo": {},
    "vespo": {},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.1},
    "dapo, plain KL": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
    "dapo, delta": {"loss_type": "dapo", "delta": 1.6, "epsilon_high": 0.4},
    "dapo, top entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "dapo, off-policy mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
}
"""Case → settings of TRL's config, by names that ours has too; the loss type is the case's name where there is none."""
VERL_LOSSES = {
    "vanilla": {"clip_ratio_high": 0.3, "clip_ratio_c": 1.6},
    "gspo": {},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5},
}
"""Case → settings of verl's."""


def make_inputs():
    """Log-probs and the like [R, T] of six completions: one full, two short, one of one token, two with a hole."""
    rng, rows, length = np.random.default_rng(7), 6, 5
    l = -rng.uniform(0.1, 2.0, (rows, length))
    old = l - rng.uniform(-0.7, 0.7, (rows, length))
    mask = np.ones((rows, length))
    mask[1, 3:] = mask[2, 4:] = mask[3, 1:] = mask[4, 1] = mask[5, 2] = 0
    return {
        "l": l,
        "old": old,
        "ref": l - rng.normal(0, 0.5, (rows, length)),
        # TRL rounds the quantile of the entropies to float32, and one of them may be the quantile.
        "H": rng.uniform(0.05, 2.0, (rows, length)).astype(np.float32).astype(float),
        "A": np.array([1.2, -0.7, -1.5, 0.4, 0.9, -0.3]),
        "mask": mask,
        "lengths": np.array([[2, 2, 1, 3], [1, 4, 2, 1], [3, 1, 1, 2]]),
    }


# TRL ----------------------------------------------------------------------------------------------------------------


def trl_trainer(directory, rewards=None, kind="GRPO", **settings):
    """A trainer of a tiny model, whose reward functions read `rewards` [B, G, K]."""
    import datasets
    import torch
    import trl
    from tiny import tiny_policy
    from transformers import AutoModelForCausalLM

    rewards = TWO_REWARDS[:, :, :1] if rewards is None else rewards
    b, g, k = rewards.shape
    trainers = {"GRPO": (trl.GRPOConfig, trl.GRPOTrainer), "RLOO": (trl.RLOOConfig, trl.RLOOTrainer)}
    config_class, trainer_class = trainers[kind]

    def reads(which):
        def reward(completions, number, **_):
            scores = [rewards[n, i % g, which] for i, n in enumerate(number)]
            return [None if np.isnan(score) else float(score) for score in scores]

        reward.__name__ = f"reward_{which}"
        return reward

    config = config_class(
        output_dir=directory + "/out",
        per_device_train_batch_size=b * g,
        num_generations=g,
        max_completion_length=5,
        reward_weights=WEIGHTS[:k],
        shuffle_dataset=False,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        **settings,
    )
    return trainer_class(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        args=config,
        reward_funcs=[reads(which) for which in range(k)],
        train_dataset=datasets.Dataset.from_list([{"prompt": "ab", "number": n} for n in range(b)]),
        processing_class=tiny_policy().tokenizer,
    )


def trl_advantages(directory):
    """Case → advantages [B, G] of a trainer's first batch."""
    found = {}
    for case, settings in TRL_ADVANTAGES.items():
        kind = "GRPO" if settings is not None else "RLOO"
        trainer = trl_trainer(directory, TWO_REWARDS, kind, beta=0.0, **(settings or {}))
        generate, caught = trainer._generate_and_score_completions, []

        def spy(inputs, generate=generate, caught=caught):
            caught.append(generate(inputs))
            return caught[-1]

        trainer._generate_and_score_completions = spy
        trainer.train()
        found[case] = caught[0]["advantages"].numpy().reshape(REWARDS.shape)
    return found


def trl_losses(directory, inputs):
    """Case → (loss, gradient with respect to the log-probs)."""
    import torch

    tensor = lambda name: torch.tensor(inputs[name], dtype=torch.float64)
    found, (rows, length) = {}, inputs["l"].shape
    for case, settings in TRL_LOSSES.items():
        settings = {"beta": 0.0, "loss_type": case, **settings}
        trainer = trl_trainer(directory, **settings)
        l = tensor("l").requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *_, l=l, **__: (l, tensor("H"), None)
        trainer.current_gradient_accumulation_steps = 1
        ids = torch.ones((rows, length), dtype=torch.long)
        given = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": tensor("mask"),
            "advantages": tensor("A"),
            "old_per_token_logps": tensor("old"),
            "ref_per_token_logps": tensor("ref"),
            "num_items_in_batch": tensor("mask").sum(),
        }
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, given)
        loss.backward()
        found[case] = float(loss.detach()), l.grad.numpy()
    return found


# verl ---------------------------------------------------------------------------------------------------------------


def verl_advantages(inputs):
    """Case → advantages [B, G], and of reinforce_pp those of completions of one length too."""
    import torch
    from verl.trainer.ppo import core_algos

    b, g = REWARDS.shape
    index = np.repeat(np.arange(b), g)

    def by(function, lengths, **more):
        mask = torch.tensor(np.arange(5) < lengths.reshape(-1, 1), dtype=torch.float64)
        rewards = torch.zeros(mask.shape, dtype=torch.float64)
        rewards[:, 0] = torch.tensor(REWARDS.reshape(-1))
        return function(token_level_rewards=rewards, response_mask=mask, **more)[0][:, 0].numpy().reshape(b, g)

    lengths = inputs["lengths"]
    grpo, whitened = (
        core_algos.compute_grpo_outcome_advantage,
        core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
    )
    return {
        "grpo": by(grpo, lengths, index=index),
        "grpo none": by(grpo, lengths, index=index, norm_adv_by_std_in_grpo=False),
        "rloo": by(core_algos.compute_rloo_outcome_advantage, lengths, index=index),
        "opo": by(core_algos.compute_opo_outcome_advantage, lengths, index=index),
        "reinforce_pp": by(whitened, lengths, index=index),
        "reinforce_pp, one length": by(whitened, np.full((b, g), 5), index=index),
    }


def verl_losses(inputs):
    """Case → (loss, gradient with respect to the log-probs)."""
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    tensor = lambda name: torch.tensor(inputs[name], dtype=torch.float64)
    advantages, found = tensor("A")[:, None].expand(inputs["l"].shape).contiguous(), {}
    for name, settings in VERL_LOSSES.items():
        of_loss = {key: value for key, value in settings.items() if hasattr(PolicyLossConfig(), key)}
        given = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **settings}
        own = SimpleNamespace(**given, global_batch_info={}, policy_loss=PolicyLossConfig(loss_mode=name, **of_loss))
        actor = {key: value for key, value in given.items() if key not in of_loss}
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=own.policy_loss, **actor
        )
        l = tensor("l").requires_grad_()
        mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=tensor("old"),
            log_prob=l,
            advantages=advantages,
            response_mask=tensor("mask"),
            loss_agg_mode=mode,
            config=config,
        )
        loss.backward()
        found[name] = float(loss.detach()), l.grad.numpy()
    return found


def main():
    """Write the file."""
    from tiny import tiny_policy

    from grpo_jax import save_pretrained

    inputs = make_inputs()
    arrays = {f"inputs/{name}": value for name, value in inputs.items()}
    losses = {"verl": verl_losses(inputs)}
    arrays |= {f"verl/advantages/{case}": value for case, value in verl_advantages(inputs).items()}
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(directory, tiny_policy())
        losses["trl"] = trl_losses(directory, inputs)
        arrays |= {f"trl/advantages/{case}": value for case, value in trl_advantages(directory).items()}
    for library, cases in losses.items():
        for case, (loss, gradient) in cases.items():
            print(f"{library}, {case}: loss {loss:.6f}")
            arrays[f"{library}/loss/{case}"], arrays[f"{library}/gradient/{case}"] = np.float64(loss), gradient
    np.savez_compressed(Path(__file__).with_name("estimators.npz"), **arrays)


if __name__ == "__main__":
    main()
