"""The `grpo-jax` commands: functions that take the parsed arguments, read a run and call the Python API."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from grpo_jax.cli.chat import read_stdin, run_chat
from grpo_jax.cli.init import write_start
from grpo_jax.cli.keys import GROUPS
from grpo_jax.cli.named import find, in_folder, is_reference, server_of
from grpo_jax.cli.runfile import NAME, Part, RunFile, read_run
from grpo_jax.cli.yaml12 import dump_yaml, read_file
from grpo_jax.compat.migrate import from_trl_script
from grpo_jax.config.sft import GRPOOrSFTConfig, SFTConfig, config_class
from grpo_jax.engines import vllm_scorer
from grpo_jax.hub.files import read_json
from grpo_jax.hub.huggingface import from_pretrained, load_tokenizer, save_pretrained
from grpo_jax.hub.peft import add_lora, merge_lora, write_policy
from grpo_jax.hub.policy import init_policy
from grpo_jax.models.devices import compute_dtype
from grpo_jax.models.sharding import make_mesh
from grpo_jax.planning import plan as plan_run
from grpo_jax.policy import Policy
from grpo_jax.run import distributed
from grpo_jax.run.checkpoint_reader import load_params
from grpo_jax.run.compilation_cache import enable_compilation_cache
from grpo_jax.run.evaluate import evaluate_rows
from grpo_jax.run.placement import place_policy
from grpo_jax.run.rehearse import rehearse
from grpo_jax.run.run_dir import POLICY
from grpo_jax.run.sft import sft
from grpo_jax.run.teacher import Scorer
from grpo_jax.run.train import train as train_policy
from grpo_jax.watch.page import write_report
from grpo_jax.watch.writer import read_settings, reject_unwritable, replace_file, to_json

_ALL: tuple[Part, ...] = ("model", "data", "rewards")
_GRPO_FIELDS = [name for name, group in GROUPS.items() if group in ("Sampling", "Batches", "Text")]
_GRPO_FIELDS += ["per_device_eval_batch_size", "num_generations_eval", "temperature_eval", "compute_dtype"]
# Config fields that `chat`, `evaluate` and `export` read from run.json if a run was started from Python.


def init(arguments: Namespace) -> None:
    """Write an example run (`grpo-jax init`)."""
    files = write_start(arguments.dir)
    print("\n".join(map(str, files)))
    print(f"to start the run: grpo-jax train {files[0]}")


def train(arguments: Namespace) -> None:
    """Train or resume the run described in a file (`grpo-jax train`)."""
    _train(_read(arguments, arguments.run), resume=arguments.resume, dry_run=arguments.dry_run)


def resume(arguments: Namespace) -> None:
    """Resume the run in a directory (`grpo-jax resume`)."""
    run_dir = Path(arguments.run_dir).expanduser()
    _train(dataclasses.replace(_read(arguments, _run_file(run_dir)), run_dir=run_dir), resume="must")


def _read(arguments: Namespace, path: str | Path) -> RunFile:
    """Initialize `jax.distributed` if requested, and read a run file."""
    distributed.start(arguments)
    return read_run(path, arguments.keys, load=_ALL)


def _run_file(run_dir: Path) -> Path:
    if (run_dir / NAME).is_file():
        return run_dir / NAME
    if (run_dir / "run.json").is_file():
        raise ValueError(
            f"the run in {run_dir} was started from Python, so the directory does not contain its data, its reward"
            " functions or its adapters' base model; resume it with train(..., run_dir=...) in Python, or load its"
            " params with grpo_jax.run.checkpoint_reader.load_params(run_dir, policy.params)"
        )
    raise FileNotFoundError(f"{run_dir} is not a run directory; it contains neither {NAME} nor run.json")


def _run_at(run_dir: Path, keys: Mapping[str, str], load: Sequence[Part]) -> RunFile:
    """Read the run in a directory from run.yaml or, if it was started from Python, from run.json and policy files."""
    policy_dir = run_dir / POLICY
    if (run_dir / NAME).is_file() or not (policy_dir / "config.json").is_file():
        return read_run(_run_file(run_dir), keys, load=load)
    settings = read_settings(run_dir)
    if "config" not in settings:
        raise ValueError(
            f"{run_dir / 'run.json'} is missing or incomplete; to write it, call train(..., run_dir=...) again"
        )
    config, dtype = settings["config"], settings.get("param_dtype", "float32")
    fields = ["chat_template_kwargs", "seed", "compute_dtype"] if config_class(config) is SFTConfig else _GRPO_FIELDS
    values = {name: json.dumps(config[name], ensure_ascii=False) for name in fields if name in config}
    run = read_run(None, {**values, "param_dtype": dtype, **keys}, load=[part for part in load if part != "model"])
    policy = init_policy(
        read_json(policy_dir / "config.json") or {},
        jax.random.key(0),
        tokenizer=load_tokenizer(str(policy_dir)),
        generation_config=read_json(policy_dir / "generation_config.json"),
        dtype=run.param_dtype,
    )
    return dataclasses.replace(run, model=policy)


def _train(run: RunFile, *, resume: str, dry_run: bool = False) -> None:
    if dry_run and "grpo" not in run.stages:
        raise ValueError(f"--dry-run requires grpo in stages; got {list(run.stages)}. Add grpo or remove --dry-run.")
    policy = load_policy(run)
    if dry_run:
        return _call(rehearse, run, policy)
    callback = _keep_run_file(run)
    policy, resume = _train_sft(run, policy, resume, callback)
    if "grpo" in run.stages:
        _call(functools.partial(train_policy, run_dir=run.run_dir, resume=resume, callbacks=[callback]), run, policy)
    if run.run_dir is not None and jax.process_index() == 0:
        print(f"saved in {_last_dir(run, run.run_dir)}; to write the model: grpo-jax export {run.run_dir} OUT")


def _call(function: Callable[..., object], run: RunFile, policy: Policy) -> None:
    function(
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
        donate=True,
    )


def _train_sft(
    run: RunFile, policy: Policy, resume: str, callback: Callable[[int, Mapping[str, float]], None]
) -> tuple[Policy, str]:
    """Run or resume SFT, if any, unless GRPO has a checkpoint. Returns GRPO's initial policy and `resume` mode."""
    if run.sft is None or (run.run_dir is not None and _has_checkpoints(run.run_dir)):
        return policy, resume
    state = sft(
        policy,
        run.sft.rows,
        run.sft.config,
        eval_dataset=run.sft.eval_rows,
        run_dir=None if run.run_dir is None else run.run_dir / "sft",
        resume=resume,
        callbacks=[callback],
        donate=True,
    )
    return policy.replace(params=state.params), "never" if resume == "never" else "auto"


def _has_checkpoints(run_dir: Path) -> bool:
    # A killed process may leave a directory with a suffix, which is not a checkpoint.
    return any(path.name.isdigit() for path in (run_dir / "checkpoints").glob("*"))


def _last_dir(run: RunFile, run_dir: Path) -> Path:
    """Return the directory of the latest stage: the run directory or, for SFT, its subdirectory `sft`."""
    return run_dir if "sft" not in run.stages or _has_checkpoints(run_dir) else run_dir / "sft"


def _keep_run_file(run: RunFile) -> Callable[[int, Mapping[str, float]], None]:
    """Write the run's keys to run.yaml in the run directory, for later commands. Returns a callback for `train`.

    An existing file is replaced only by the callback, after the first logged step, since `train` may reject the new
    settings.
    """
    if run.run_dir is None or jax.process_index() > 0:
        return lambda step, metrics: None
    file, text = run.run_dir / NAME, dump_yaml({**run.values, "folder": str(run.folder)})

    def write(step: int, metrics: Mapping[str, float]) -> None:
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, lambda out: out.write(text.encode()))

    if not file.exists():
        with reject_unwritable(run.run_dir):
            write(0, {})
    return write


def load_policy(run: RunFile) -> Policy:
    """Load the policy that a run starts from, add the run's adapters, and place the policy on the run's devices."""
    enable_compilation_cache()
    if run.model is None:
        raise ValueError("model is missing; set it in RUN.yaml or pass --model")
    model = run.model if isinstance(run.model, Policy) else _named_model(run.model, run.folder)
    if isinstance(model, Policy) and run.quantize is not None:
        raise ValueError(f"quantize = {run.quantize!r}: the model is already a Policy; quantize it where it is loaded")
    policy = model if isinstance(model, Policy) else _load(str(model), run, run.quantize)
    if run.lora is not None:
        policy = add_lora(policy, jax.random.key(run.config.seed), **run.lora)
    return place_policy(policy, make_mesh(run.config.mesh) if run.config.mesh else None)


def load_teacher(run: RunFile) -> Policy | Scorer | None:
    """Load a run's teacher, which is a policy or a scorer. Returns None if the run has no teacher."""
    if run.teacher is None:
        return None
    if isinstance(run.teacher, Mapping):
        return server_of(run.teacher, vllm_scorer)
    teacher = _named_model(run.teacher, run.folder)
    return _load(teacher, run, None) if isinstance(teacher, str) else teacher


def _named_model(model: object, folder: Path) -> Policy | Scorer | str:
    """Resolve `model` to a directory, a hub name, or the object that a reference such as `module:name` refers to.

    A function or class is called, and its result is returned. Scorers (callables with a `score` method) are not called.
    """
    if not is_reference(model):
        return in_folder(str(model), folder)
    target = find(model, folder)
    is_factory = callable(target) and (isinstance(target, type) or not hasattr(target, "score"))
    return target() if is_factory else target


def _load(name: str, run: RunFile, quantize: str | None) -> Policy:
    return from_pretrained(
        name,
        dtype=compute_dtype(run.config.compute_dtype),
        param_dtype=run.param_dtype,
        mesh=make_mesh(run.config.mesh) if run.config.mesh else None,
        quantize=quantize,
    )


def plan(arguments: Namespace) -> None:
    """Estimate and print the memory and FLOPs that a run needs (`grpo-jax plan`)."""
    run = read_run(arguments.run, arguments.keys)
    named = isinstance(run.model, str) and not is_reference(run.model)
    model = in_folder(str(run.model), run.folder) if named else load_policy(run).config
    configs: dict[str, GRPOOrSFTConfig] = {} if run.sft is None else {"sft": run.sft.config}
    configs |= {"grpo": run.config} if "grpo" in run.stages else {}
    for stage, config in configs.items():
        estimate = plan_run(
            model,
            config,
            prompt_length=arguments.prompt_length or run.config.max_prompt_length or 256,
            memory=None if arguments.memory is None else arguments.memory * 1e9,
            param_dtype=run.param_dtype,
            device=arguments.device,
            lora=run.lora and {key: run.lora[key] for key in ("rank", "targets") if key in run.lora},
            quantize=run.quantize,
            donate=True,
        )
        if len(configs) > 1:
            print(f"stage {stage}:")
        print(estimate)


def _load_checkpoint(run: RunFile, run_dir: Path, checkpoint: int | None) -> tuple[int, Policy]:
    """Return the step and the policy of a checkpoint. If `checkpoint` is None, the latest one is used."""
    policy = load_policy(run)
    params, last_dir = policy.params, _last_dir(run, run_dir)
    if not read_settings(last_dir).get("config", {}).get("freeze_vision", True):
        from grpo_jax.hub.vision import load_tower

        params = {**params, "tower": load_tower(policy, params["norm"]["scale"].dtype)[1]}
    step, params = load_params(last_dir, params, checkpoint)
    return step, policy.replace(params=params)


def evaluate(arguments: Namespace) -> None:
    """Evaluate a model or a checkpoint and print its mean rewards (`grpo-jax evaluate`)."""
    if arguments.out is not None and not Path(arguments.out).parent.is_dir():
        raise FileNotFoundError(f"--out {arguments.out}: its directory does not exist; create it first")
    target = Path(arguments.run).expanduser()
    steps = dict[str, int]()
    if target.is_dir():
        run = _run_at(target, arguments.keys, _ALL)
        steps["step"], policy = _load_checkpoint(run, target, arguments.checkpoint)
    else:
        run = read_run(target, arguments.keys, load=_ALL)
        if arguments.checkpoint is not None:
            raise ValueError(f"--checkpoint {arguments.checkpoint} requires a run directory; got the file {target}")
        policy = load_policy(run)
    rows = run.rows if run.eval_rows is None else run.eval_rows
    metrics, completions = evaluate_rows(
        policy,
        rows,
        run.rewards,
        run.config,
        params=policy.params,
        tools=run.tools,
        environment_factory=run.environment_factory,
        sampler=run.sampler if "sampler" in arguments.keys else None,
    )
    print(json.dumps(to_json({**steps, "rows": len(rows), **metrics})))
    if arguments.out is not None:
        lines = [json.dumps(to_json(row), ensure_ascii=False) + "\n" for row in completions]
        Path(arguments.out).write_text("".join(lines), encoding="utf-8")


def export(arguments: Namespace) -> None:
    """Write a checkpoint's policy in Hugging Face's or PEFT's format (`grpo-jax export`)."""
    run_dir = Path(arguments.run_dir).expanduser()
    run = _run_at(run_dir, arguments.keys, ("model",))
    step, policy = _load_checkpoint(run, run_dir, arguments.checkpoint)
    if arguments.merge:
        save_pretrained(arguments.out, merge_lora(policy))
    else:
        named = isinstance(run.model, str) and not is_reference(run.model)
        write_policy(arguments.out, policy, base_name=in_folder(str(run.model), run.folder) if named else None)
    print(f"wrote the policy from step {step} to {arguments.out}")


def chat(arguments: Namespace) -> None:
    """Complete prompts with a model or a checkpoint (`grpo-jax chat`)."""
    keys = dict(arguments.keys)
    if "temperature" in keys:  # several greedy completions of a prompt are rejected
        keys |= {"temperature_eval": keys.pop("temperature"), "num_generations_eval": "1"}
    target = Path(arguments.model).expanduser()
    if (target / NAME).is_file() or (target / "run.json").is_file():
        run = _run_at(target, keys, ("model",))
        _, policy = _load_checkpoint(run, target, arguments.checkpoint)
    elif arguments.checkpoint is not None:
        raise ValueError(f"--checkpoint {arguments.checkpoint} requires a run directory; got {arguments.model}")
    else:
        run = read_run(None, {"model": arguments.model, **keys}, load=("model",))
        policy = load_policy(run)
    echo = bool(arguments.say) or not sys.stdin.isatty()
    run_chat(policy, run.config, arguments.say or read_stdin(), echo=echo)


def report(arguments: Namespace) -> None:
    """Rewrite a run's report (`grpo-jax report`)."""
    run_dir = Path(arguments.run_dir).expanduser()
    if not (run_dir / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{run_dir} does not contain metrics.jsonl; pass a run directory")
    write_report(run_dir)
    print("\n".join(str(run_dir / name) for name in ("report.html", "report.png")))


def from_trl(arguments: Namespace) -> None:
    """Convert a TRL config to a RUN.yaml (`grpo-jax from-trl`). The exit status is 1 if a field cannot be converted."""
    run, migration = from_trl_script(read_file(Path(arguments.script).expanduser()))
    text = "".join(f"# {line}\n" for line in migration.notes()) + dump_yaml(run)
    if arguments.out is None:
        print(text, end="")
    else:
        Path(arguments.out).write_text(text, encoding="utf-8")
    if migration.missing:
        raise SystemExit(f"grpo-jax from-trl: fields that cannot be converted: {', '.join(migration.missing)}")
