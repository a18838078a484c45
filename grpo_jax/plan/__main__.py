"""The command of `plan`: what a run will need, before there are weights or devices.

    python -m grpo_jax.plan --model Qwen/Qwen2.5-7B-Instruct --mesh fsdp=8 --batch 8 --memory 80
    python -m grpo_jax.plan --model Qwen/Qwen2.5-0.5B-Instruct --device v5e-8 --mesh fsdp=8

A file of its own, because what the package imports cannot be run with -m.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import parse_mesh
from grpo_jax.plan.estimate import answer, plan

__all__ = ["main", "show_plan"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m grpo_jax.plan", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a name on the hub, a directory, or a config.json")
    parser.add_argument("--mesh", default="", help="as data=2,fsdp=4 (default one device)")
    parser.add_argument("--batch", type=int, default=8, help="per_device_train_batch_size, completions (default 8)")
    parser.add_argument("--accumulate", type=int, default=1, help="gradient_accumulation_steps (default 1)")
    parser.add_argument("--generations", type=int, default=8, help="num_generations (default 8)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens that prompts are padded to (default 256)")
    parser.add_argument("--completion", type=int, default=512, help="max_completion_length (default 512)")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0 a reference is kept (default 0)")
    parser.add_argument("--dtype", default="bfloat16", help="compute_dtype (default bfloat16)")
    parser.add_argument("--param-dtype", default="float32", help="of the params as loaded (default float32)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="adapters on a frozen base (default: all params)")
    parser.add_argument("--quantize", help="how that base is held: nf4 or int8 (default: plain)")
    parser.add_argument("--quantize-embeddings", action="store_true", help="and embedding and head (default: plain)")
    parser.add_argument("--donate", action="store_true", help="its params become the run's, as in grpo-jax train")
    parser.add_argument("--device", help="whose compiler is asked: H100, H100-8, A100, v5e-8, v6e-8, v5p-4, …")
    parser.add_argument("--memory", type=float, help="GB of a device: the largest batch that fits is looked for")
    parser.add_argument("--request", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of a run."""
    arguments = parse(argv)
    if arguments.request:
        print(answer(json.load(sys.stdin)))
        return
    if arguments.model is None:
        raise SystemExit("--model is needed: a name on the hub, a directory, or a config.json")
    config = GRPOConfig(
        per_device_train_batch_size=arguments.batch,
        gradient_accumulation_steps=arguments.accumulate,
        num_generations=arguments.generations,
        max_completion_length=arguments.completion,
        beta=arguments.beta,
        compute_dtype=arguments.dtype,
        mesh=parse_mesh(arguments.mesh),
    )
    names = ("param_dtype", "device", "lora", "quantize", "quantize_embeddings", "donate")
    how = {name: getattr(arguments, name) for name in names}
    show_plan(arguments.model, config, prompt_length=arguments.prompt, gigabytes=arguments.memory, **how)


def show_plan(model: Any, config: GRPOConfig, *, prompt_length: int, gigabytes: float | None, **how: Any) -> None:
    """Print a plan, as this command and `grpo-jax plan` do; the arguments are those of `plan`."""
    memory = None if gigabytes is None else gigabytes * 1e9
    print(plan(model, config, prompt_length=prompt_length, memory=memory, **how))


if __name__ == "__main__":
    main()
