"""Tool call formats: what each family's template renders is parsed back, and no text raises or hangs."""

import json
import random
import time

import pytest
from chat_families import FAMILIES, PLAIN, family

from grpo_jax.text.calls import Parsed, ToolCall, assistant_message
from grpo_jax.text.formats import FORMATS, MAX_CALLS, format_of

pytestmark = pytest.mark.quick

# Strings that break careless parsers.
NASTY = [
    "", " ", "a", "två", "日本語 🎲", 'quote " and \\ and \n and \t', "{", "}", '{"name": "x", "arguments": {}}', "12",
    "\n\n", "</tool_call>", "<tool_call>", "<think>", "</think>", "<function=f>", "</parameter>", "null", "True",
]  # fmt: skip
string = lambda rng: "".join(rng.choice(NASTY) for _ in range(rng.randrange(4)))
message_of = lambda *calls, content="": assistant_message(Parsed(content, tuple(calls)))
hermes = lambda name="f", arguments="{}": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def value(rng, depth=0):
    kinds = ["text", "int", "float", "bool", "none"] + ["list", "dict"] * (depth < 2)
    kind = rng.choice(kinds)
    if kind == "list":
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == "dict":
        return {string(rng): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    scalars = {"text": string, "int": lambda r: r.randrange(-9, 10**9), "float": lambda r: r.random() * 1e6}
    return scalars[kind](rng) if kind in scalars else rng.choice([True, False]) if kind == "bool" else None


def turn_of(tokenizer, message, **kwargs):
    """Render an assistant message with the chat template, without the text up to the end of the generation prompt."""
    user = [{"role": "user", "content": "go"}]
    opening = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*user, message], tokenize=False, **kwargs)
    assert whole.startswith(opening)
    return whole[len(opening) :]


@pytest.mark.parametrize("name", ["hermes", "llama3", "harmony"])
def test_rendered_calls_are_parsed_back(name):
    rng, (tokenizer, _) = random.Random(0), family(name)
    for _ in range(100):
        most = 3 if name == "hermes" else 1
        calls = [ToolCall("add", {string(rng): value(rng)}) for _ in range(rng.randrange(most) + 1)]
        contents = {"hermes": ["", "I add them.", "<think>\nor <tool_call> is\n</think>\n\nWell:"], "llama3": [""]}
        content = rng.choice(contents.get(name, ["", "I call to=functions.add now"]))
        text = turn_of(tokenizer, message_of(*calls, content=content), tagged=rng.random() < 0.5)
        parsed = FORMATS[name].parse(text.removesuffix("<|im_end|>\n"))
        assert (parsed.calls, parsed.problems) == (tuple(calls), ())
        thought = f"<think>\n{content}\n</think>" if content and name == "harmony" else content
        assert parsed.content.removeprefix("<think>\n\n</think>").strip() == thought


KINDS = {"text": "string", "line": "integer", "share": "number", "sure": "boolean", "more": "object"}
PROPERTIES = {name: {"type": kind} for name, kind in KINDS.items()}
PROPERTIES |= {"many": {"type": "array", "items": {}}, "maybe": {"type": "integer", "nullable": True}}
EDIT = {"name": "edit", "parameters": {"type": "object", "properties": PROPERTIES}}
SCHEMAS = {"edit": {"type": "function", "function": EDIT}}


def test_tagged_values_are_parsed_with_the_schema():
    rng, (tokenizer, _) = random.Random(0), family("qwen_xml")
    for _ in range(100):
        everything = {"text": string(rng), "line": rng.randrange(-5, 5), "share": rng.random()}
        everything |= {"sure": rng.random() < 0.5, "many": [value(rng) for _ in range(2)]}
        everything |= {"more": {string(rng): value(rng)}, "maybe": rng.choice([None, 3])}
        kept = {key: item for key, item in everything.items() if rng.random() < 0.7}
        calls = [ToolCall("edit", kept), ToolCall("edit", {})][: rng.randrange(1, 3)]
        text = turn_of(tokenizer, message_of(*calls)).removesuffix("<|im_end|>\n")
        assert text.startswith("\n</think>")  # the generation prompt has opened the thought
        parsed = FORMATS["qwen_xml"].parse(text, schemas=SCHEMAS, thinking=True)
        assert (parsed.calls, parsed.problems) == (tuple(calls), ())


F = (ToolCall("f", {}),)


@pytest.mark.parametrize(("name", "text", "parsed"), [
    ("hermes", " It is 2. ", Parsed(" It is 2. ")),
    ("hermes", "So: " + hermes() + "\nthen " + hermes("g"), Parsed("So: \nthen", (*F, ToolCall("g", {})))),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', Parsed("", F)),
    ("hermes", f"<think>\n{hermes()}\n</think>\nNo.", Parsed(f"<think>\n{hermes()}\n</think>\nNo.")),
    ("qwen_xml",  # without a schema, values are parsed as JSON if possible
        "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\ntwelve\n\n</parameter>\n"
        "<parameter=c>\nTrue\n</parameter>\n</function>\n</tool_call>",
        Parsed("", (ToolCall("f", {"a": 12, "b": "twelve\n", "c": "True"}),))),
    ("llama3", '{"name": "Ada", "age": 36}<|eot_id|>', Parsed('{"name": "Ada", "age": 36}')),
    ("llama3", ' {"name": "f", "arguments": {"a": 1}}<|eom_id|>', Parsed("", (ToolCall("f", {"a": 1}),))),
    ("llama3", '<think>x</think>{"name": "f", "parameters": {}}', Parsed("<think>x</think>", F)),
    ("harmony", "just text", Parsed("just text")),
    ("harmony",
        "<|channel|>analysis<|message|>to=functions.f<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2<|return|>",
        Parsed("<think>\nto=functions.f\n</think>\n\n2")),
    ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", Parsed("", F)),
])  # fmt: skip
def test_turns_are_parsed(name, text, parsed):
    assert FORMATS[name].parse(text) == parsed


@pytest.mark.parametrize(("name", "text", "reason"), [
    ("hermes", "<tool_call>\n{'name': 'f'}\n</tool_call>", "not valid JSON"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}', "not closed by </tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "lacks the 'name'"),
    ("hermes", hermes(arguments='{"a": NaN}'), "NaN is not a finite number"),
    ("hermes", hermes(arguments='{"a": 1e999}'), "1e999 is not a finite number"),
    ("hermes", hermes(arguments="[" * 101 + "]" * 101), "deeper than 100"),
    ("qwen_xml", hermes(), "no <function="),
    ("qwen_xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "<parameter=a> is not closed"),
    ("qwen_xml", "<tool_call><function=f>text</function></tool_call>", "not followed by </function>"),
    ("qwen_xml", f"<tool_call><function=f>{2 * '<parameter=a>1</parameter>'}</function></tool_call>", "twice"),
    ("hermes", "<function=f>\n{}\n</function>", "not enclosed in <tool_call> and </tool_call>"),
    ("llama3", '{"type": "function", "function": "f", "parameters": {"a": 1}}<|eot_id|>', "lacks the 'name' of a tool"),
    ("llama3", '<function=f>{"a": 1}</function><|eom_id|>', "it is enclosed in <function=...>"),
    ("llama3", "<|python_tag|>print(1)<|eot_id|>", "not valid JSON"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "not closed by <|call|>"),
    ("harmony", "<|channel|>commentary to=python<|message|>print(1)<|call|>", "unknown recipient 'python'"),
])  # fmt: skip
def test_unreadable_call_is_a_problem_and_stays_in_the_text(name, text, reason):
    parsed = FORMATS[name].parse(text)
    assert parsed.calls == ()
    (problem,) = parsed.problems
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(problem)
    assert "Write calls as" in problem
    assert len(problem) < 500
    assert parsed.content
    assert "<|call|>" not in parsed.content
    assert "<|eot_id|>" not in parsed.content


PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<think>",
    "</think>", '{"name": "f", ', '"arguments": {', '"parameters": {', "}", "}}", '"', "\\", "[", "]", "1e999", "\n",
    "<|python_tag|>", "<|start|>", "<|channel|>", "commentary", " to=functions.f", "<|message|>", "<|call|>", "<|end|>",
    "<|constrain|>json", "NaN", "\x00", "\ud800", '"\\ud800"', "é", " ", "text", "\\u0000", ":", ",", "-", "<|", "|>",
]  # fmt: skip


def damaged(text, rng):
    """Insert, delete and duplicate a few pieces of a text."""
    for _ in range(rng.randrange(5)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        edits = [text[:a] + rng.choice(PIECES) + text[a:], text[:a] + text[min(b, a + 9) :], text[:b] + text[a:]]
        text = rng.choice(edits)
    return text


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_raises_and_all_parsed_calls_are_serializable(name):
    rng, (tokenizer, _) = random.Random(0), family(name)
    turn = turn_of(tokenizer, message_of(ToolCall("edit", {"text": "\\ud83d é", "line": 3, "many": [1, {"a": None}]})))
    read, problems = 0, 0
    for _ in range(3200):
        noise = "".join(rng.choice(PIECES) for _ in range(rng.randrange(12)))
        text = rng.choice([noise, damaged(turn, rng), damaged(turn + noise + turn, rng)])
        schemas = rng.choice([None, SCHEMAS, {"edit": {}}, {"f": {"parameters": None}}])
        parsed = FORMATS[name].parse(text, schemas=schemas, thinking=rng.random() < 0.1)
        read, problems = read + len(parsed.calls), problems + len(parsed.problems)
        assert isinstance(parsed.content, str)
        assert all(isinstance(call.name, str) and call.name for call in parsed.calls)
        calls = assistant_message(parsed).get("tool_calls", [])
        written = json.dumps(calls, allow_nan=False, ensure_ascii=False)
        # A lone surrogate can come only from the input, and decoding never produces one.
        assert "\ud800" in text or written.encode("utf-8")
    assert read > 200  # the fuzzing must reach both calls and problems
    assert problems > 200


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_turn_does_not_call_before_its_end(name):
    tokenizer, _ = family(name)
    text = turn_of(tokenizer, message_of(ToolCall("edit", {"text": "</tool_call> é", "line": 3})))
    body = text.removesuffix("<|eot_id|>").removesuffix("<|call|>")  # decoding yields these whole or not at all
    cuts = [*(body[:n] for n in range(len(body) + 1)), text]
    called = [len(FORMATS[name].parse(cut, thinking=name == "qwen_xml").calls) for cut in cuts]
    first = called.index(1)
    assert called == [0] * first + [1] * (len(cuts) - first)
    assert body[len(cuts[first]) :] in ("", "<|im_end|>\n")


# Repeated many times, each of these could make a parser scan the rest of the text from every position.
LONG = [
    "<tool_call>", "<tool_call>[", '<tool_call>["', "<think>", "</think>", '<tool_call>{"name":', "<tool_call>\n\n\n\n",
    "<tool_call><function=f>", "<tool_call><function=f><parameter=a>", "<parameter=a>", "</parameter>",
    "</parameter>  ", '{"name": "f", "parameters": {', "<|python_tag|>", "<|start|>", "<|channel|>", "<|message|>",
    "to=", "<|", "[", " ", "<|start|>to=functions.a<|message|>",
    "<|start|>assistant<|channel|>commentary to=functions.a<|message|>{}<|call|>",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_reading_takes_linear_time(name):
    for part in LONG:
        for start in ("", "<tool_call><function=f><parameter=a>"):
            begin = time.process_time()
            parsed = FORMATS[name].parse(start + part * (300_000 // len(part)))
            assert time.process_time() - begin < 1.0, part
            assert len(parsed.calls) + len(parsed.problems) <= MAX_CALLS + 1


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_recognized_by_its_template(name):
    found = format_of(FAMILIES[name][0])
    assert found is FORMATS[name]
    assert found.keeps_special_tokens == (name in ("llama3", "harmony"))
    escaped = FAMILIES[name][0].replace('"', '\\"').replace("<|python_tag|>", "")
    assert format_of(escaped) is found, "also if the JSON is in a string of the template"


def test_other_templates_have_no_format():
    other = "{% for t in tools %}{{ t }}{% endfor %}<tool_call>{name}<arg_key>{key}</arg_key></tool_call>"
    for template in (None, PLAIN, other, "{{ tools }}<|start|>assistant<|channel|>final<|message|>"):
        assert format_of(template) is None, template
