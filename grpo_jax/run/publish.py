"""Push policies to the Hugging Face hub, with a model card made from the run: once, or at each checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from grpo_jax.config.sft import Config
from grpo_jax.hub.huggingface import hub_endpoint
from grpo_jax.hub.peft import write_policy
from grpo_jax.messages import one_line
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import gather_objects
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Params
from grpo_jax.watch.summary import changed_settings, headline
from grpo_jax.watch.writer import JSON, read_lines, read_settings

if TYPE_CHECKING:  # importing grpo_jax must stay light
    from huggingface_hub import CommitInfo, HfApi

Files = dict[str, Path | bytes]
"""Files of a repository by their names: where they lie, or their content."""

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
      Once `hf auth login` has been called, this makes the repository "me/sums" and returns where its commit is:

      >>> from grpo_jax import init_policy, push_to_hub
      >>> policy = init_policy({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...                       "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
      ...                       "num_key_value_heads": 1, "head_dim": 8}, jax.random.key(0))
      >>> push_to_hub(policy, "me/sums", license="apache-2.0")  # doctest: +SKIP
      >>> push_to_hub(policy, "me/my/sums")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ValueError: repo_id is 'me/my/sums': give a name like owner/model (HFValidationError: ...).
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
    repository = None
    if jax.process_index() == 0:
        repository = Repository(repo_id, f"repo_id is {repo_id!r}", private=private, revision=revision)
    with tempfile.TemporaryDirectory(dir=run_dir) as scratch:
        write_policy(Path(scratch, "model"), policy, base_name=base_model)
        if repository is None:
            return ""
        files = repository.card(policy, run_dir, base_model, dataset, license)
        return str(repository.commit(Path(scratch, "model"), files, commit_message).commit_url)


class Repository:
    """One branch of a repository of the hub, created if it does not exist; an OSError begins with `argument`."""

    def __init__(self, name: str, argument: str, *, private: bool | None, revision: str | None):
        from huggingface_hub import HfApi

        self._api: HfApi = HfApi(endpoint=hub_endpoint())
        self._revision = revision
        try:
            self.name = self._api.create_repo(name, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/"):
                self._api.create_branch(self.name, branch=revision, exist_ok=True)
        except Exception as error:
            raise OSError(
                f"{argument}: the repository cannot be created ({one_line(error)});"
                " log in by `hf auth login` or HF_TOKEN, and check that you own the name"
            ) from error

    def card(
        self,
        policy: Policy,
        run_dir: str | os.PathLike[str] | None,
        base_model: str | None = None,
        dataset: str | None = None,
        license: str | None = None,
    ) -> Files:
        """The card of a policy with its picture; {} if a card exists that was not made here."""
        if self._api.file_exists(self.name, "README.md", revision=self._revision):
            path = self._api.hf_hub_download(self.name, "README.md", revision=self._revision)
            if MARK not in Path(path).read_text("utf-8"):
                return {}
        picture = None if run_dir is None else Path(run_dir, "report.png")
        files: Files = {"report.png": picture} if picture is not None and picture.is_file() else {}
        card = model_card(
            self.name,
            run_dir=run_dir,
            adapters=isinstance(policy.model, LoraModel),
            base_model=base_model,
            dataset=dataset,
            license=license,
            picture="report.png" if files else None,
        )
        return {"README.md": card.encode(), **files}

    def commit(self, directory: Path, files: Files, message: str, *, in_background: bool = False) -> Any:
        """Push the files of a directory and others in one commit; return its `CommitInfo`, or a future of it."""
        from huggingface_hub import CommitOperationAdd

        added: Files = {**{path.name: path for path in sorted(directory.iterdir())}, **files}
        create: Any = self._api.create_commit  # its overloads take no bool for `run_as_future`
        return create(
            self.name,
            [CommitOperationAdd(name, content) for name, content in added.items()],
            commit_message=message,
            revision=self._revision,
            run_as_future=in_background,
        )


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
    """Pushes the policy of a run to the hub, from the directory `hub` of the run directory.

    A failed push in the background is a warning; one that is due while another is running is skipped.
    """

    def __init__(self, config: Config, policy: Policy, run_dir: str | os.PathLike[str]):
        self._config, self._policy = config, policy
        self._job: tuple[int, Future[CommitInfo]] | None = None
        self._repository: Repository | None = None
        self._run_dir = Path(run_dir).expanduser().absolute()
        self._directory = self._run_dir / "hub"

    def open(self) -> None:
        """Find the repository, or create it; an `OSError` says why neither works."""
        config = self._config
        if jax.process_index() != 0:
            return
        name = config.hub_model_id or self._run_dir.name
        argument = f"push_to_hub = True: hub_model_id = {name!r}"
        self._repository = Repository(name, argument, private=config.hub_private_repo, revision=config.hub_revision)

    def saved(self, step: int, params: Params, *, last: int) -> None:
        """Begin to push the policy of a checkpoint, unless it is the last, or `hub_strategy` is "end"."""
        if self._config.hub_strategy == "end" or step == last:
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
                f"the policy could not be pushed to {self._repository.name!r} ({one_line(error)}); it is in"
                f" {self._directory}. Call train again with the same run_dir: the run is complete and pushes again. Or"
                " push it by `push_to_hub`"
            ) from error

    def _finish_job(self) -> None:
        """Warn if a push that has ended failed."""
        job, self._job = self._job, None
        error = None if job is None else job[1].exception()
        if job is not None and error is not None and self._repository is not None:
            warnings.warn(
                f"the policy of step {job[0]} could not be pushed to {self._repository.name!r} ({one_line(error)}); the"
                " run continues, and pushes again at its next checkpoint",
                RuntimeWarning,
                stacklevel=3,
            )


def model_card(
    repo_id: str,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    adapters: bool = False,
    base_model: str | None = None,
    dataset: str | None = None,
    license: str | None = None,
    picture: str | None = None,
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
        *([] if run_dir is None else _result(Path(run_dir), picture)),
        f"```python\nfrom grpo_jax import {names}\n\npolicy = {load}\n```",
        f"The files are in the format of {'PEFT' if adapters else 'transformers'}.",
        MARK,
    ]
    return "\n\n".join(parts) + "\n"


def _result(run_dir: Path, picture: str | None) -> list[str]:
    """Return the parts of a card about its run: headline, picture, and a table of settings that are not defaults."""
    about, sentence = read_settings(run_dir), headline(list(read_lines(run_dir / "metrics.jsonl")))
    changed = changed_settings(about.get("config", {})).items()
    rows = [f"| {name} | {_cell(x)} |" for name, x in changed if not name.startswith(_PRIVATE)]
    parts = [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []
    parts += [f"![Curves of the run]({picture})"] if picture else []
    return parts + ["\n".join(["| setting | value |", "|---|---|", *rows])] * bool(rows)


def _cell(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")
