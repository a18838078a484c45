"""Objects that scripts find beside a trainer: its accelerator, its model, and the error of a name that is not here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import jax

from grpo_jax.hub.peft import write_policy
from grpo_jax.hub.publish import push_to_hub
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import count_parameters
from grpo_jax.policy import Policy

_Object = TypeVar("_Object")

PAGE = "docs/coming_from_trl.md lists what is here"


def not_here(owner: str, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """The error of a name of TRL's or transformers' that an object has not, with where to find what it stood for."""
    return AttributeError(f"{owner} has no {name} here: {elsewhere.get(name, PAGE)}")


class Accelerator:
    """`trainer.accelerator`: the processes of the run, by the names of Accelerate's `Accelerator`.

    Example:
      >>> accelerator = Accelerator()
      >>> accelerator.print("done"), accelerator.is_main_process, accelerator.unwrap_model("a model")
      done
      (None, True, 'a model')
    """

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that logs and writes."""
        return jax.process_index() == 0

    is_local_main_process = is_main_process

    @property
    def process_index(self) -> int:
        """Number of this process."""
        return jax.process_index()

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return jax.process_count()

    @property
    def device(self) -> jax.Device:
        """The first device of this process."""
        return jax.local_devices()[0]

    def print(self, *values: object) -> None:
        """Print, in the first process."""
        if self.is_main_process:
            print(*values)

    def unwrap_model(self, model: _Object) -> _Object:
        """Return the model: nothing wraps it."""
        return model

    def wait_for_everyone(self) -> None:
        """Return: processes wait for each other where they compute together."""

    def __getattr__(self, name: str) -> object:
        raise not_here("trainer.accelerator", name, {"gather": "metrics are gathered already", "backward": _GRADIENT})


_GRADIENT = "jax.grad of a function with grpo_jax.grpo_loss gives gradients"
_GENERATE = "grpo_jax.generate(policy.model, policy.params, prompts, key, ...) samples from trainer.policy"
_IN_PARAMS = "trainer.policy.params is the tree of arrays"
_MODEL = {
    "generate": _GENERATE,
    "named_parameters": _IN_PARAMS,
    "parameters": _IN_PARAMS,
    "state_dict": _IN_PARAMS,
    "eval": "leave it out: no model here has a mode",
    "train": "leave it out: no model here has a mode",
    "to": "leave it out: mesh says where params are",
    "device": "trainer.accelerator.device",
    "merge_and_unload": "grpo_jax.merge_lora(trainer.policy) returns the merged policy",
}


class Model:
    """`trainer.model`: the policy, by the names that scripts use of a model of transformers or PEFT.

    Attributes:
      config: the content of config.json, as attributes.
      generation_config: that of generation_config.json.
    """

    def __init__(self, policy: Policy, base_name: str | None = None):
        self._policy, self._base_name = policy, base_name
        self.config, self.generation_config = (
            SimpleNamespace(**values) for values in (policy.config, policy.generation_config)
        )

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the policy in Hugging Face's layout, adapters in PEFT's."""
        write_policy(save_directory, self._policy, base_name=self._base_name)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, commit_message: str = "Upload model") -> str:
        """Push the policy to a repository of the hub, and return the address of the commit."""
        return push_to_hub(self._policy, repo_id, private=private, commit_message=commit_message)

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Count parameters; of adapters, those of the base too unless only what is trained counts."""
        trained = count_parameters(self._policy.params)
        model = self._policy.model
        return trained if only_trainable or not isinstance(model, LoraModel) else trained + count_parameters(model.base)

    def print_trainable_parameters(self) -> None:
        """Print how many parameters are trained, as PEFT does."""
        trained, all_ = self.num_parameters(only_trainable=True), self.num_parameters()
        share = 100 * trained / all_ if all_ else math.nan
        print(f"trainable params: {trained:,d} || all params: {all_:,d} || trainable%: {share:.4f}")

    def __getattr__(self, name: str) -> object:
        raise not_here("trainer.model, a policy of JAX,", name, _MODEL)

    def __repr__(self) -> str:
        return f"Model({self._policy!r})"
