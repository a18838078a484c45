"""Push a policy to the Hugging Face hub, with a model card from its run: once, or at each checkpoint of a run."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from grpo_jax.config.sft import Config
from grpo_jax.hub.huggingface import hub_endpoint
from grpo_jax.hub.peft import write_policy
from grpo_jax.messages import one_line
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Params
from grpo_jax.watch.summary import changed_settings, headline
from grpo_jax.watch.writer import JSON, read_lines, read_settings

if TYPE_CHECKING:  # importing grpo_jax must stay light
    from huggingface_hub import HfApi

MARK = "<!-- Made by grpo_jax. Without this line it is yours: a later push leaves it as it is. -->"
"""Line of a card that a push may replace."""

_PRIVATE = ("push_to_hub", "hub_", "run_name", "project", "report_to", "logging_")
"""Prefixes of fields that a card leaves out."""


def push_to_hub(
    policy: Policy,
    repo_id: str,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    base_model: str | None = None,
    dataset: str | None = None,
    license: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload policy",
) -> str:
    """Publish a policy on the hub, with a model card, in one commit.

    All weights are in Hugging Face's layout, adapters in PEFT's. An existing card is replaced only if it has the line
    that marks it as made here. The environment variable HF_ENDPOINT selects the hub; log in by `hf auth login` or
    HF_TOKEN. All processes of a run call it together.

    Args:
      policy: what to publish; after a run, `policy.replace(params=state.params)`.
      repo_id: "owner/model" or "model"; created if it does not exist.
      run_dir: directory of the run: the card then has its result, its curves and its settings.
      base_model: name on the hub of the model that training began with, for the card.
      dataset: name on the hub of the data, for the card.
      license: the hub's name of a licence, such as "apache-2.0", for the card; None leaves the field out.
      private: visibility of a new repository; None for the hub's default.
      revision: branch to push to, created if it does not exist; None for the main branch.
      commit_message: of the commit.

    Returns:
      The address of the commit; "" in processes other than the first.

    Raises:
      ValueError: a malformed repo_id, or a model that cannot be written as a checkpoint.
      FileNotFoundError: run_dir is not the directory of a run.
      PermissionError: not logged in. This and the above are raised before anything is sent or written.
      OSError: the repository cannot be created.

    Example:
      >>> push_to_hub(policy, "me/sums", license="apache-2.0")  # doctest: +SKIP
      'https://huggingface.co/me/sums/commit/...'
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    check_publishable(policy, "policy")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}: give a name like owner/model ({one_line(error)}).") from error
    if run_dir is not None and not Path(run_dir, "metrics.jsonl").is_file():
        raise FileNotFoundError(
            f"run_dir = {str(run_dir)!r}: metrics.jsonl is missing; give the directory of a run, or None."
        )
    if get_token() is None:
        raise PermissionError("not logged in to the hub: call `hf auth login`, or set HF_TOKEN.")
    name = ""
    if jax.process_index() == 0:
        name = _create(repo_id, f"repo_id is {repo_id!r}", private, revision)
    with tempfile.TemporaryDirectory(dir=run_dir) as scratch:
        directory = Path(scratch, "model")
        write_policy(directory, policy, base_name=base_model)
        if not name:
            return ""
        adapters = isinstance(policy.model, LoraModel)
        card = model_card(
            name, run_dir=run_dir, adapters=adapters, base_model=base_model, dataset=dataset, license=license
        )
        _write_card(directory, card, run_dir, name, revision)
        return _push(directory, name, revision, commit_message)


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub_endpoint())


def _create(name: str, argument: str, private: bool | None, revision: str | None) -> str:
    """Create a repository and its branch if they do not exist, and return its name with the owner."""
    try:
        full = _api().create_repo(name, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            _api().create_branch(full, branch=revision, exist_ok=True)
    except Exception as error:
        raise OSError(
            f"{argument}: the repository cannot be created ({one_line(error)});"
            " log in by `hf auth login` or HF_TOKEN, and check that you own the name"
        ) from error
    return full


def _push(directory: Path, name: str, revision: str | None, message: str) -> str:
    """Push the files of a directory in one commit, and return its address."""
    commit = _api().upload_folder(repo_id=name, folder_path=directory, revision=revision, commit_message=message)
    return str(commit.commit_url)


def _write_card(
    directory: Path, card: str, run_dir: str | os.PathLike[str] | None, name: str, revision: str | None
) -> None:
    """Write a card and the picture of a run to a directory, unless the repository has a card without `MARK`."""
    if _api().file_exists(name, "README.md", revision=revision):
        path = _api().hf_hub_download(name, "README.md", revision=revision)
        if MARK not in Path(path).read_text("utf-8"):
            return
    (directory / "README.md").write_text(card, encoding="utf-8")
    if run_dir is not None and Path(run_dir, "report.png").is_file():
        shutil.copy(Path(run_dir, "report.png"), directory)


def check_publishable(policy: Policy, what: str) -> None:
    """Raise a `ValueError` for a model that cannot be written as a checkpoint."""
    if not isinstance(policy.model, Transformer | LoraModel):
        raise ValueError(f"{what} has a model of your own, which cannot be written as a checkpoint")


def check_push(policy: Policy, run_dir: str | os.PathLike[str] | None) -> None:
    """Raise a `ValueError` if a run with `push_to_hub` could not push its policy."""
    if run_dir is None:
        raise ValueError("push_to_hub = True: the policy is written before it is pushed; give run_dir")
    check_publishable(policy, "push_to_hub = True: the policy")


class Publisher:
    """Pushes the policy of a run to the hub, from the directory `hub` of the run directory; training waits for it."""

    def __init__(self, config: Config, policy: Policy, run_dir: str | os.PathLike[str]):
        self._config, self._policy = config, policy
        self._name = ""  # of the repository; only the first process has one
        self._run_dir = Path(run_dir).expanduser().absolute()
        self._directory = self._run_dir / "hub"

    def open(self) -> None:
        """Create the repository if it does not exist; raises an `OSError` if that fails."""
        config = self._config
        name = config.hub_model_id or self._run_dir.name
        if jax.process_index() == 0:
            argument = f"push_to_hub = True: hub_model_id = {name!r}"
            self._name = _create(name, argument, config.hub_private_repo, config.hub_revision)
            (self._directory / "README.md").unlink(
                missing_ok=True
            )  # of an earlier push, if the user has edited it since

    def saved(self, step: int, params: Params, *, last: int) -> None:
        """Push the policy of a checkpoint, unless it is the last or `hub_strategy` is "end"; a failure is a warning."""
        if self._config.hub_strategy == "end" or step == last:
            return
        write_policy(self._directory, self._policy.replace(params=params))
        try:
            self._push(f"Training in progress, step {step}")
        except Exception as error:
            warnings.warn(
                f"the policy of step {step} could not be pushed to {self._name!r} ({one_line(error)}); the run"
                " continues, and pushes again at its next checkpoint",
                RuntimeWarning,
                stacklevel=3,
            )

    def end(self, params: Params, *, draw: Callable[[], object] = lambda: None) -> None:
        """Push the final policy and its card, after calling `draw` for the picture; raises an `OSError` if it fails."""
        write_policy(self._directory, self._policy.replace(params=params))
        if not self._name:
            return
        try:
            draw()
            card = model_card(self._name, run_dir=self._run_dir, adapters=isinstance(self._policy.model, LoraModel))
            _write_card(self._directory, card, self._run_dir, self._name, self._config.hub_revision)
            self._push("End of training")
        except Exception as error:
            raise OSError(
                f"the policy could not be pushed to {self._name!r} ({one_line(error)}); it is in {self._directory}."
                " Call train again with the same run_dir: the run is complete and pushes again. Or push it by"
                " `push_to_hub`"
            ) from error

    def _push(self, message: str) -> None:
        if self._name:
            _push(self._directory, self._name, self._config.hub_revision, message)


def model_card(
    repo_id: str,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    adapters: bool = False,
    base_model: str | None = None,
    dataset: str | None = None,
    license: str | None = None,
) -> str:
    """Return a model card: the hub's metadata, the result of the run, its settings, and how to load the policy.

    It leaves out the command line, paths and prompts of the run, which may be private.
    """
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(
        base_model=base_model,
        datasets=None if dataset is None else [dataset],
        library_name="peft" if adapters else "transformers",
        license=license,
        pipeline_tag="text-generation",
        tags=["grpo", "grpo_jax"],
    )
    names, load = "from_pretrained", f'from_pretrained("{repo_id}")'
    if adapters:
        names, base = "from_pretrained, load_lora", base_model or "NAME OF THE BASE"
        load = f'load_lora("{repo_id}", from_pretrained("{base}"))'
    subject = "Adapters (LoRA)" if adapters else "A language model"
    source = f" from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {repo_id.rpartition('/')[2]}",
        f"{subject}, trained{source} with [GRPO](https://arxiv.org/abs/2402.03300), by `grpo_jax`.",
        *([] if run_dir is None else _result(Path(run_dir))),
        f"```python\nfrom grpo_jax import {names}\n\npolicy = {load}\n```",
        f"The files are in the format of {'PEFT' if adapters else 'transformers'}.",
        MARK,
    ]
    return "\n\n".join(parts) + "\n"


def _result(run_dir: Path) -> list[str]:
    """Return the parts of a card about its run: headline, picture, and a table of settings that are not defaults."""
    about, sentence = read_settings(run_dir), headline(list(read_lines(run_dir / "metrics.jsonl")))
    changed = changed_settings(about.get("config", {})).items()
    rows = [f"| {name} | {_cell(x)} |" for name, x in changed if not name.startswith(_PRIVATE)]
    parts = [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []
    parts += ["![Curves of the run](report.png)"] if Path(run_dir, "report.png").is_file() else []
    return parts + ["\n".join(["| setting | value |", "|---|---|", *rows])] * bool(rows)


def _cell(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")
