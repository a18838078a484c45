"""The benchmark: the workload's prompts, and how near a tiny run comes to the device's bounds."""

import json

import numpy as np
import pytest

from experiments import benchmark
from experiments.bounds import peaks_of


@pytest.mark.quick
def test_prompts_are_those_of_the_peers():
    rows = benchmark.make_rows(benchmark.WORKLOAD, "S", "varprompt", 3)
    rng = np.random.default_rng(2)
    length = int(rng.integers(32, 129))
    assert rows[2]["prompt"] == " ".join(f"w{word}" for word in rng.integers(3, 8192, length))
    assert benchmark.make_rows(benchmark.WORKLOAD, "S", "varprompt", 2) == rows[:2]
    assert len(benchmark.make_rows(benchmark.WORKLOAD, "S", "fixed", 1)[0]["prompt"].split()) == 128


@pytest.mark.quick
def test_peaks_are_found_by_the_kind_of_device():
    assert peaks_of("TPU v5 lite") != peaks_of("TPU v5")
    assert peaks_of("TPU v6 lite")[1] == 1.64e12
    assert peaks_of("NVIDIA H100 80GB HBM3") == peaks_of("H100")
    assert peaks_of("cpu") is None


def test_a_workload_of_random_weights_says_how_near_it_comes_to_the_devices_bounds(tmp_path, monkeypatch):
    """The GPU's workload in small: what it adds is there, and follows from the counts by hand."""
    shape = {**benchmark.GPU_WORKLOAD["presets"]["0.5B"], "vocab_size": 20, "hidden_size": 16, "head_dim": 8}
    shape |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    small = {**benchmark.GPU_WORKLOAD, "num_prompts": 2, "group_size": 4, "micro_batch": 4, "presets": {"tiny": shape}}
    small["variants"] = {"short": {"prompt_len": [5, 5], "max_new_tokens": 6}}
    (tmp_path / "workload.json").write_text(json.dumps(small))
    monkeypatch.setattr(benchmark, "peaks_of", lambda kind: (1e9, 1e8))
    options = ["--preset", "tiny", "--variant", "short", "--steps", "2", "--drop", "1"]
    result = benchmark.main([*options, "--workload", str(tmp_path / "workload.json")])
    length, median = result["mean_len"], result["median"]
    weights = 16 * (16 + 2 * 8 + 16 + 3 * 32)
    prompt = 5 * (weights + 2 * 16 * 3)
    completions = 4 * length * (weights + 16 * 20 + 2 * 16 * (5 + (length + 1) / 2))
    operations = 6 * 2 * (prompt + completions)
    assert result["update_flops_share"] == pytest.approx(operations / median["update"] / 1e9, rel=0.02, abs=1e-4)
    keys = 2 * (5 + 4 * (length + 1) / 2) * 2 * 8 * 2
    read = length * (2 * (weights + 16 * 20) + keys)
    assert result["decode_bandwidth_share"] == pytest.approx(read / median["rollout"] / 1e8, rel=0.02, abs=1e-4)
