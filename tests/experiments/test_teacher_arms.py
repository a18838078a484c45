"""Learning from a teacher: its tables by hand, and a reduced run of all arms."""

import json

import jax
import pytest

from experiments import sort_digits, stories, teacher
from grpo_jax import init_policy, save_pretrained


@pytest.mark.quick
def test_the_table_has_the_tokens_at_the_first_evaluation_that_reaches_a_share():
    line = {"seed": 1, "grpo": [[0, 0.1], [1000, 0.95], [2000, 0.99]], "sft": [[0, 0.1], [1500, 0.8]]}
    line["distilled"] = [[0, 0.1], [400, 0.9], [800, 0.97]]
    assert teacher.table([line, {**line, "seed": 0}]).splitlines()[2:] == [
        f"| {seed} | {row}"
        for seed in (0, 1)
        for row in (
            "grpo | 0.10 | 0.99 | 2,000 | 1,000 | 2,000 |",
            "distilled | 0.10 | 0.97 | 800 | 400 | – |",
            "sft | 0.10 | 0.80 | 1,500 | – | – |",
        )
    ]


def test_a_reduced_run_of_all_arms_goes_on_where_it_stopped(tmp_path, monkeypatch):
    tokenizer = sort_digits.make_tokenizer()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": len(tokenizer), "hidden_size": 16}
    config |= {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"max_position_embeddings": 128, "eos_token_id": tokenizer.eos_token_id}
    save_pretrained(tmp_path / "model", init_policy(config, jax.random.key(0), tokenizer=tokenizer))
    few = stories.make_rows()[0][:4], stories.make_rows()[1][:2]
    monkeypatch.setattr(teacher, "make_rows", lambda: few)
    for module in (stories, teacher):
        monkeypatch.setattr(module, "LONGEST", 8)
    flags = ["--model", str(tmp_path / "model"), "--seeds", "3", "--teacher-steps", "2", "--steps", "2"]
    flags += ["--every", "1", "--prompts", "2", "--run-dir", str(tmp_path / "run")]
    results = teacher.main(flags)
    assert [line["seed"] for line in results] == [3]
    for arm in ("grpo", "distilled", "sft"):
        curve = results[0][arm]
        assert [tokens for tokens, _ in curve] == sorted({tokens for tokens, _ in curve})
        assert len(curve) == 3
        assert curve[0][0] == 0 < curve[-1][0]
        assert arm == "sft" or curve[-1][0] <= 2 * 16 * 8  # steps, completions, tokens
        assert all(0 <= share <= 1 for _, share in curve)
    assert teacher.main(flags) == json.loads(json.dumps(results))
    assert len((tmp_path / "run" / "results.jsonl").read_text().splitlines()) == 1, "nothing is run again"
