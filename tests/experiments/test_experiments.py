"""The experiments: their data, and the scripts themselves from the command line to the last line, much reduced."""

import collections
import functools
import json
import random
from pathlib import Path

import chex
import jax
import numpy as np
import optax
import pytest

from experiments import sort_digits, stories
from experiments.common import fresh_directory, held_out_rates, supervise
from grpo_jax import evaluate, from_pretrained, generate, init_policy, make_prompts, save_pretrained

SHARED = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
HELD_OUT = 100


@pytest.fixture(scope="module")
def sorted_run(tmp_path_factory):
    """The directory of a short run of sort_digits with its controls, and all that it printed."""
    run_dir = tmp_path_factory.mktemp("sort_digits") / "run"
    arguments = f"--seed 3 --controls --steps 2 --warm-up-steps 40 --held-out {HELD_OUT} --run-dir {run_dir}".split()
    arguments += ["--picture", str(run_dir.parent / "docs.png")]
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *texts, **_: printed.append(" ".join(map(str, texts))))
        patch.setattr(sort_digits, "make_policy", functools.partial(sort_digits.make_policy, width=32, layers=1))
        patch.setattr(sort_digits, "BATCH", 64)
        results = sort_digits.main(arguments)
    return run_dir, printed, results


def greedy_completions(policy, prompts, length):
    """Greedy tokens of each prompt, up to and including EOS."""
    ids = policy.tokenizer(prompts)["input_ids"]
    settings = {"num_generations": 1, "max_completion_length": length, "temperature": 0.0}
    out = generate(
        policy.model,
        policy.params,
        make_prompts(ids),
        jax.random.key(0),
        eos_token_ids=policy.eos_token_ids,
        **settings,
    )
    tokens, mask = np.asarray(out.tokens), np.asarray(out.mask)
    return [row[keep].tolist() for row, keep in zip(tokens[:, 0], mask[:, 0], strict=True)]


def pytorch_greedy_completions(directory, prompts, length):
    """The same by transformers and PyTorch, for prompts of one length."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer(prompts)["input_ids"])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
    rows = out[:, ids.shape[1] :].tolist()
    eos = tokenizer.eos_token_id
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


@pytest.mark.quick
def test_digits_to_train_on_and_to_test_with_are_distinct_and_not_sorted():
    train, held_out = sort_digits.make_rows(0)
    prompts = [row["prompt"] for row in [*train, *held_out]]
    assert (len(train), len(held_out)) == (4000, 1000)
    assert len(set(prompts)) == len(prompts)
    for row in [*train, *held_out]:
        assert row["prompt"] == f"sort {row['digits']}:"
        assert row["answer"] == "".join(sorted(row["digits"])) != row["digits"]
    assert sort_digits.make_rows(0) == (train, held_out)
    assert sort_digits.make_rows(1)[1] != held_out


@pytest.mark.quick
def test_teacher_is_right_one_time_in_eight_and_mostly_reverses():
    draw, count = random.Random(0), 20_000
    rows, _ = sort_digits.make_rows(0)
    rows = [draw.choice(rows) for _ in range(count)]
    replies = [sort_digits.teach(row["digits"], draw) for row in rows]
    answers = [row["answer"] for row in rows]
    right = sort_digits.accuracy(completions=replies, answer=answers)
    well_formed = sort_digits.well_formed(completions=replies)
    # Four standard errors of a share of 20,000 are 0.014 at most.
    assert np.mean(right) == pytest.approx(0.128, abs=0.0095)
    assert np.mean(well_formed) == pytest.approx(0.8, abs=0.012)
    assert all(ok for ok, right in zip(well_formed, right, strict=True) if right)

    seen = collections.Counter()
    for row, reply in zip(rows, replies, strict=True):
        digits = reply.replace("<answer>", "").replace("</answer>", "")
        assert "".join(sorted(digits)) == row["answer"]
        seen["sorted"] += digits == row["answer"]
        seen["reversed"] += digits == row["answer"][::-1]
    assert seen["sorted"] / count == pytest.approx(0.16, abs=0.011)
    # Copies and swaps may be reversed by chance: 1 in 120 of the first where all digits differ, and few more.
    assert seen["reversed"] / count == pytest.approx(0.54, abs=0.02)


@pytest.mark.quick
@pytest.mark.parametrize("behaviour", sort_digits.BEHAVIOURS)
def test_only_the_sorted_reply_is_right(behaviour, monkeypatch):
    monkeypatch.setattr(sort_digits, "BEHAVIOURS", {behaviour: 1.0})
    monkeypatch.setattr(sort_digits, "BROKEN", 0.0)
    draw, (rows, _) = random.Random(0), sort_digits.make_rows(1)
    replies = [sort_digits.teach(row["digits"], draw) for row in rows]
    right = sort_digits.accuracy(completions=replies, answer=[row["answer"] for row in rows])
    assert set(right) == {float(behaviour == "sorted")}
    assert set(sort_digits.well_formed(completions=replies)) == {1.0}


@pytest.mark.quick
def test_lessons_are_masked_to_the_reply_and_its_end():
    policy = sort_digits.make_policy(0, width=16, layers=1)
    rows, _ = sort_digits.make_rows(0, train_rows=20, held_out=1)
    answers = {row["prompt"]: row["answer"] for row in rows}
    lessons = sort_digits.lessons(policy, rows, 50, seed=0)
    assert len(lessons) == 50
    for lesson in lessons:
        ids, labels = lesson["input_ids"], lesson["labels"]
        start = next(i for i, label in enumerate(labels) if label != -100)
        assert labels[start:] == ids[start:]
        assert ids[-1] == policy.eos_token_ids[0]
        reply = policy.tokenizer.decode(ids[start:-1])
        assert sorted(filter(str.isdigit, reply)) == list(answers[policy.tokenizer.decode(ids[:start])])


def test_supervise_takes_the_steps_of_adam_on_the_cross_entropy_of_what_is_learnt():
    steps, batch = 16, 4
    policy = sort_digits.make_policy(0, width=16, layers=1)
    rows, _ = sort_digits.make_rows(0, train_rows=20, held_out=1)
    lessons = sort_digits.lessons(policy, rows, steps * batch, seed=0)
    longest = max(len(lesson["input_ids"]) for lesson in lessons)
    padded = lambda name, fill: np.array([each[name] + [fill] * (longest - len(each[name])) for each in lessons])
    tokens, labels = padded("input_ids", policy.pad_token_id), padded("labels", -100)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 8, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.95))

    @jax.jit
    def step(params, opt_state, tokens, labels):
        def loss_fn(params):
            logits = policy.model.apply({"params": params}, tokens)[:, :-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean(where=labels[:, 1:] != -100)

        updates, opt_state = optimizer.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = policy.params, optimizer.init(policy.params)
    for some in np.split(np.arange(steps * batch), steps):
        params, opt_state = step(params, opt_state, tokens[some], labels[some])
    learnt = supervise(policy, lessons, batch=batch, learning_rate=1e-2, adam_beta2=0.95)
    chex.assert_trees_all_close(learnt.params, params, atol=2e-4)
    moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), learnt.params, policy.params)
    assert min(jax.tree.leaves(moved)) > 1e-2


def test_sort_digits_ends_in_one_json_object_and_leaves_its_files(sorted_run):
    run_dir, printed, results = sorted_run
    assert json.loads(printed[-1]) == results == json.loads((run_dir / "results.json").read_text())
    assert results.keys() == {"arms", "seconds", "run_dir"}
    assert results["run_dir"] == str(run_dir)
    assert results["arms"].keys() == {"grpo", "more_supervised", "random_reward"}
    for arm in results["arms"].values():
        assert arm.keys() == {"before", "after"}
        assert arm["before"] == results["arms"]["grpo"]["before"]
        for rates in arm.values():
            assert rates.keys() == {"greedy", "sampled", "format"}
            assert all(0 <= rate <= 1 for rate in rates.values())
    assert results["seconds"].keys() == {"warm_up", "evaluation", "grpo", "more_supervised", "random_reward", "total"}
    for name in (
        "metrics.jsonl",
        "completions.jsonl",
        "run.json",
        "report.png",
        "hero.png",
        "hero-dark.png",
        "hero-narrow.png",
        "hero-narrow-dark.png",
        "base/model.safetensors",
    ):
        assert (run_dir / name).stat().st_size > 0, name
    for kind in ("", "-dark", "-narrow", "-narrow-dark"):
        assert (run_dir.parent / f"docs{kind}.png").read_bytes() == (run_dir / f"hero{kind}.png").read_bytes()
    assert (run_dir / "random_reward" / "metrics.jsonl").stat().st_size > 0
    assert "no new skill" in "\n".join(printed)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in metrics} == {0, 1, 2}
    logged = set().union(*metrics)
    assert {"rewards/accuracy/mean", "rewards/format/mean", "eval/accuracy", "eval/format"} <= logged
    assert len((run_dir / "completions.jsonl").read_text().splitlines()) == 2 * 256


def test_rates_of_the_exported_model_are_those_that_were_printed(sorted_run):
    run_dir, _, results = sorted_run
    _, held_out = sort_digits.make_rows(3, held_out=HELD_OUT)
    for directory, when in (("base", "before"), ("final", "after")):
        rates, _ = held_out_rates(
            from_pretrained(run_dir / directory),
            held_out,
            sort_digits.accuracy,
            sort_digits.well_formed,
            max_completion_length=sort_digits.LONGEST,
            batch_size=HELD_OUT,
            seed=3,
        )
        assert rates == results["arms"]["grpo"][when]


def test_exported_model_completes_100_held_out_prompts_as_pytorch_does(sorted_run):
    run_dir, _, _ = sorted_run
    _, held_out = sort_digits.make_rows(3, held_out=HELD_OUT)
    prompts = [row["prompt"] for row in held_out]
    theirs = pytorch_greedy_completions(run_dir / "final", prompts, sort_digits.LONGEST)
    ours = greedy_completions(from_pretrained(run_dir / "final"), prompts, sort_digits.LONGEST)
    assert len(ours) == 100
    assert len({tuple(row) for row in ours}) > 1  # else a broken model would do
    assert ours == theirs


@pytest.mark.quick
def test_stories_has_the_task_of_the_run_it_is_compared_with():
    train, held_out = stories.make_rows()
    assert (len(train), len(held_out)) == (256, 64)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in [*train, *held_out]:
        assert row["prompt"].startswith(f"{row['word']}. Once upon a time, there was a ")
    completions = ["He had a hat.", "Hat! he said", "He had hats.", "He had a cat", ""]
    assert stories.uses_word(completions=completions, word=["hat"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_stories_ends_in_one_json_object_and_leaves_its_files(tmp_path, capsys, monkeypatch):
    tokenizer = sort_digits.make_tokenizer()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": len(tokenizer), "hidden_size": 16}
    config |= {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"max_position_embeddings": 128, "eos_token_id": tokenizer.eos_token_id}
    save_pretrained(tmp_path / "model", init_policy(config, jax.random.key(0), tokenizer=tokenizer))
    monkeypatch.setattr(stories, "LONGEST", 8)
    arguments = ["--model", str(tmp_path / "model"), "--steps", "2", "--prompts", "2", "--seed", "1"]
    results = stories.main([*arguments, "--run-dir", str(tmp_path / "run")])
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == results == json.loads((tmp_path / "run" / "results.json").read_text())
    assert results.keys() == {"arms", "seconds", "run_dir"}
    assert results["seconds"].keys() == {"loading", "evaluation", "grpo", "total"}
    assert results["arms"].keys() == {"grpo"}
    for when in ("before", "after"):
        assert results["arms"]["grpo"][when].keys() == {"greedy", "sampled"}
    assert sum(line.startswith("  ") and " → " in line for line in printed) == 8
    for name in ("metrics.jsonl", "completions.jsonl", "run.json", "report.png", "final/model.safetensors"):
        assert (tmp_path / "run" / name).stat().st_size > 0, name


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/stories260K is not there")
def test_stories_without_a_model_fetches_and_converts_it(tmp_path, monkeypatch):
    asked = []

    def download(repo, name):
        asked.append((repo, name))
        return str(SHARED / "raw" / Path(name).name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    policy = from_pretrained(stories.fetch_stories260K(tmp_path / "base"))
    assert asked == [("karpathy/tinyllamas", f"stories260K/{name}") for name in ("stories260K.bin", "tok512.bin")]
    for (path, ours), (_, theirs) in zip(
        jax.tree_util.tree_leaves_with_path(policy.params),
        jax.tree_util.tree_leaves_with_path(from_pretrained(SHARED).params),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs, err_msg=str(path))


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/stories260K is not there")
def test_stories260K_tells_200_tokens_as_pytorch_does():
    theirs = pytorch_greedy_completions(SHARED, ["Once upon a time"], 200)
    policy = from_pretrained(SHARED)
    ours = greedy_completions(policy, ["Once upon a time"], 200)
    assert len(ours[0]) == 200
    assert ours == theirs
    text = policy.tokenizer.decode(ours[0], skip_special_tokens=True)
    assert text.startswith(", there was a little girl named Lily. She loved to play outside in the park.")


def test_greedy_completions_do_not_depend_on_the_seed_of_the_samples(sorted_run):
    run_dir, _, _ = sorted_run
    policy = from_pretrained(run_dir / "base")
    _, held_out = sort_digits.make_rows(3, held_out=HELD_OUT)
    settings = {"max_completion_length": sort_digits.LONGEST, "batch_size": HELD_OUT}
    runs = [
        held_out_rates(policy, held_out, sort_digits.accuracy, sort_digits.well_formed, seed=seed, **settings)
        for seed in (3, 4)
    ]
    assert runs[0][1] == runs[1][1]
    metrics, _ = evaluate(policy, held_out, [sort_digits.accuracy], **settings)
    assert runs[0][0]["greedy"] == pytest.approx(metrics["accuracy"])


@pytest.mark.quick
def test_a_run_directory_that_holds_something_is_refused(tmp_path):
    assert fresh_directory(tmp_path, "name") == tmp_path
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(SystemExit, match="is not empty: give every run a directory of its own"):
        fresh_directory(tmp_path, "name")


@pytest.mark.quick
def test_a_run_directory_is_named_after_the_run_and_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fresh_directory(None, "stories-0").resolve().parent == tmp_path / "runs"
