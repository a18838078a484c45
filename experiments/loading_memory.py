"""Measure the peak host memory of `from_pretrained` on a random checkpoint of 1 GB.

    python -m experiments.loading_memory [--quantize nf4]

Time: about one minute on two cores. It runs on Linux and temporarily needs 1 GB of disk space. Expect: for each storage
dtype, loading raises the process's peak memory by at most 1.2 × the checkpoint's size (1.03 × when written). With
--quantize the checkpoint is in bfloat16, and the bound is 1.1 × (its largest file + the quantized model). The last
line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from grpo_jax.hub.families import read_config
from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.hub.tensors import abstract_params, tensor_plan

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 50000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def write_checkpoint(directory: Path, dtype: str, size: float) -> int:
    """Write about `size` bytes of random weights, one file per layer, and return their exact number of bytes."""
    itemsize = np.dtype(getattr(jnp, dtype)).itemsize
    layers = max(1, round((size / itemsize - 2 * 50000 * 1024) / 15.2e6))
    raw = {**SHAPE, "num_hidden_layers": layers, "dtype": dtype}
    files: dict[str, list] = {}
    for tensor in tensor_plan(raw, read_config(raw)):
        part = tensor.name.split(".")[2] if ".layers." in tensor.name else tensor.name.split(".")[-2]
        files.setdefault(f"model-{part}.safetensors", []).append(tensor)
    rng = np.random.default_rng(0)
    total = 0
    for name, tensors in files.items():
        arrays = {t.name: rng.standard_normal(t.shape, np.float32).astype(getattr(jnp, dtype)) for t in tensors}
        total += sum(array.nbytes for array in arrays.values())
        save_file(arrays, directory / name, metadata={"format": "pt"})
    index = {"weight_map": {tensor.name: name for name, tensors in files.items() for tensor in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(raw))
    return total


def memory(field: str) -> int:
    """Read this process's memory in bytes: VmRSS now, VmHWM at its peak (ru_maxrss includes the parent's peak)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def load(directory: str, dtype: str, quantize: str | None) -> dict[str, float]:
    """Load the checkpoint and return the rise in this process's peak memory. Call it in a new process."""
    jnp.zeros(3).block_until_ready()
    before = memory("VmRSS")
    start = time.perf_counter()
    policy = from_pretrained(directory, dtype=dtype, quantize=quantize)
    seconds = time.perf_counter() - start
    peak = memory("VmHWM") - before
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(policy.params))
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(policy.model.config)))
    return {"peak": peak, "seconds": round(seconds, 1), "parameters": count, "held": held}


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak host memory of from_pretrained on a random checkpoint.")
    parser.add_argument("--size", type=float, default=1e9, help="checkpoint size in bytes (default: 1e9)")
    parser.add_argument("--quantize", choices=("nf4", "int8"), help="quantize the projections (default: not quantized)")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load[0], args.load[1], args.quantize)))
        return
    results = {}
    for dtype in ("bfloat16",) if args.quantize else ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as directory:
            size = write_checkpoint(Path(directory), dtype, args.size)
            command = [sys.executable, "-m", "experiments.loading_memory", "--load", directory, dtype]
            command += ["--quantize", args.quantize] if args.quantize else []
            largest = max(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        whole = largest + result["held"] if args.quantize else size
        results[dtype] = {
            "checkpoint": size,
            "largest_file": largest,
            **result,
            "ratio": round(result["peak"] / whole, 3),
        }
        print(f"{dtype}: {size / 1e9:.2f} GB on disk, peak {results[dtype]['ratio']} ×, {result['seconds']} s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
