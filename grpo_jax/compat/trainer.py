"""TRL's `GRPOConfig` and `GRPOTrainer` on top of `train`. Unsupported arguments and attributes raise an error."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import optax

from grpo_jax.compat import policies
from grpo_jax.compat.migrate import from_trl
from grpo_jax.compat.trl_fields import SHARED, TRL_ONLY, trl_names
from grpo_jax.config import config as _config
from grpo_jax.engines import vllm
from grpo_jax.policy import Donated, Policy
from grpo_jax.rewards.contract import as_list, reward_names
from grpo_jax.run.evaluate import evaluate_rows
from grpo_jax.run.publish import push_to_hub
from grpo_jax.run.train import train
from grpo_jax.text.sources import Dataset
from grpo_jax.types import Environments, Json, RewardFn, Tokenizer
from grpo_jax.update.state import TrainState
from grpo_jax.watch.monitor import Callback
from grpo_jax.watch.writer import read_lines

_PAGE = "docs/coming_from_trl.md lists what is supported"
_SAMPLER = "use sampler= in grpo_jax.train, or a vLLM server with vllm_mode='server' in args"
# Advice for unsupported arguments and attributes of TRL's trainer.
_INSTEAD = {
    "model": "use trainer.policy, with .model and .params",
    "optimizer": "use trainer.train_state.opt_state, or pass an optax transformation in optimizers",
    "accelerator": "use jax.process_index() == 0",
    **dict.fromkeys(("log", "log_metrics", "save_metrics"), "use trainer.state.log_history, or metrics.jsonl"),
    **dict.fromkeys(("compute_loss", "_compute_loss"), "use surrogate= and advantage_fn= in grpo_jax.train"),
    **dict.fromkeys(("rollout_func", "_generate", "_generate_and_score_completions"), _SAMPLER),
    "reward_processing_classes": "pass a reward function that calls the reward model; see docs/rewards.md",
    "quantization_config": 'load the model with from_pretrained(name, quantize="nf4") and pass the policy',
}


class GRPOConfig:
    """Settings of `GRPOTrainer`: fields of TRL's `GRPOConfig` and of `grpo_jax.GRPOConfig`.

    Fields are keyword arguments to the constructor, and attributes that may be changed before training.

    Attributes:
      config: the equivalent `grpo_jax.GRPOConfig`.
      sampler: arguments to `engines.vllm` with `vllm_mode="server"`; None for the built-in sampler.
      dtype: dtype of the params from `model_init_kwargs`; None is float32; see `policies.load_policy` for "auto".

    Raises:
      ValueError: if a field is unknown or not supported (the message lists replacements), or a value is invalid.

    Example:
      >>> args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=4, use_vllm=True)
      >>> args.beta = 0.04
      >>> args.config.beta, args.learning_rate, args.eval_strategy, args.to_dict()["output_dir"]
      (0.04, 1e-06, 'no', 'out')
    """

    config: _config.GRPOConfig
    dtype: str | None
    sampler: dict[str, Any] | None
    _values: Json  # the values as passed by the caller

    def __init__(self, output_dir: str | None = None, **values: Any):
        self._set({"output_dir": output_dir, **values})

    def _set(self, values: Json) -> None:
        """Convert and store the values."""
        migration = from_trl(values)
        if migration.missing:
            lines = [f"{name}: {advice}" for name, advice in migration.missing.items()]
            raise ValueError("\n  ".join(["GRPOConfig has unsupported fields:", *lines]))
        config = migration.config()
        defaults: dict[str, object] = {name: field.default for name, field in TRL_ONLY.items()}
        vars(self).update({**defaults, **vars(config), **values})
        vars(self).update(config=config, dtype=migration.dtype, sampler=migration.sampler, _values=values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None:
        self._set({**self._values, name: value})

    def to_dict(self) -> Json:
        """Return the values of all TRL fields, keyed by name."""
        return {name: getattr(self, name) for name in (*SHARED, *TRL_ONLY)}


class GRPOTrainer:
    """TRL's `GRPOTrainer` on top of `train`.

    It supports TRL's constructor, `train`, `evaluate`, `save_model`, `push_to_hub`, `add_callback`, and `state` with
    `log_history` and `global_step`.

    Args:
      model: name on the hub, directory or `Policy`.
      reward_funcs: one or more reward functions; may be omitted if the environment has `get_reward`.
      args: `grpo_jax.compat.GRPOConfig` with the settings.
      train_dataset: rows with a `prompt`.
      eval_dataset: rows for evaluation, or a dict that maps names to such datasets. None disables evaluation.
      processing_class: tokenizer that replaces the checkpoint's. Its EOS token also ends completions.
      callbacks: functions of (step, metrics), called after each logged step and evaluation; see `watch.Callback`.
      optimizers: pair of an optax transformation (None for AdamW) and None, since schedulers are not supported.
      peft_config: PEFT's `LoraConfig`; see `compat.policies.with_adapters`.
      tools: functions that the policy can call; see `train`.
      environment_factory: factory that creates environments; see `train`.
      others: other arguments to TRL's trainer, which must be None.

    Attributes:
      policy: initial policy or, after `train`, the trained policy.
      train_state: final `TrainState`; None before `train`.
      args: settings of the run; `args.config` is the equivalent `grpo_jax.GRPOConfig`.

    Raises:
      ValueError: if an argument is not supported.
      AttributeError: if an unsupported attribute of TRL's trainer is read, or defined in a subclass.
    """

    train_state: TrainState | None = None

    def __init__(
        self,
        model: str | Path | Policy,
        reward_funcs: RewardFn | Sequence[RewardFn] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Tokenizer | None = None,
        *,
        callbacks: Sequence[Callback] | None = None,
        optimizers: tuple[optax.GradientTransformation | None, None] = (None, None),
        peft_config: Any = None,
        tools: Sequence[Callable[..., object]] | None = None,
        environment_factory: Environments | None = None,
        **others: object,
    ):
        self.args = args = GRPOConfig() if args is None else args
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"GRPOTrainer does not accept {name}; {_INSTEAD.get(name, _PAGE)}")
        if not isinstance(args, GRPOConfig):
            raise ValueError(
                f"args must be a grpo_jax.compat.GRPOConfig; got {type(args).__module__}.{type(args).__name__}"
            )
        if optimizers[1] is not None:
            raise ValueError("optimizers must not contain a scheduler; set the schedule in the optax transformation")
        self.run_dir, self.train_dataset, self.eval_dataset = args.output_dir, train_dataset, eval_dataset
        self._reward_funcs = as_list(reward_funcs or [])
        self._base_name = None if isinstance(model, Policy) else str(model)
        self._donates = peft_config is not None or not isinstance(model, Policy)  # the caller does not hold the params
        self._load = functools.partial(self._load_policy, model, processing_class, peft_config)
        self.policy = self._load()
        self._optimizer, self._tools, self._environment_factory = optimizers[0], tools, environment_factory
        self._sampler = None if args.sampler is None else vllm(**args.sampler)
        self._callbacks = list(callbacks or ())
        self._lines: list[dict[str, float]] = []  # logged metrics, used if there is no run directory

    def __init_subclass__(cls) -> None:
        for name in _INSTEAD.keys() & vars(cls).keys():
            raise AttributeError(f"{cls.__name__}.{name} has no effect; {_INSTEAD[name]}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"GRPOTrainer has no {name}; {_INSTEAD.get(name, _PAGE)}")

    @property
    def config(self) -> _config.GRPOConfig:
        """The `grpo_jax.GRPOConfig` that is equivalent to `args`."""
        return self.args.config

    @property
    def processing_class(self) -> Tokenizer:
        """Tokenizer of the policy."""
        return self.policy.tokenizer

    def _load_policy(self, model: str | Path | Policy, tokenizer: Tokenizer | None, peft_config: Any) -> Policy:
        policy, compute = policies.load_policy(model, self.args.dtype, self.config.compute_dtype)
        if compute != self.config.compute_dtype:
            self.args.compute_dtype = compute
        policy = policies.with_tokenizer(policy, tokenizer)
        return policy if peft_config is None else policies.with_adapters(policy, peft_config, seed=self.config.seed)

    @property
    def state(self) -> types.SimpleNamespace:
        """Namespace with `log_history` (metrics with TRL's names, and `step`) and `global_step` (last logged step)."""
        lines = self._lines if self.run_dir is None else read_lines(Path(self.run_dir) / "metrics.jsonl")
        names = reward_names(self._reward_funcs)
        history = [{**trl_names(line, names), "step": line["step"]} for line in lines]
        return types.SimpleNamespace(log_history=history, global_step=history[-1]["step"] if history else 0)

    def add_callback(self, callback: Callback) -> None:
        """Add a function of (step, metrics). It may raise `watch.StopRun` to end the run."""
        self._callbacks.append(callback)

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.append({"step": step, **metrics})

    def train(self, resume_from_checkpoint: bool | None = None) -> TrainState:
        """Train and return the final state, which is also stored in `train_state`.

        An existing run in `output_dir` is always resumed, so `resume_from_checkpoint` must be None or True. Params
        loaded or created by the trainer are donated to the first run, so `policy` does not have params until it ends.
        """
        if resume_from_checkpoint not in (None, True):
            raise ValueError(
                f"resume_from_checkpoint must be None or True, since a run always resumes from the latest checkpoint in"
                f" output_dir; got {resume_from_checkpoint!r}. To start a new run, set a different output_dir"
            )
        if self.train_dataset is None:
            raise ValueError("train_dataset is None; pass a dataset with the column 'prompt' to GRPOTrainer")
        if isinstance(self.policy.params, Donated):  # a previous call was interrupted
            self.policy = self._load()
        self._lines = []
        self.train_state = train(
            self.policy,
            self.train_dataset,
            self._reward_funcs,
            self.config,
            eval_dataset=self.eval_dataset,
            run_dir=self.run_dir,
            callbacks=[self._record, *self._callbacks],
            optimizer=self._optimizer,
            sampler=self._sampler,
            tools=self._tools,
            environment_factory=self._environment_factory,
            donate=self._donates and self.train_state is None,
        )
        self.policy = self.policy.replace(params=self.train_state.params)
        return self.train_state

    def evaluate(self, eval_dataset: Dataset | None = None) -> dict[str, float]:
        """Return mean rewards on held-out rows under TRL's names: `eval_reward`, `eval_rewards/<function>/mean`, …"""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if data is None:
            raise ValueError("eval_dataset is None; pass rows to `evaluate` or to `GRPOTrainer`")
        metrics, rows = evaluate_rows(
            self.policy,
            data,
            self._reward_funcs,
            self.config,
            params=self.policy.params,
            tools=self._tools,
            environment_factory=self._environment_factory,
        )
        return trl_names({f"eval/{name}": x for name, x in metrics.items()}, rows[0]["rewards"])

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the policy and its tokenizer to `output_dir`, by default `args.output_dir`. Other files are kept.

        The format is Hugging Face's or, for adapters, PEFT's. With `args.push_to_hub`, the policy is also pushed.
        """
        directory = self.run_dir if output_dir is None else output_dir
        if directory is None:
            raise ValueError("output_dir is None; pass a directory to save_model or set output_dir in GRPOConfig")
        policies.write_into(Path(directory).expanduser(), self.policy, self._base_name)
        if self.config.push_to_hub:
            self.push_to_hub("Model save")

    def push_to_hub(self, commit_message: str = "End of training", *, dataset_name: str | None = None) -> str:
        """Push the policy to `hub_model_id`, by default the name of `output_dir`. Returns the URL of the commit.

        `dataset_name` is the name of the dataset in the model card.
        """
        repository = self.config.hub_model_id or (self.run_dir and Path(self.run_dir).absolute().name)
        if repository is None:
            raise ValueError("hub_model_id and output_dir are both None; set one of them in GRPOConfig")
        return push_to_hub(
            self.policy,
            repository,
            run_dir=self.run_dir if self.train_state is not None else None,
            dataset=dataset_name,
            private=self.config.hub_private_repo,
            revision=self.config.hub_revision,
            commit_message=commit_message,
        )
