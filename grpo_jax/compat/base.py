"""A trainer of transformers without its training, the things that scripts read, log, save and push around `train()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_jax.compat import records
from grpo_jax.compat.arguments import GRPOConfig
from grpo_jax.compat.callbacks import check_callback
from grpo_jax.compat.policies import write_into
from grpo_jax.compat.records import TrainerState
from grpo_jax.compat.stand_ins import Accelerator, Model, not_here
from grpo_jax.config import config as _config
from grpo_jax.hub.publish import push_to_hub
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import reward_names
from grpo_jax.types import RewardFn, Tokenizer
from grpo_jax.update.state import TrainState
from grpo_jax.watch.writer import Line, read_lines

_NO_LOADER = "prompts are found by counting, without a data loader: grpo_jax.text.prompt_indices"
_ELSEWHERE = {
    "optimizer": "its state is train_state.opt_state, and another one goes into optimizers",
    "lr_scheduler": "lr_scheduler_type names it, and an optax transformation in optimizers has its own",
    "ref_model": "train_state.ref_params are its params",
    "model_wrapped": "nothing wraps the model; policy has it",
    "compute_loss": "grpo_jax.grpo_loss is the loss, a function of arrays",
    "_compute_loss": "grpo_jax.grpo_loss is the loss, a function of arrays",
    "training_step": "grpo_jax.train_step makes one optimizer step",
    "get_train_dataloader": _NO_LOADER,
    "get_eval_dataloader": _NO_LOADER,
    "get_test_dataloader": _NO_LOADER,
    "predict": "grpo_jax.evaluate returns the completions of rows with their rewards",
    "create_model_card": "push_to_hub writes the card",
    "log": "reward functions take log_metric, and a callback gets each logged step",
    "generate": "grpo_jax.generate samples from policy",
    "_generate": "grpo_jax.generate samples; a sampler or a rollout_func does so in its place",
    "_calculate_rewards": "grpo_jax.rewards.compute_rewards calls reward functions",
    "_get_per_token_logps_and_entropies": "grpo_jax.completion_log_probs returns log-probs",
    "vllm_generation": 'a vLLM server samples by sampler=engines.vllm(base_url), or by vllm_mode="server" in args',
}


class Trainer:
    """State, log, callbacks, model and hub of a trainer.

    Raises:
      AttributeError: a name of TRL's that is not here, with where it went; a subclass that overrides such a method.
    """

    policy: Policy
    config: _config.GRPOConfig
    train_state: TrainState | None = None

    def __init_subclass__(cls) -> None:
        for name in _ELSEWHERE.keys() & vars(cls).keys():
            raise AttributeError(f"{cls.__name__}.{name} would not be called: {_ELSEWHERE[name]}")

    def __init__(self, args: GRPOConfig, reward_funcs: Sequence[RewardFn], base_name: str | None):
        self.args, self.config = args, args.config
        self.run_dir: str | None = args.output_dir
        self.accelerator = Accelerator()
        self.num_generations = self.config.num_generations
        self._reward_funcs, self._base_name = reward_funcs, base_name
        self._callbacks: list[object] = []
        self._lines: list[Line] = []
        self._num_rows = self._max_steps = 0

    @property
    def processing_class(self) -> Tokenizer | None:
        """The tokenizer."""
        return self.policy.tokenizer

    tokenizer = processing_class

    @property
    def model(self) -> Model:
        """The policy by the names that scripts use of a model of transformers."""
        return Model(self.policy, self._base_name)

    @property
    def state(self) -> TrainerState:
        """How far the run is, with its log, by the names of transformers' `TrainerState`."""
        lines = self._lines if self.run_dir is None else read_lines(Path(self.run_dir) / "metrics.jsonl")
        return records.state_of(
            lines,
            max_steps=self._max_steps,
            num_rows=self._num_rows,
            logging_steps=self.config.logging_steps,
            reward_names=reward_names(self._reward_funcs),
            leads=self.is_world_process_zero(),
        )

    @property
    def hub_model_id(self) -> str:
        """The repository of the hub that the policy is pushed to."""
        if self.config.hub_model_id is None and self.run_dir is None:
            raise ValueError("hub_model_id and output_dir are None: give one in GRPOConfig, to name the repository.")
        return self.config.hub_model_id or Path(str(self.run_dir)).absolute().name

    def __getattr__(self, name: str) -> object:
        raise not_here("GRPOTrainer", name, _ELSEWHERE)

    def is_world_process_zero(self) -> bool:
        """Whether this process is the one that logs and writes."""
        return self.accelerator.is_main_process

    is_local_process_zero = is_world_process_zero

    def add_callback(self, callback: object) -> None:
        """Add a callback: a function, or an object or class of transformers' `TrainerCallback`."""
        checked = check_callback(callback, self.config.logging_steps)
        self._callbacks += [] if checked is None else [checked]

    def remove_callback(self, callback: object) -> None:
        """Remove a callback, or the first one of a class."""
        self.pop_callback(callback)

    def pop_callback(self, callback: object) -> object | None:
        """Remove a callback, or the first one of a class, and return it; None if there is none."""
        for i, one in enumerate(self._callbacks):
            if one is callback or type(one) is callback:
                return self._callbacks.pop(i)
        return None

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print the numbers of a split, in the first process."""
        if self.is_world_process_zero():
            records.print_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write the numbers of a split into `<split>_results.json` of the run directory, and `all_results.json`."""
        if self.is_world_process_zero():
            records.write_metrics(self._directory(), split, metrics, combined=combined)

    def save_state(self) -> None:
        """Write `trainer_state.json` into the run directory; the run itself does not read it."""
        if self.is_world_process_zero():
            records.write_state(self._directory(), self.state)

    def end(self) -> None:
        """Return: trackers were closed at the end of `train`."""

    def _directory(self) -> Path:
        if self.run_dir is None:
            raise ValueError("output_dir is None in GRPOConfig: say where to write.")
        return Path(self.run_dir)

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The numbers of a line by TRL's names."""
        return records.trl_names(metrics, reward_names(self._reward_funcs))

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.append({"step": step, **metrics})

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
        config = self.config
        return push_to_hub(
            self.policy,
            self.hub_model_id,
            run_dir=self.run_dir if self.train_state is not None else None,
            base_model=base_model,
            dataset=dataset_name,
            license=license,
            private=config.hub_private_repo if private is None else private,
            revision=revision or config.hub_revision,
            commit_message=commit_message,
        )
