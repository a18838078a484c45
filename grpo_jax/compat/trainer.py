"""A TRL script as it stands, with another import: `from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer`.

A thin shell around `train`, for scripts that come from TRL; what it does not take, it refuses by name. New code is
shorter with `train` itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from grpo_jax.compat import records
from grpo_jax.compat.adapters import with_adapters
from grpo_jax.compat.arguments import GRPOConfig
from grpo_jax.compat.base import Trainer
from grpo_jax.compat.callbacks import Told, functions_of
from grpo_jax.compat.policies import quantized_as, with_tokenizer
from grpo_jax.compat.records import TrainOutput
from grpo_jax.compat.rollout import RolloutSampler, with_fields
from grpo_jax.config import config as _config
from grpo_jax.devices.platform import compute_dtype
from grpo_jax.engines import vllm
from grpo_jax.hub.huggingface import checkpoint_config, find_checkpoint, from_pretrained
from grpo_jax.policy import Donated, Policy
from grpo_jax.rewards.contract import as_list
from grpo_jax.run.evaluate import evaluate_rows
from grpo_jax.run.evaluation import EvaluationSettings
from grpo_jax.run.prepare import training_rows
from grpo_jax.run.sampler import Sampler
from grpo_jax.run.train import train
from grpo_jax.text.prompts import encode_prompts
from grpo_jax.text.sources import Dataset, read_rows
from grpo_jax.types import Environments, RewardFn, Tokenizer

_EMPTY = [{"role": "user", "content": ""}]
"""The prompt that what `reset` returns is added to, of a row without one."""


class GRPOTrainer(Trainer):
    """TRL's `GRPOTrainer` over `train`: the same arguments, and what scripts use of it (`compat.base.Trainer`).

    Args:
      model: a name on the hub, a directory or a `Policy`; models of PyTorch are refused.
      reward_funcs: one or more reward functions; models are refused.
      args: a `GRPOConfig` of this module, or the library's own.
      train_dataset: rows. With an `environment_factory` they may lack a `prompt`, which `reset` gives then, or None may
        stand for them, where `max_steps` is set.
      eval_dataset: rows, or None.
      processing_class: a tokenizer in the place of the checkpoint's. Its EOS ends completions, beside those of
        generation_config.json.
      callbacks: functions called as `callback(step, metrics)`, or objects of transformers' `TrainerCallback`, of which
        `on_log`, `on_evaluate`, `on_train_begin` and `on_train_end` are called; one that waits for another event is
        refused, one that shows progress left out, since the run shows it.
      optimizers: an optax transformation and None.
      tools: functions that the policy may call, as in `train`.
      environment_factory: what makes an environment for each completion, as in `train`.
      peft_config: PEFT's `LoraConfig`; fields that cannot be obeyed are refused by name (`compat.adapters`).
      quantization_config: a `BitsAndBytesConfig` for the base under adapters: NF4 or 8 bits.
      rollout_func: samples in the place of the library, see `compat.rollout`; evaluations go on by the library. As in
        TRL its log-probs are corrected for with `use_vllm`, and else not.
      sampler: likewise, in the form of `train`. With `use_vllm=True, vllm_mode="server"` in `args`, and neither of the
        two, it is `engines.vllm`.
      others: TRL's further arguments, all refused but for None.

    Attributes:
      policy: the policy; after `train` the trained one.
      train_state: the `TrainState` that training ended with, None before.
      args: the arguments, and `config` what they come to.
      train_dataset, eval_dataset: as they were given.
    """

    def __init__(
        self,
        model: str | Path | Policy,
        reward_funcs: RewardFn | Sequence[RewardFn] | None = None,
        args: GRPOConfig | _config.GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Tokenizer | None = None,
        *,
        callbacks: Sequence[object] | None = None,
        optimizers: tuple[optax.GradientTransformation | None, None] = (None, None),
        peft_config: Any = None,
        quantization_config: object = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Environments | None = None,
        rollout_func: Callable[..., Any] | None = None,
        sampler: Sampler | None = None,
        **others: object,
    ):
        asked = [name for name, value in others.items() if value is not None]
        if asked:
            raise ValueError(f"GRPOTrainer takes no {', '.join(asked)} here: leave it out, or write it with `train`.")
        if optimizers[1] is not None:
            raise ValueError("optimizers has a scheduler: an optax transformation has its schedule inside, give None.")
        if isinstance(eval_dataset, Mapping):
            raise ValueError("eval_dataset is a dict: give one dataset; evaluate() takes the others.")
        args = _as_args(args)
        super().__init__(args, as_list(reward_funcs or []), None if isinstance(model, Policy) else str(model))
        quantize = quantized_as(quantization_config, adapted=peft_config is not None)
        self._begin = functools.partial(self._begun_with, model, args, processing_class, peft_config, quantize)
        self._donates = peft_config is not None or not isinstance(model, Policy)  # what was made here is the run's
        self.policy = self._begin()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        for callback in callbacks or ():
            self.add_callback(callback)
        self._optimizer = optimizers[0]
        self._tools, self._environment_factory = tools, environment_factory
        self._sampler = sampler
        if sampler is None and rollout_func is None and args.sampler is not None:
            self._sampler = vllm(args.sampler.base_url, patience=args.sampler.patience)
        self._rollout_func = rollout_func
        if rollout_func is not None:
            self._check_rollout(corrected=args.use_vllm)

    def _check_rollout(self, *, corrected: bool) -> None:
        """Refuse what does not go with a `rollout_func`; without vLLM nothing is corrected, as in TRL."""
        if self._sampler is not None:
            raise ValueError("rollout_func and sampler are two ways to say what samples: give one of them.")
        if self.config.rollout_ahead:
            raise ValueError(
                "rollout_ahead does not go with rollout_func: its fields belong to the latest completions."
            )
        if jax.process_count() > 1:
            raise ValueError("rollout_func works in one process; for several of them give sampler.")
        if not corrected:
            self.config = dataclasses.replace(self.config, sampler_correction=None)

    def _rows(self, dataset: Dataset | None, argument: str) -> Dataset:
        """Return the rows of a dataset, with an empty message in the place of prompts that the environments give."""
        factory = self._environment_factory
        if dataset is None:
            if factory is None or isinstance(factory, Mapping) or self.config.max_steps <= 0:
                raise ValueError(
                    f"{argument} is None: give rows, or one environment_factory, whose reset gives the prompts, and"
                    f" max_steps in GRPOConfig ({self.config.max_steps})."
                )
            return [{"prompt": _EMPTY} for _ in range(self.config.sizes().prompts)]
        if factory is None:
            return dataset
        most = self.config.most_prompts() if argument == "train_dataset" else None
        rows = read_rows(dataset, argument, most)
        without = all(isinstance(row, Mapping) and "prompt" not in row for row in rows)
        return [{"prompt": _EMPTY, **row} for row in rows] if without else rows

    def _rollout(self, dataset: Dataset) -> tuple[Dataset, Sequence[RewardFn], Sampler | None]:
        """Return rows, reward functions and sampler for `train`."""
        if self._rollout_func is None:
            return dataset, self._reward_funcs, self._sampler
        rows, config = training_rows(dataset, self.policy, self.config), self.config
        data = encode_prompts(
            rows,
            self.policy.tokenizer,
            max_prompt_length=config.max_prompt_length,
            on_long_prompt=config.on_long_prompt,
            chat_template_kwargs=config.chat_template_kwargs,
        )
        sampler: Any = RolloutSampler(self._rollout_func, self, data)
        return rows, [with_fields(fn, sampler, rows[0]) for fn in self._reward_funcs], sampler

    def _begun_with(
        self,
        model: str | Path | Policy,
        args: GRPOConfig,
        processing_class: Tokenizer | None,
        peft: Any,
        quantize: str | None,
    ) -> Policy:
        """Return the policy that training begins with."""
        policy = with_tokenizer(self._load(model, args.dtype, quantize), processing_class)
        if peft is None:
            return policy
        return with_adapters(policy, peft, seed=self.config.seed, dropout=not args.disable_dropout)

    def _load(self, model: str | Path | Policy, dtype: str | None, quantize: str | None) -> Policy:
        """Load the policy with params of a dtype; "auto": that of the checkpoint, in which it computes then too."""
        if isinstance(model, Policy):
            if quantize is not None:
                raise ValueError("quantization_config is given, and model is a Policy: load it with quantize=...")
            if dtype is not None:
                raise ValueError(
                    f"model_init_kwargs has the dtype {dtype!r}, and model is a Policy: it is loaded already."
                )
            return model
        if not isinstance(model, str | Path):
            raise ValueError(f"model is a {type(model).__name__}: give a name, a directory or a Policy.")
        if dtype == "auto":
            raw = checkpoint_config(find_checkpoint(model, weights=False))
            stored = raw.get("dtype", raw.get("torch_dtype"))
            dtype = "float32" if stored in (None, "float32") else "bfloat16"
            if dtype == "bfloat16":
                self.config = dataclasses.replace(self.config, compute_dtype="bfloat16")
        return from_pretrained(
            model, dtype=compute_dtype(self.config.compute_dtype), param_dtype=dtype or "float32", quantize=quantize
        )

    def train(self, resume_from_checkpoint: bool | None = None) -> TrainOutput:
        """Train; a run that is found in `output_dir` goes on, asked or not.

        Params that the trainer has loaded become the run's, with no copy beside them: until it ends, `policy` is empty.

        Args:
          resume_from_checkpoint: None or True; a directory of choice is refused.

        Returns:
          `global_step`, `training_loss` and `metrics` (`train_runtime` and so on); the `TrainState` is `train_state`.
        """
        if resume_from_checkpoint not in (None, True):
            raise ValueError(
                f"resume_from_checkpoint is {resume_from_checkpoint!r}: a run goes on after its newest checkpoint in "
                "output_dir; for a fresh one give another output_dir."
            )
        data, reward_funcs, sampler = self._rollout(self._rows(self.train_dataset, "train_dataset"))
        eval_data = None if self.eval_dataset is None else self._rows(self.eval_dataset, "eval_dataset")
        if isinstance(self.policy.params, Donated):  # training was interrupted: a notebook goes on with it
            self.policy = self._begin()
        data = self._counted(data)
        told, began, before = Told(self._callbacks, self, self._named), time.monotonic(), self.state.global_step
        told.tell("on_train_begin")
        self.train_state = train(
            self.policy,
            data,
            reward_funcs,
            self.config,
            eval_dataset=eval_data,
            run_dir=self.run_dir,
            callbacks=[self._note, *functions_of(self._callbacks), told],
            optimizer=self._optimizer,
            sampler=sampler,
            tools=self._tools,
            environment_factory=self._environment_factory,
            donate=self._donates and self.train_state is None,
        )
        self.policy = self.policy.replace(params=self.train_state.params)
        told.tell("on_train_end")
        return records.output_of(
            self.state,
            seconds=time.monotonic() - began,
            completions_per_step=self.config.sizes().prompts_per_update * self.config.num_generations,
            begun_at=before,
        )

    def _counted(self, dataset: Dataset) -> Dataset:
        """Return the rows of a dataset, and note how many there are and how many steps they come to."""
        with contextlib.suppress(ValueError, OSError):  # which `train` says, with all else that is wrong
            rows = training_rows(dataset, self.policy, self.config)
            self._num_rows, self._max_steps = len(rows), self.config.total_steps(len(rows))
            self._lines = []
            return rows
        return dataset

    def evaluate(self, eval_dataset: Dataset | None = None) -> dict[str, float]:
        """Return mean rewards on held-out rows, named as TRL does: `eval_reward`, `eval_rewards/<function>/mean`, …"""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise ValueError("eval_dataset is None, here and in GRPOTrainer: give rows to evaluate on.")
        data = self._rows(data, "eval_dataset")
        metrics, rows = evaluate_rows(
            self.policy,
            data,
            self._reward_funcs,
            EvaluationSettings.of(self.config),
            tools=self._tools,
            environment_factory=self._environment_factory,
        )
        return {f"eval_{records.evaluation_name(name, rows[0]['rewards'])}": x for name, x in metrics.items()}


def _as_args(args: object) -> GRPOConfig:
    """Return the `args` of a trainer as a config of this module."""
    if args is None:
        return GRPOConfig()
    if isinstance(args, _config.GRPOConfig):
        return GRPOConfig.of(args)
    if not isinstance(args, GRPOConfig):
        raise ValueError(
            f"args is a {type(args).__module__}.{type(args).__name__}: use grpo_jax.compat.trainer.GRPOConfig."
        )
    return args
