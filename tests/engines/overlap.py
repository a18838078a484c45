"""Where the time of an iteration goes when a server samples: waited for, and beside the rewards and updates.

    python tests/engines/overlap.py [PASSES]

The server is the stand-in, whose requests take 4 seconds, as those of a busy one would; the reward function takes one
second, and PASSES updates of a tiny model (400 by default) take a few.
Time: two minutes. Expect: with `rollout_ahead` an iteration takes as long as the longer side, and not the sum of both.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from stand_in import StandIn
from tiny import tiny_policy

from grpo_jax import GRPOConfig, train
from grpo_jax.engines import vllm

POLICY = tiny_policy().replace(generation_config={"eos_token_id": [1, *range(2, 66)], "pad_token_id": 0})
ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl"]]
T = 8
NAMES = ("sampler/seconds/sample", "seconds/rollout", "seconds/rewards", "seconds/update", "seconds/total")


def rewards(completion_ids):
    time.sleep(1.0)
    return [float(sum(ids) % 7) for ids in completion_ids]


def slow(path, body, n):
    if path == "/v1/completions" and body["max_tokens"] == T:
        time.sleep(4.0)


def measure(passes, ahead):
    """Seconds by name, the median of the iterations 3 to 6 of 7."""
    config = GRPOConfig(
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=T,
        gradient_checkpointing=False,
        num_iterations=passes,
        logging_steps=passes,
        logging_first_step=False,
        max_steps=7 * passes,
        learning_rate=1e-4,
        rollout_ahead=ahead,
    )
    lines = []
    with StandIn(POLICY) as server:
        server.fault = slow
        keep = lambda step, metrics: lines.append(metrics)
        train(POLICY, ROWS, rewards, config, sampler=vllm(server.url), callbacks=[keep])
    return {name: statistics.median(line[name] for line in lines[2:6]) for name in NAMES}


if __name__ == "__main__":
    print(f"| rollout_ahead | {' | '.join(NAMES)} |")
    for ahead in (False, True):
        found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 400, ahead)
        print(f"| {ahead} | {' | '.join(f'{seconds:.1f}' for seconds in found.values())} |", flush=True)
