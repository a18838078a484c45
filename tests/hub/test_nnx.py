"""A flax.nnx module as a policy, and errors for models that cannot be called or saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import lengths, tiny_tokenizer

from grpo_jax import GRPOConfig, SFTConfig, add_lora, evaluate, from_nnx, save_pretrained, sft, train
from grpo_jax.policy import Policy

nnx = pytest.importorskip("flax.nnx", reason="flax.nnx cannot be imported with this version of jax")
ROWS = [{"prompt": "ab"}, {"prompt": "c"}]


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.mix, self.seen = nnx.Linear(8, 8, rngs=rngs), nnx.BatchStat(jnp.ones(8))

    def __call__(self, x):
        return x + self.mix(x * self.seen[None, None])


class Decoder(nnx.Module):
    """A decoder with a tied head and more than ten layers, whose numbers sort differently as text."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(len(tiny_tokenizer()), 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        layers = [Layer(rngs) for _ in range(11)]
        self.layers = nnx.List(layers) if hasattr(nnx, "List") else layers

    def __call__(self, tokens):
        x = jnp.cumsum(self.embed(tokens), axis=1)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.drop(jnp.tanh(x)))


def test_nnx_module_can_be_trained_and_its_run_resumed(tmp_path):
    """A flax.nnx module can be trained with GRPO and SFT, resumed and evaluated; the policy's logits are the module's
    logits without dropout."""
    module = Decoder(nnx.Rngs(0))
    policy = from_nnx(module, tiny_tokenizer())
    module.eval()
    tokens = np.arange(12).reshape(2, 6)
    logits = jax.jit(policy.model.apply)({"params": policy.params}, tokens)
    np.testing.assert_allclose(logits, nnx.jit(lambda module: module(tokens))(module), atol=1e-5)
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "save_steps": 1}
    settings |= {"lr_scheduler_type": "constant", "learning_rate": 1e-2}
    for steps in (1, 2):
        state = train(policy, ROWS, lengths, GRPOConfig(max_steps=steps, **settings), run_dir=tmp_path)
    assert int(state.step) == 2
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), state.params, policy.params)
    assert moved["layers"]["10"]["mix"]["kernel"] > 0
    assert "seen" not in moved["layers"]["10"], "batch statistics are not trained"
    nnx.update(module, policy.model.state(state.params))
    np.testing.assert_array_equal(module.embed.embedding[...], state.params["embed"]["embedding"])
    metrics, completions = evaluate(policy, ROWS, lengths, params=state.params, max_completion_length=4)
    assert metrics["reward"] == np.mean([len(row["completion"]) for row in completions])
    taught = sft(policy, [{"text": "abc"}], SFTConfig(max_steps=20, learning_rate=3e-2, per_device_train_batch_size=1))
    loss = [
        -jax.nn.log_softmax(policy.model.apply({"params": params}, tokens)[0, :3])[[0, 1, 2], tokens[0, 1:4]].mean()
        for tokens in [np.array([policy.tokenizer("abc<eos>")["input_ids"]])]
        for params in (policy.params, taught.params)
    ]
    assert loss[1] < loss[0] / 2


def double(module):
    nnx.update(module, jax.tree.map(lambda x: 2 * x, nnx.state(module, nnx.BatchStat)))


@pytest.mark.quick
def test_other_variables_are_constants():
    """Neither later changes to the module nor changes during calls affect the policy."""

    class Doubling(nnx.Module):
        def __init__(self):
            self.table, self.scale = nnx.Param(jnp.ones((8, 8))), nnx.BatchStat(jnp.ones(8))

        def __call__(self, tokens):
            double(self)
            return (self.table[...] * self.scale[...][None])[tokens]

    policy = from_nnx(module := Doubling())
    double(module)
    assert jax.jit(policy.model.apply)({"params": policy.params}, jnp.zeros((1, 1), int)).max() == 2


class WithDropout:
    """A model that calls its module with dropout enabled."""

    def __init__(self):
        self.module = Decoder(nnx.Rngs(0))

    def apply(self, variables, tokens):
        return self.module(tokens)


class WithoutBatch:
    def apply(self, variables, tokens):
        return variables["params"][tokens[0]]


OTHER = Policy(WithoutBatch(), {})


@pytest.mark.quick
@pytest.mark.parametrize(("call", "said"), [
    (lambda: from_nnx(WithDropout()), "module must be a flax.nnx.Module; got WithDropout"),
    (lambda: train_by(Decoder(nnx.Rngs(0))), "model must have an `apply` method; got Decoder. .*grpo_jax.from_nnx"),
    (lambda: train_by(WithDropout()), r"apply raised .*\. A model is called as .*without a dropout key"),
    (lambda: train_by(WithoutBatch()), r"returned .*\(3, 4\).* for tokens of shape \[2, 3\]\. A model is called"),
    (lambda: add_lora(OTHER, jax.random.key(0)), "created by from_pretrained or .*; its model is a WithoutBatch"),
    (lambda: save_pretrained("x", OTHER), "written as a checkpoint; its model is a WithoutBatch"),
])  # fmt: skip
def test_models_that_cannot_be_called_or_saved_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def train_by(model):
    policy = Policy(model, jnp.zeros((300, 4)), tiny_tokenizer())
    return train(policy, ROWS, lengths, GRPOConfig(num_generations=2, max_steps=1))
