"""Objects that several tests share: a byte-level BPE tokenizer and a decoder with a few thousand parameters."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_jax import Policy, completion_log_probs, init_policy, save_pretrained
from grpo_jax.hub.tensors import abstract_params
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.transformer import Transformer

EOS = "<eos>"
PAD = "<pad>"


# Jitted, because without it each operation would be compiled separately for each shape.
scored = jax.jit(completion_log_probs, static_argnames=("model", "temperature", "top_k", "top_p", "min_p"))


def lengths(completions):
    """Reward the number of characters."""
    return [float(len(text)) for text in completions]


def logged(run, *given, callbacks=(), **how):
    """Return the result of `train` or `sft`, and the lines of metrics that it logged."""
    lines = []
    return run(*given, callbacks=[lambda step, line: lines.append(line), *callbacks], **how), lines


@functools.cache
def tiny_tokenizer():
    """Return a byte-level tokenizer without merges, which AutoTokenizer can reload with a qwen3 config."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def chat_checkpoint(directory):
    """Save the policy with a chat template, and return the checkpoint's directory as a string."""
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "tokenizer")
    files = {path.name: path.read_bytes() for path in (directory / "tokenizer").iterdir()}
    save_pretrained(directory / "model", tiny_policy().replace(files=files))
    return str(directory / "model")


@functools.cache
def tiny_policy(seed: int = 0, layers: int = 1) -> Policy:
    tokenizer = tiny_tokenizer()
    return init_policy(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        jax.random.key(seed),
        tokenizer=tokenizer,
    )


@functools.cache
def tiny_model(vocab: int = 24, layers: int = 2, seed: int = 0, **settings):
    """Return a model and its params, without a tokenizer."""
    sizes = {"num_layers": layers, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    config = TransformerConfig(vocab, 16, 32, **sizes | settings)
    return Transformer(config), random_params(Transformer(config), seed)


def random_params(model: Transformer, seed: int = 0):
    """Return random params with the shapes that `model.init` would give; only the shapes are traced."""
    rng, config = np.random.default_rng(seed), model.config

    def fill(path, leaf):
        if path[-1].key in ("scale", "bias"):
            return jnp.full(leaf.shape, float(path[-1].key == "scale" and not config.norm_offset))
        return jnp.asarray(rng.normal(0, config.initializer_range, leaf.shape).astype(np.float32))

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))
