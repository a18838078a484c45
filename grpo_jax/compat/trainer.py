"""A TRL script as it stands, with another import: `from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer`.

A thin shell around `train`, for scripts that come from TRL; what it does not take, it refuses by name. New code is
shorter with `train` itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from grpo_jax.compat.adapters import with_adapters
from grpo_jax.compat.migrate import from_trl
from grpo_jax.compat.policies import with_tokenizer, write_into
from grpo_jax.compat.rollout import RolloutSampler, with_fields
from grpo_jax.config import config as _config
from grpo_jax.devices.platform import compute_dtype
from grpo_jax.hub.files import read_json
from grpo_jax.hub.huggingface import find_checkpoint, from_pretrained
from grpo_jax.hub.publish import push_to_hub
from grpo_jax.policy import Donated, Policy
from grpo_jax.rewards.contract import as_list
from grpo_jax.run.evaluate import EvaluationSettings, evaluate_rows
from grpo_jax.run.prepare import training_rows
from grpo_jax.run.sampler import Sampler
from grpo_jax.run.train import train
from grpo_jax.text.prompts import encode_prompts
from grpo_jax.text.sources import Dataset, read_rows
from grpo_jax.types import Environments, RewardFn, Tokenizer
from grpo_jax.update.state import TrainState
from grpo_jax.watch.trackers import Callback

_EMPTY = [{"role": "user", "content": ""}]
"""The prompt that what `reset` returns is added to, of a row without one."""


class GRPOConfig:
    """TRL's `GRPOConfig`: its fields and ours, by keyword.

    Attributes:
      config: the `grpo_jax.GRPOConfig` that it comes to.
      output_dir: the run directory, None for none.
      dtype: of the params, by `model_init_kwargs`; "auto": that of the checkpoint; None: float32.
      use_vllm: whether TRL would sample by vLLM, and correct for it.
      disable_dropout: whether adapters do without their dropout.

    Raises:
      ValueError: a field that means something in TRL and cannot be had here, each with what to do; a wrong value.

    Example:
      >>> GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=4, use_vllm=True).config.beta
      0.0
      >>> GRPOConfig(repetition_penalty=1.1)
      Traceback (most recent call last):
      ValueError: GRPOConfig asks for what is not here:
        repetition_penalty: leave it out: the sampler has no such penalty; there is get_repetition_penalty_reward
    """

    def __init__(self, output_dir: str | None = None, **values: Any):
        moved = from_trl({"output_dir": output_dir, **values})
        if moved.missing:
            lines = [f"{name}: {advice}" for name, advice in moved.missing.items()]
            raise ValueError("\n  ".join(["GRPOConfig asks for what is not here:", *lines]))
        self.config = moved.config()
        self.output_dir = moved.run_dir
        self.dtype = moved.dtype
        self.use_vllm = bool(values.get("use_vllm"))
        self.disable_dropout = bool(values.get("disable_dropout"))


class GRPOTrainer:
    """TRL's `GRPOTrainer` over `train`: the same arguments, and `train`, `evaluate` and `save_model`.

    Args:
      model: a name on the hub, a directory or a `Policy`; models of PyTorch are refused.
      reward_funcs: one or more reward functions; models are refused.
      args: a `GRPOConfig` of this module, or the library's own.
      train_dataset: rows. With an `environment_factory` they may lack a `prompt`, which `reset` gives then, or None may
        stand for them, where `max_steps` is set.
      eval_dataset: rows, or None.
      processing_class: a tokenizer in the place of the checkpoint's. Its EOS ends completions, beside those of
        generation_config.json.
      callbacks: functions called as `callback(step, metrics)`; TRL's objects are refused.
      optimizers: an optax transformation and None.
      tools: functions that the policy may call, as in `train`.
      environment_factory: what makes an environment for each completion, as in `train`.
      peft_config: PEFT's `LoraConfig`; fields that cannot be obeyed are refused by name (`compat.adapters`).
      rollout_func: samples in the place of the library, see `compat.rollout`; evaluations go on by the library. As in
        TRL its log-probs are corrected for with `use_vllm`, and else not.
      sampler: likewise, in the form of `train`.
      others: TRL's further arguments, all refused but for None.

    Attributes:
      policy: the policy; after `train` the trained one.
      state: what `train` returned, None before.
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
        callbacks: Sequence[Callback] | None = None,
        optimizers: tuple[optax.GradientTransformation | None, None] = (None, None),
        peft_config: Any = None,
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
        self.config = args.config
        self.run_dir = args.output_dir
        self._begin = functools.partial(self._begun_with, model, args, processing_class, peft_config)
        self._donates = peft_config is not None or not isinstance(model, Policy)  # what was made here is the run's
        self.policy = self._begin()
        self.args = self.config
        self.num_generations = self.config.num_generations
        self._base_name = None if isinstance(model, Policy) else str(model)
        self.state: TrainState | None = None
        self._reward_funcs = as_list(reward_funcs or [])
        self._datasets = train_dataset, eval_dataset
        self._callbacks = tuple(callbacks or ())
        self._optimizer = optimizers[0]
        self._tools, self._environment_factory = tools, environment_factory
        self._sampler = sampler
        self._rollout_func = rollout_func
        if rollout_func is not None:
            self._check_rollout(corrected=args.use_vllm)

    @property
    def processing_class(self) -> Tokenizer | None:
        """The tokenizer."""
        return self.policy.tokenizer

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
            self.config = self.args = dataclasses.replace(self.config, sampler_correction=None)

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
        self, model: str | Path | Policy, args: GRPOConfig, processing_class: Tokenizer | None, peft: Any
    ) -> Policy:
        """Return the policy that training begins with."""
        policy = with_tokenizer(self._load(model, args.dtype), processing_class)
        if peft is None:
            return policy
        return with_adapters(policy, peft, seed=self.config.seed, dropout=not args.disable_dropout)

    def _load(self, model: str | Path | Policy, dtype: str | None) -> Policy:
        """Load the policy with params of a dtype; "auto": that of the checkpoint, in which it computes then too."""
        if isinstance(model, Policy):
            if dtype is not None:
                raise ValueError(
                    f"model_init_kwargs has the dtype {dtype!r}, and model is a Policy: it is loaded already."
                )
            return model
        if not isinstance(model, str | Path):
            raise ValueError(f"model is a {type(model).__name__}: give a name, a directory or a Policy.")
        if dtype == "auto":
            raw = read_json(find_checkpoint(model, weights=False) / "config.json") or {}
            stored = raw.get("dtype", raw.get("torch_dtype"))
            dtype = "float32" if stored in (None, "float32") else "bfloat16"
            if dtype == "bfloat16":
                self.config = dataclasses.replace(self.config, compute_dtype="bfloat16")
        return from_pretrained(model, dtype=compute_dtype(self.config.compute_dtype), param_dtype=dtype or "float32")

    def train(self, resume_from_checkpoint: bool | None = None) -> TrainState:
        """Train; a run that is found in `output_dir` goes on, asked or not.

        Params that the trainer has loaded become the run's, with no copy beside them: until it ends, `policy` is empty.

        Args:
          resume_from_checkpoint: None or True; a directory of choice is refused.
        """
        if resume_from_checkpoint not in (None, True):
            raise ValueError(
                f"resume_from_checkpoint is {resume_from_checkpoint!r}: a run goes on after its newest checkpoint in "
                "output_dir; for a fresh one give another output_dir."
            )
        data, reward_funcs, sampler = self._rollout(self._rows(self._datasets[0], "train_dataset"))
        eval_data = self._datasets[1]
        eval_data = None if eval_data is None else self._rows(eval_data, "eval_dataset")
        if isinstance(self.policy.params, Donated):  # training was interrupted: a notebook goes on with it
            self.policy = self._begin()
        self.state = train(
            self.policy,
            data,
            reward_funcs,
            self.config,
            eval_dataset=eval_data,
            run_dir=self.run_dir,
            callbacks=self._callbacks,
            optimizer=self._optimizer,
            sampler=sampler,
            tools=self._tools,
            environment_factory=self._environment_factory,
            donate=self._donates and self.state is None,
        )
        self.policy = self.policy.replace(params=self.state.params)
        return self.state

    def evaluate(self, eval_dataset: Dataset | None = None) -> dict[str, float]:
        """Return mean rewards on held-out rows, named as TRL does: `eval_reward`, `eval_rewards/<function>/mean`, …"""
        data = self._datasets[1] if eval_dataset is None else eval_dataset
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
        named = {name: f"rewards/{name}/mean" for name in rows[0]["rewards"]}
        named |= {name: f"completions/{name}" for name in ("mean_length", "clipped_ratio")} | {"reward": "reward"}
        return {f"eval_{named.get(name, name)}": value for name, value in metrics.items()}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the policy and its tokenizer in Hugging Face's layout, adapters in PEFT's, for `from_pretrained` of
        either; with `push_to_hub` push it too.

        Args:
          output_dir: where to, beside what files are there; None: the run directory.
        """
        where = self.run_dir if output_dir is None else output_dir
        if where is None:
            raise ValueError("output_dir is None, here and in GRPOConfig: say where to write the model.")
        write_into(where, self.policy, base_name=self._base_name)
        if self.config.push_to_hub:
            self.push_to_hub("Model save")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        *,
        revision: str | None = None,
        private: bool | None = None,
        dataset_name: str | None = None,
        base_model: str | None = None,
        license: str | None = None,
    ) -> str:
        """Push the policy to the repository `hub_model_id` of the hub, or one with the run directory's name.

        Args:
          commit_message: of the commit.
          blocking: True; the push is waited for.
          revision: branch to push to; None: `hub_revision`.
          private: visibility of a repository that is made; None: `hub_private_repo`.
          dataset_name: of the data, for the card.
          base_model: for the card, as in `grpo_jax.push_to_hub`.
          license: likewise.

        Returns:
          The address of the commit.
        """
        if not blocking:
            raise ValueError("blocking is False: the push is waited for; leave it out.")
        run_dir, config = self.run_dir, self.config
        if config.hub_model_id is None and run_dir is None:
            raise ValueError("hub_model_id and output_dir are None: give one in GRPOConfig, to name the repository.")
        return push_to_hub(
            self.policy,
            config.hub_model_id or Path(str(run_dir)).absolute().name,
            run_dir=run_dir if self.state is not None else None,
            base_model=base_model,
            dataset=dataset_name,
            license=license,
            private=config.hub_private_repo if private is None else private,
            revision=revision or config.hub_revision,
            commit_message=commit_message,
        )


def _as_args(args: object) -> GRPOConfig:
    """Return the `args` of a trainer as a config of this module."""
    if args is None:
        return GRPOConfig()
    if isinstance(args, _config.GRPOConfig):
        own = GRPOConfig(use_vllm=True)  # its sampler_correction says what is corrected
        own.config = args
        return own
    if not isinstance(args, GRPOConfig):
        raise ValueError(
            f"args is a {type(args).__module__}.{type(args).__name__}: use grpo_jax.compat.trainer.GRPOConfig."
        )
    return args
