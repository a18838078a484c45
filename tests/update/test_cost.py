"""The cost of an iteration in XLA's counts of operations and bytes, which are deterministic, unlike times."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from tiny import random_params

from grpo_jax import Batch, GRPOConfig, Prompts
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.sharding import lower_call
from grpo_jax.models.transformer import Transformer
from grpo_jax.rollout.decode_plan import decode_call
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.update import packed
from grpo_jax.update.optimizer import make_optimizer
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import create_state

D, F, L, H, KV, WIDTH, V = 256, 512, 2, 4, 2, 64, 1024
MODEL = Transformer(TransformerConfig(V, D, F, num_layers=L, num_heads=H, num_kv_heads=KV, head_dim=WIDTH))
P = 64
PROGRAMS = {name: getattr(packed, name) for name in ("score_part", "add_gradients", "apply_update")}
config_of = lambda beta, t: GRPOConfig(beta=beta, max_completion_length=t)


def programs_of_an_iteration(monkeypatch, b=2, g=4, t=64, tokens=512, model=MODEL, optimizer=None, beta=0.1):
    """Return the programs that score and update full rows, as name → (lowered, number of runs)."""
    monkeypatch.setattr(packed, "CPU_TOKENS", tokens)
    monkeypatch.setattr(packed, "count_threads", lambda *_: 1)
    runs, lowered = collections.Counter(), {}
    for name, program in PROGRAMS.items():

        def call(*args, name=name, program=program):
            if not runs[name]:
                lowered[name] = program.lower(*args)
            runs[name] += 1
            return program(*args)

        monkeypatch.setattr(packed, name, call)
    optimizer = optax.adamw(1e-6) if optimizer is None else optimizer
    state = create_state(random_params(model), optimizer, jax.random.key(0), keep_reference=beta > 0)
    shape = (b, g, t)
    batch = Batch(
        prompts=Prompts(jnp.ones((b, P), jnp.int32), jnp.full(b, P)), tokens=jnp.ones(shape, jnp.int32),
        mask=jnp.ones(shape, bool), advantages=jnp.ones(shape[:2]), sampling_log_probs=-jnp.ones(shape),
    )  # fmt: skip
    updater = choose_updater(model, config_of(beta, t), micro_shape=(16 // g, g), optimizer=optimizer)
    if beta:
        ref = updater.log_probs(state.ref_params, batch.prompts, batch.tokens, batch.mask)
        batch = batch.replace(ref_log_probs=ref)
    updater.update(state, batch)
    return {name: (lowered[name], n) for name, n in runs.items()}


def test_an_iteration_reads_each_shared_prompt_once(monkeypatch):
    """Scoring and updating take 2 operations per weight and token forward and 4 backward, and read each prompt once."""
    b, g, t = 2, 4, 64
    layer = D * (H + 2 * KV) * WIDTH + H * WIDTH * D + 3 * D * F
    attention = lambda keys: 2 * H * WIDTH * keys  # one product each for scores and values
    # In the last layer, a prompt needs keys and values for every token but only one hidden state.
    keys = 2 * D * KV * WIDTH
    prompt = b * P * ((L - 1) * (layer + attention((P + 1) / 2)) + keys) + b * (layer - keys + attention(P))
    # Each token attends to its prompt, earlier tokens and itself; only completions go through the head.
    completion = b * g * t * (L * layer + L * attention(P + (t + 1) / 2) + D * V)
    by_hand = 2 * (prompt + completion) + 6 * (prompt + completion)
    programs = programs_of_an_iteration(monkeypatch, b, g, t)
    counted = sum(lowered.cost_analysis()["flops"] * runs for lowered, runs in programs.values())
    unshared = 8 * b * g * (P + t) * (L * layer)
    assert by_hand < unshared, "sharing the prompt must make a difference here"
    assert by_hand * 0.9 < counted <= by_hand * 1.08, counted / by_hand


def test_update_memory_does_not_grow_with_the_batch(monkeypatch):
    """An update needs memory for one sequence's activations, a few arrays of its logits, and the params' gradients."""
    n = 512
    monkeypatch.setattr(packed, "PROMPT_TOKENS", 2 * P)  # two prompts per part, whatever the batch size

    def temporaries(b, g):
        lowered, _ = programs_of_an_iteration(monkeypatch, b, g, 64, tokens=n)["add_gradients"]
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one = temporaries(2, 4)
    params = V * D + L * (D * (2 * H + 2 * KV) * WIDTH + 3 * D * F)
    keys = P + 64
    bound = 4 * (4 * n * V + 2 * params + L * n * (12 * D + 8 * F + 6 * H * keys))
    assert one < bound, (one, bound)
    many = temporaries(4, 16)
    whole_logits = 4 * 4 * 16 * 64 * V
    assert many - one < whole_logits / 8, "with 8 times the rows, only [B, G, T] arrays grow, not the logits"


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_update_makes_no_further_copy_of_the_policy(beta, monkeypatch):
    """An update holds params, two moments and gradients, plus the reference if beta > 0, and no further copy."""
    shape = TransformerConfig(8192, 64, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)
    model, optimizer = Transformer(shape), make_optimizer(config_of(beta, 8), 10)
    programs = programs_of_an_iteration(monkeypatch, b=1, g=8, t=8, model=model, optimizer=optimizer, beta=beta)
    memory = programs["apply_update"][0].compile().memory_analysis()
    policy = sum(x.nbytes for x in jax.tree.leaves(random_params(model)))
    copies = 5 if beta else 4
    given, new = memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert copies * policy <= given <= (copies + 0.05) * policy
    assert new < 0.05 * policy, "the next state reuses the buffers of the current one"
    assert memory.temp_size_in_bytes < 1.05 * policy, "temporaries hold only optax's updates"


@pytest.mark.parametrize("layout", [(1, 1, 2), pytest.param((1, 8, 2), marks=pytest.mark.quick), (4, 2, 1)])
def test_decode_writes_its_cache_in_place(layout):
    """A decode writes keys and values in place at every step, including with one prompt, one row or one head."""
    prompts, rows, heads = layout
    shape = TransformerConfig(32, 16, 16, num_layers=1, num_heads=heads, num_kv_heads=heads, head_dim=8)
    model = Transformer(shape)
    params = random_params(model)
    slots = 4096 // (prompts * rows)
    sizes = {"num_generations": rows, "max_completion_length": slots + 1}
    compiled = lower_call(decode_call(model, params, prompts, 4, **sizes, settings=DecodeSettings())).compile()
    cache = 2 * prompts * rows * heads * 8 * slots * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache, "the new cache reuses the buffers of the old one"
    assert memory.temp_size_in_bytes < cache / 4, "the cache is not copied"
