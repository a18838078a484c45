"""The commands: each reads its run and calls the Python API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from grpo_jax.cli.chat import talk, typed
from grpo_jax.cli.init import write_start
from grpo_jax.cli.keys import GROUPS
from grpo_jax.cli.manifests import launch
from grpo_jax.cli.named import is_reference
from grpo_jax.cli.pictures import compare, report
from grpo_jax.cli.policies import load_policy, load_teacher
from grpo_jax.cli.runfile import NAME, RunFile, Wanted, config_of, in_folder, read_run
from grpo_jax.cli.stages import has_checkpoints, last_dir, read_sft_config
from grpo_jax.cli.yaml12 import dump_yaml, read_file
from grpo_jax.compat.scripts import from_trl_script
from grpo_jax.config.sft import Config, SFTConfig, config_class
from grpo_jax.devices import distributed
from grpo_jax.hub.huggingface import save_pretrained
from grpo_jax.hub.peft import merge_lora, write_policy
from grpo_jax.keep.run_dir import POLICY
from grpo_jax.keep.stored import load_params
from grpo_jax.messages import some
from grpo_jax.planning import plan as plan_run
from grpo_jax.policy import Policy
from grpo_jax.run.evaluate import evaluate_rows
from grpo_jax.run.evaluation import EvaluationSettings
from grpo_jax.run.rehearse import rehearse
from grpo_jax.run.sft import sft
from grpo_jax.run.train import train as train_policy
from grpo_jax.types import Json
from grpo_jax.watch.writer import RunWriter, plain, read_settings

_ALL: tuple[Wanted, ...] = ("model", "data", "rewards")
_OF_SAMPLING = [name for name, group in GROUPS.items() if group in ("Sampling", "Batches")]
_OF_SAMPLING += ["per_device_eval_batch_size", "num_generations_eval", "temperature_eval", "compute_dtype"]
_OF_SFT = ["chat_template_kwargs", "seed", "compute_dtype"]
"""Settings of a run that hold for what is sampled from it: of SFT, whose batches have no groups, a few."""


def init(arguments: Namespace) -> None:
    """`grpo-jax init`."""
    files = write_start(arguments.dir, arguments.model)
    print("\n".join(map(str, files)))
    print(f"begin: grpo-jax train {files[0]}")


def train(arguments: Namespace) -> None:
    """`grpo-jax train`."""
    run = _read(arguments, arguments.run)
    _train(run, resume=arguments.resume, dry_run=arguments.dry_run)


def resume(arguments: Namespace) -> None:
    """`grpo-jax resume`."""
    run_dir = Path(arguments.run_dir).expanduser()
    if not (run_dir / NAME).is_file() and (run_dir / "run.json").is_file():
        program = " ".join(read_settings(run_dir).get("argv") or ["the program"])
        raise ValueError(
            f"{run_dir} was begun from Python, and its data and reward functions are there: run {program!r} again, and"
            " train(..., run_dir=...) goes on where it stopped"
        )
    run = _read(arguments, _kept_file(run_dir))
    _train(dataclasses.replace(run, run_dir=run_dir), resume="must")


def _read(arguments: Namespace, path: str | Path) -> RunFile:
    """Read the run of a file, in this process or as one of several; only the first of them prints."""
    distributed.start(arguments)
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)
    return read_run(path, arguments.keys, wanted=_ALL)


def _kept_file(run_dir: Path) -> Path:
    """Return the RUN.yaml that a run directory keeps."""
    if (run_dir / NAME).is_file():
        return run_dir / NAME
    if not run_dir.is_dir():
        runs = [str(path.parent) for path in sorted(run_dir.parent.glob("*/run.json"))]
        raise FileNotFoundError(
            f"{run_dir} is no directory; give that of a run" + (f": there are {some(runs)}" if runs else "")
        )
    if (run_dir / "run.json").is_file():
        raise ValueError(
            f"{run_dir} was begun from Python, and its files do not hold the whole policy (of adapters the base is"
            " elsewhere): load that in Python, and give it the params of"
            " grpo_jax.keep.stored.load_params(run_dir, policy.params)"
        )
    raise FileNotFoundError(f"{run_dir} holds no run: neither {NAME}, of grpo-jax train, nor run.json, of train")


def _run_at(run_dir: Path, keys: Mapping[str, str], wanted: Sequence[Wanted]) -> RunFile:
    """Read the run of a directory: by its RUN.yaml, or by what `train` in Python has left there."""
    kept = run_dir / POLICY
    if (run_dir / NAME).is_file() or not (kept / "config.json").is_file():
        return read_run(_kept_file(run_dir), keys, wanted=wanted)
    settings = read_settings(run_dir)
    config = settings["config"]
    names = _OF_SFT if config_class(config) is SFTConfig else _OF_SAMPLING
    stated = {name: config[name] for name in names if name in config}
    stated["model"] = {"config": str(kept / "config.json"), "tokenizer": str(kept)}
    stated["param_dtype"] = settings.get("param_dtype", "float32")
    texts = {name: json.dumps(value) for name, value in stated.items()}
    return read_run(None, {**texts, **keys}, wanted=wanted)


def _train(run: RunFile, *, resume: str, dry_run: bool = False) -> None:
    """Train, or rehearse."""
    if run.quantize is not None and run.lora is None:
        raise ValueError(
            f"quantize = {run.quantize!r}: quantized params cannot be trained; give lora, the rank of adapters on them"
        )
    if dry_run and "grpo" not in run.stages:
        raise ValueError("--dry-run: it rehearses GRPO, and stages has none; leave it out")
    policy = load_policy(run)
    if dry_run:
        rehearse(
            policy,
            run.rows,
            run.rewards,
            run.config,
            eval_dataset=run.eval_rows,
            tools=run.tools,
            environment_factory=run.environment_factory,
            sampler=run.sampler,
            advantage_fn=run.advantage_fn,
            surrogate=run.surrogate,
            teacher=load_teacher(run),
            teacher_prompt=run.teacher_prompt,
            donate=True,
        )
        return
    with _kept(run) as keep, _said_how_to_go_on(run):
        policy, resume = _first_stage(run, policy, resume, keep)
        if "grpo" in run.stages:
            train_policy(
                policy,
                run.rows,
                run.rewards,
                run.config,
                eval_dataset=run.eval_rows,
                run_dir=run.run_dir,
                resume=resume,
                callbacks=[keep],
                tools=run.tools,
                environment_factory=run.environment_factory,
                sampler=run.sampler,
                advantage_fn=run.advantage_fn,
                surrogate=run.surrogate,
                teacher=load_teacher(run),
                teacher_prompt=run.teacher_prompt,
                donate=True,
            )
    if (into := run.run_dir) is not None:
        where = last_dir(run.stages, into)
        print(f"{where}: report.html shows the run; grpo-jax export {into} OUT writes the model")


def _first_stage(
    run: RunFile, policy: Policy, resume: str, keep: Callable[[int, Mapping[str, float]], None]
) -> tuple[Policy, str]:
    """Make or end the stage of SFT: the policy that GRPO begins with, and how that resumes.

    Once GRPO has a checkpoint of its own there is nothing to do: it goes on from there.
    """
    if run.sft is None or (run.run_dir is not None and has_checkpoints(run.run_dir)):
        return policy, resume
    state = sft(
        policy,
        run.sft.rows,
        run.sft.config,
        eval_dataset=run.sft.eval_rows,
        run_dir=None if run.run_dir is None else run.run_dir / "sft",
        resume=resume,
        callbacks=[keep],
        donate=True,
    )
    return policy.replace(params=state.params), "never" if resume == "never" else "auto"


@contextlib.contextmanager
def _said_how_to_go_on(run: RunFile) -> Iterator[None]:
    """Name the command that goes on with a run that a signal ends."""
    try:
        yield
    except SystemExit:
        print(f"to go on: grpo-jax resume {run.run_dir}", file=sys.stderr)
        raise


@contextlib.contextmanager
def _kept(run: RunFile) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Keep the RUN.yaml in the run directory, for `resume` and `export`; yields a callback.

    A file that is there already is that of the run there, which may refuse to go on as this one asks: it is replaced
    when the run has. One that is new goes again if no run begins.
    """
    if run.run_dir is None or jax.process_index() > 0:
        yield lambda step, metrics: None
        return
    file, text = run.run_dir / NAME, run.text()
    new = not file.exists()

    def write(step: int, metrics: Mapping[str, float]) -> None:
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            RunWriter(run.run_dir).replace(NAME, lambda out: out.write(text.encode()))

    if new:
        write(0, {})
    try:
        yield write
    except Exception:
        if new and not (file.parent / "run.json").exists():
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty
                file.parent.rmdir()
        raise


def plan(arguments: Namespace) -> None:
    """`grpo-jax plan`."""
    run = read_run(arguments.run, arguments.keys)
    model: Json | str
    if isinstance(run.model, Mapping):
        model = config_of(run.model, run.folder)
    elif run.model is None or is_reference(run.model):
        model = load_policy(run).config
    else:
        model = in_folder(run.model, run.folder)
    configs: dict[str, Config] = {"sft": read_sft_config(run.values)} if "sft" in run.stages else {}
    configs |= {"grpo": run.config} if "grpo" in run.stages else {}
    for stage, config in configs.items():
        found = plan_run(
            model,
            config,
            prompt_length=arguments.prompt_length or run.config.max_prompt_length or 256,
            memory=None if arguments.memory is None else arguments.memory * 1e9,
            param_dtype=run.param_dtype,
            device=arguments.device,
            lora=None if run.lora is None else {"rank": run.lora.rank, "targets": run.lora.targets},
            quantize=run.quantize,
            quantize_embeddings=run.quantize_embeddings,
            donate=True,
        )
        if len(configs) > 1:
            print(f"stage {stage}:")
        print(found)


def evaluate(arguments: Namespace) -> None:
    """`grpo-jax evaluate`."""
    target = Path(arguments.run).expanduser()
    is_run = target.is_dir()
    run = _run_at(target, arguments.keys, _ALL) if is_run else read_run(target, arguments.keys, wanted=_ALL)
    policy, step = load_policy(run), None
    if target.is_dir():
        step, params = load_params(last_dir(run.stages, target), policy.params, arguments.checkpoint)
        policy = policy.replace(params=params)
    elif arguments.checkpoint is not None:
        raise ValueError(f"--checkpoint {arguments.checkpoint}: {target} is a file; give the directory of a run")
    rows = run.rows if run.eval_rows is None else run.eval_rows
    metrics, found = evaluate_rows(
        policy,
        rows,
        run.rewards,
        EvaluationSettings.of(run.config),
        tools=run.tools,
        environment_factory=run.environment_factory,
        sampler=run.sampler if "sampler" in arguments.keys else None,
    )
    if arguments.out is not None:
        lines = [json.dumps(plain(row), ensure_ascii=False) + "\n" for row in found]
        Path(arguments.out).write_text("".join(lines), encoding="utf-8")
    where = {} if step is None else {"step": step}
    print(json.dumps(plain({**where, "rows": len(rows), **metrics})))


def export(arguments: Namespace) -> None:
    """`grpo-jax export`."""
    run_dir = Path(arguments.run_dir).expanduser()
    run = _run_at(run_dir, arguments.keys, ("model",))
    policy = load_policy(run)
    if arguments.merge and run.lora is None:
        raise ValueError("--merge: the run has no adapters (lora); leave it out")
    step, params = load_params(last_dir(run.stages, run_dir), policy.params, arguments.checkpoint)
    policy = policy.replace(params=params)
    if arguments.merge:
        save_pretrained(arguments.out, merge_lora(policy))
    else:
        write_policy(arguments.out, policy)
    print(f"{arguments.out}: the policy of step {step}")


def chat(arguments: Namespace) -> None:
    """`grpo-jax chat`."""
    if arguments.samples < 1:
        raise ValueError(f"--samples {arguments.samples}: use a whole number from 1 up")
    target = Path(arguments.model).expanduser()
    if (target / NAME).is_file() or (target / "run.json").is_file():
        run = _run_at(target, arguments.keys, ("model",))
        policy = load_policy(run)
        policy = policy.replace(
            params=load_params(last_dir(run.stages, target), policy.params, arguments.checkpoint)[1]
        )
    elif arguments.checkpoint is not None:
        raise ValueError(f"--checkpoint {arguments.checkpoint}: {arguments.model} is no directory of a run")
    else:
        run = read_run(None, {"model": arguments.model, **arguments.keys}, wanted=("model",))
        policy = load_policy(run)
    echo = bool(arguments.say) or not sys.stdin.isatty()
    talk(policy, run.config, arguments.say or typed(), samples=arguments.samples, echo=echo)


def from_trl(arguments: Namespace) -> None:
    """`grpo-jax from-trl`; the exit status is 1 where something cannot be said here."""
    run, moved = from_trl_script(read_file(Path(arguments.script).expanduser()))
    text = "".join(f"# {line}\n" for line in moved.notes()) + dump_yaml(run)
    if arguments.out is None:
        print(text, end="")
    else:
        Path(arguments.out).write_text(text, encoding="utf-8")
    if moved.missing:
        raise SystemExit(1)


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "init": init,
    "train": train,
    "resume": resume,
    "plan": plan,
    "launch": launch,
    "evaluate": evaluate,
    "chat": chat,
    "export": export,
    "from-trl": from_trl,
    "report": report,
    "compare": compare,
}
"""Name of a command → its function, which takes the parsed arguments."""
