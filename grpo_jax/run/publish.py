"""The policy of a run on the hub, at each of its checkpoints and at its end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from grpo_jax.config.sft import Config
from grpo_jax.devices.sharding import gather_objects
from grpo_jax.hub.peft import write_policy
from grpo_jax.hub.publish import Repository, check_publishable
from grpo_jax.messages import one_line
from grpo_jax.policy import Policy
from grpo_jax.types import Params

if TYPE_CHECKING:  # importing grpo_jax must stay light
    from huggingface_hub import CommitInfo


class Publisher:
    """Pushes the policy of a run to the hub, from the directory `hub` of the run directory; nothing without
    `push_to_hub`.

    A failed push in the background is a warning; one that is due while another is running is left out. Raises a
    `ValueError` without run_dir, or for a model that cannot be written.
    """

    def __init__(self, config: Config, policy: Policy, run_dir: str | os.PathLike[str] | None):
        self._config, self._policy = config, policy
        self._job: tuple[int, Future[CommitInfo]] | None = None
        self._repository: Repository | None = None
        if not config.push_to_hub:
            return
        if run_dir is None:
            raise ValueError("push_to_hub = True: the policy is written before it is pushed; give run_dir")
        check_publishable(policy, "push_to_hub = True: the policy")
        self._run_dir = Path(run_dir).expanduser().absolute()
        self._directory = self._run_dir / "hub"

    def open(self) -> None:
        """Find the repository, or create it; an `OSError` says why neither works."""
        config = self._config
        if not config.push_to_hub or jax.process_index() != 0:
            return
        name = config.hub_model_id or self._run_dir.name
        argument = f"push_to_hub = True: hub_model_id = {name!r}"
        self._repository = Repository(name, argument, private=config.hub_private_repo, revision=config.hub_revision)

    def saved(self, step: int, params: Params, *, last: int) -> None:
        """Begin to push the policy of a checkpoint but the last, if `hub_strategy` says so and no push is under way."""
        if not self._config.push_to_hub or self._config.hub_strategy == "end" or step == last:
            return
        busy = self._job is not None and not self._job[1].done()
        if any(gather_objects(busy)):
            return
        self._finish_job()
        write_policy(self._directory, self._policy.replace(params=params))
        if self._repository is not None:
            message = f"Training in progress, step {step}"
            self._job = step, self._repository.commit(self._directory, {}, message, in_background=True)

    def end(self, params: Params, *, draw: Callable[[], object] = lambda: None) -> None:
        """Push the final policy and its card, and wait for it; an `OSError` says where the files are and what to do."""
        if not self._config.push_to_hub:
            return
        if self._job is not None:
            self._job[1].exception()  # its files are read until then
            self._finish_job()
        write_policy(self._directory, self._policy.replace(params=params))
        if self._repository is None:
            return
        try:
            draw()
            files = self._repository.card(self._policy, self._run_dir)
            self._repository.commit(self._directory, files, "End of training")
        except Exception as error:
            raise OSError(
                f"the policy could not be pushed to {self._repository.name!r} ({one_line(error)}); it lies in"
                f" {self._directory}. Call train again with the same run_dir, which is at its end and pushes once more,"
                " or push it by `push_to_hub`"
            ) from error

    def _finish_job(self) -> None:
        """Say of a push that is over whether it failed."""
        job, self._job = self._job, None
        error = None if job is None else job[1].exception()
        if job is not None and error is not None and self._repository is not None:
            warnings.warn(
                f"the policy of step {job[0]} could not be pushed to {self._repository.name!r} ({one_line(error)}); the"
                " run goes on, and pushes again at its next checkpoint",
                RuntimeWarning,
                stacklevel=3,
            )
