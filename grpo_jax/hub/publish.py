"""A policy on the Hugging Face hub: the one of a run at each of its checkpoints, or any directory."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import fetch, gather_objects
from grpo_jax.hub.huggingface import save_pretrained
from grpo_jax.hub.peft import save_lora
from grpo_jax.hub.policy import Policy
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.types import Params


def write_policy(directory: str | os.PathLike[str], policy: Policy) -> None:
    """Write a policy in Hugging Face's layout, one with adapters in PEFT's; all processes of a run call it together."""
    if not isinstance(policy.model, LoraModel):
        return save_pretrained(directory, policy)
    whole = policy.replace(params=fetch(policy.params))
    if jax.process_index() == 0:
        save_lora(directory, whole)
    gather_objects(None)  # the others wait until all is there


class Publisher:
    """Pushes the policy of a run to a repository of the hub, from the directory `hub` of the run directory.

    The hub is that of the variable HF_ENDPOINT, the login that of `hf auth login` or HF_TOKEN. A push in the background
    that fails is a warning, and one that is due while another is under way is left out; the last one is waited for.
    Without `push_to_hub` every method does nothing.

    Args:
      config: says whether, where to and when.
      policy: of the run, for all but its params.
      run_dir: of the run.

    Raises:
      ValueError: there is no run_dir, or the model is not one that can be written.
    """

    def __init__(self, config: GRPOConfig, policy: Policy, run_dir: str | os.PathLike[str] | None):
        self._config, self._policy = config, policy
        self._job: tuple[int, Future[Any]] | None = None
        self._repository = ""
        self._api: Any = None
        if not config.push_to_hub:
            return
        if run_dir is None:
            raise ValueError("push_to_hub = True: the policy is written before it is pushed; give run_dir")
        if not isinstance(policy.model, Transformer | LoraModel):
            raise ValueError("push_to_hub = True: the policy has a model of your own, which no checkpoint can hold")
        self._directory = Path(run_dir).expanduser().absolute() / "hub"

    def open(self) -> None:
        """Find the repository, or make it.

        Raises:
          OSError: it is not there and cannot be made.
        """
        if not self._config.push_to_hub or jax.process_index() != 0:
            return
        from huggingface_hub import HfApi  # here: importing grpo_jax must stay light

        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        name = self._config.hub_model_id or self._directory.parent.name
        try:
            self._repository = self._api.create_repo(name, private=self._config.hub_private_repo, exist_ok=True).repo_id
        except Exception as error:
            raise OSError(
                f"push_to_hub = True: the repository {name!r} (hub_model_id) cannot be made ({_reason(error)}); log in"
                " by `hf auth login` or HF_TOKEN, see that the name may be yours, or set push_to_hub=False"
            ) from error

    def saved(self, step: int, params: Params, *, last: int) -> None:
        """Begin to push the policy of a checkpoint but the last, if `hub_strategy` says so and no push is under way."""
        if not self._config.push_to_hub or self._config.hub_strategy == "end" or step == last:
            return
        busy = self._job is not None and not self._job[1].done()
        if any(gather_objects(busy)):
            return
        self._finish_job()
        write_policy(self._directory, self._policy.replace(params=params))
        if self._api is not None:
            self._job = step, self._upload(f"Training in progress, step {step}", wait=False)

    def end(self, params: Params, message: str = "End of training") -> None:
        """Push the policy that a run ends with, and wait until it is there.

        Raises:
          OSError: it could not be pushed; where it lies, and what to do.
        """
        if not self._config.push_to_hub:
            return
        if self._job is not None:
            self._job[1].exception()  # its files are read until then
            self._finish_job()
        write_policy(self._directory, self._policy.replace(params=params))
        if self._api is None:
            return
        try:
            self._upload(message, wait=True)
        except Exception as error:
            raise OSError(
                f"the policy could not be pushed to {self._repository!r} ({_reason(error)}); it lies in"
                f" {self._directory}. Call train again with the same run_dir, which is at its end and pushes once more,"
                " or push the directory by huggingface_hub's upload_folder"
            ) from error

    def _upload(self, message: str, *, wait: bool) -> Any:
        return self._api.upload_folder(
            repo_id=self._repository,
            folder_path=self._directory,
            commit_message=message,
            revision=self._config.hub_revision,
            run_as_future=not wait,
        )

    def _finish_job(self) -> None:
        """Say of a push that is over whether it failed."""
        job, self._job = self._job, None
        error = None if job is None else job[1].exception()
        if job is not None and error is not None:
            warnings.warn(
                f"the policy of step {job[0]} could not be pushed to {self._repository!r} ({_reason(error)}); the run"
                " goes on, and pushes again at its next checkpoint",
                RuntimeWarning,
                stacklevel=3,
            )


def _reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
