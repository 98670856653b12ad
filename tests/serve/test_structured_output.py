"""What requests ask of each text: schemas, penalties, biases, and stop strings, before which it is cut in whatever pieces.

Masks are pure functions of the text, and schemas that hurt are refused.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import StoppingCriteria

from byte_tokenizers import TOKENIZERS
from layerskip_models import DEMO_PATH, load_tokenizer
from running_server import ask, post, refusal, running_server, wait_until
from selfspec import SelfSpecGenerator
from selfspec.detokenize import skipped_tokens
from selfspec.serve import schema_check
from selfspec.serve.processors import PenaltyProcessor, Stops, StopTexts, TrimmedText, bias_processor
from selfspec.serve.schema_check import LIMITS, MAX_NESTING, SchemaCheck, as_compiled
from selfspec.serve.structured_output import GrammarError, GrammarProcessor, Vocabulary
from tiny_llama import VOCAB_SIZE, tiny_llama, tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(load_tokenizer(DEMO_PATH), 4096, [0])


def test_rolled_back_masks_equal_fresh_ones(vocabulary: Vocabulary) -> None:
    random, prompt = Random(1), [7, 8]
    matcher = vocabulary.matcher(SCHEMA)
    kept = GrammarProcessor(vocabulary, SCHEMA, matcher, len(prompt))
    texts: list[list[int]] = [[]]
    for _ in range(200):
        text = random.choice(texts[-20:])
        text = text[: random.randint(0, len(text))] if random.random() < 0.3 else text
        ids, scores = torch.tensor([prompt + text]), torch.zeros(1, 4096)
        masked = kept(ids, scores)
        fresh = GrammarProcessor(vocabulary, SCHEMA, matcher, len(prompt))(ids, scores)
        assert masked.equal(fresh)
        allowed = masked[0].isfinite().nonzero().flatten().tolist()
        following = random.choice(allowed)
        if following != 0:  # the end of the text
            texts.append([*text, following])
        else:
            json.loads(b"".join(map(vocabulary.bytes_of, text)))
    assert max(map(len, texts)) > 8


def test_copies_of_a_matcher_do_not_take_each_others_budget(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of a request share a compiled grammar. One that uses up the lexer's states does not end the others."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 400)
    schema, random = {"type": "string", "pattern": "^(a|b)*a(a|b){9}$"}, Random(1)
    matcher, scores = vocabulary.matcher(schema), torch.zeros(1, 4096)
    start, *letters = load_tokenizer(DEMO_PATH).convert_tokens_to_ids(['"', "a", "b"])

    def length(processor: GrammarProcessor) -> int:
        """How long a text of it becomes."""
        text = [start]
        with pytest.raises(GrammarError, match="too complex"):
            for _ in range(2000):
                processor(torch.tensor([text]), scores)
                text.append(random.choice(letters))
        return len(text)

    copies = [GrammarProcessor(vocabulary, schema, matcher, 0) for _ in range(3)]
    assert all(length(one) > 50 for one in copies)


def test_a_text_outside_the_grammar_is_refused_and_forgotten(vocabulary: Vocabulary) -> None:
    processor = GrammarProcessor(vocabulary, SCHEMA, vocabulary.matcher(SCHEMA), 0)
    scores = torch.zeros(1, 4096)
    start = processor(torch.empty(1, 0, dtype=torch.long), scores)
    brace = int(start[0].isfinite().nonzero()[0])
    with pytest.raises(ValueError, match="grammar"):
        processor(torch.tensor([[brace, brace, brace, brace]]), scores)
    assert processor(torch.empty(1, 0, dtype=torch.long), scores).equal(start)


def test_schemas_that_cannot_be_used() -> None:
    tokenizer = load_tokenizer(DEMO_PATH)
    with pytest.raises(ValueError, match="cannot be used"):
        Vocabulary(tokenizer, 4096, [0]).matcher({"type": "?"})
    with pytest.raises(ValueError, match="end-of-sequence"):
        Vocabulary(tokenizer, 4096, []).matcher(SCHEMA)


def test_special_tokens_without_a_name_are_special() -> None:
    """Decoding leaves them out as well, so that offsets of what comes after them must."""
    tokenizer = load_tokenizer(DEMO_PATH)
    tokenizer.add_tokens([AddedToken("<file_sep>", special=True)])
    token = tokenizer.convert_tokens_to_ids("<file_sep>")
    assert token not in tokenizer.all_special_ids
    assert Vocabulary(tokenizer, len(tokenizer), []).special[token] == "<file_sep>"


def test_penalties_count_generated_tokens_only() -> None:
    processor = PenaltyProcessor(presence=0.5, frequency=0.25, prompt_length=2)
    ids = torch.tensor([[3, 3, 1, 2, 1]])  # generated: 1, 2, 1
    scores = torch.zeros(1, 4)
    # 1 came twice: 0.5 + 2 * 0.25; 2 came once: 0.5 + 0.25; 3 stands in the prompt only.
    assert processor(ids, scores).tolist() == [[0.0, -1.0, -0.75, 0.0]]
    assert scores.tolist() == [[0.0] * 4], "a pure function"
    assert processor(ids[:, :2], scores) is scores


def test_bias_is_added_and_ids_are_checked() -> None:
    processor = bias_processor({"1": -100.0, "3": 2.5}, 4)
    assert processor(torch.tensor([[0]]), torch.ones(1, 4)).tolist() == [[1.0, -99.0, 1.0, 3.5]]
    for wrong in ("4", "-1", "x", "1.0", "²"):
        with pytest.raises(ValueError, match=r"\[0, 3\]"):
            bias_processor({wrong: 1.0}, 4)


@pytest.fixture(scope="module")
def check() -> Iterator[SchemaCheck]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema_check, "TRIAL_SECONDS", 0.3)
        made = SchemaCheck()
        yield made
        made.close()


def chain(length: int) -> dict[str, Any]:
    """So many objects that refer to each other."""
    definitions: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]}
        for i in range(length)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": {"type": "integer"}}}


def nested(levels: int) -> Any:
    """Values nested so many levels deep: a schema, its items, and so on, and its type."""
    schema: Any = {"type": "integer"}
    for _ in range(levels - 2):
        schema = {"type": "array", "items": schema}
    return schema


TOO_MUCH = "takes more than 0.3 s"
BOMBS: list[tuple[Any, str]] = [
    (chain(1000), TOO_MUCH),
    ({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000)} | {"4000": {}}}, TOO_MUCH),
    ({"$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{j}"} for j in range(80)]} for i in range(80)},
      "$ref": "#/$defs/a0"}, TOO_MUCH),
    ({"enum": [f"x{i}" for i in range(100_000)]}, "has 988900 bytes"),
    ({"type": "integer", "multipleOf": 9_999_991}, TOO_MUCH),
    ({"type": "object", "x-guidance": {"whitespace_pattern": "(a{1,1000}){1,1000}"}}, "x-guidance"),
    ({"$ref": "http://127.0.0.1:1/x.json"}, "within it"),
    ({"$ref": "file:///etc/passwd"}, "within it"),
    ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
    ({"properties": {"a": {"$id": "http://b/", "$ref": "#/x"}}}, r"\$id inside"),
    ({"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]}, TOO_MUCH),
    ({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(2000)}}, "cannot be used"),
    (nested(5000), "levels deep"),
    (nested(MAX_NESTING + 1), f"more than {MAX_NESTING} levels"),
    ({"type": "string", "pattern": "("}, r"character 1 of a pattern, '\(': unclosed group"),
    ({"type": "string", "pattern": "^(?=.*[A-Z]).{4,8}$"}, r"character 2 of a pattern, '\(\?=.*look-ahead"),
    (False, "is false"),
    ({"$ref": "#"}, "refers to itself and to nothing else"),
]  # fmt: skip


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no signals")
def test_a_trial_that_hangs_is_refused_and_another_process_tries_the_next(
    check: SchemaCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a schema pay for a process that died before it."""
    check({"const": "first"})
    (process,) = multiprocessing.active_children()
    with monkeypatch.context() as patch:
        patch.setattr(schema_check, "_WALL_SECONDS", 0.5)
        os.kill(process.pid or 0, signal.SIGSTOP)
        with pytest.raises(ValueError, match="takes more than"):
            check({"const": "second"})
    assert not process.is_alive()
    check({"const": "third"})
    (process,), pool = multiprocessing.active_children(), check._pool
    process.kill()
    wait_until(lambda: pool is not None and pool._broken)
    check({"const": "fourth"})


@pytest.mark.parametrize(("schema", "why"), BOMBS)
def test_a_bomb_is_refused_and_the_next_schema_is_not(check: SchemaCheck, schema: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        check(schema)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    check({"type": "integer", "maximum": id(schema)})


TREE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    "schema",
    [
        True, {"type": "object"}, {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, chain(60), nested(MAX_NESTING),
        {"type": "object", "properties": {"$ref": {"type": "string"}, "$id": {"type": "integer"}}},
        {"const": {"$ref": "no reference", "x-guidance": 1}}, {"enum": [f"x{i}" for i in range(3000)]},
        {"$id": "http://example.org/a", "type": "object", "properties": {"a~b/c": {}, "d": {"$ref": "#/properties/a~0b~1c"}}},
        {"type": "string", "format": "path"}, {"type": "string", "format": "binary"}, {"type": "string", "format": 7},
        {"type": "array", "items": {"type": "string", "format": "password"}, "uniqueItems": True},
        {"type": "object", "properties": {"format": {"type": "string"}, "uniqueItems": {}, "a": True}},
        {"const": {"format": "path"}},
    ],
    ids=lambda schema: str(schema)[:60],
)  # fmt: skip
def test_what_people_write_is_taken(check: SchemaCheck, vocabulary: Vocabulary, schema: Any) -> None:
    """Pydantic's Path, bytes, SecretStr and sets among it. What is no schema keeps the names of keywords."""
    check(schema)
    assert not vocabulary.matcher(schema).is_error()
    assert not vocabulary.matcher(f"start: %json {json.dumps(as_compiled(schema))}\n").is_error()
    if isinstance(schema, dict) and "properties" in schema:
        assert as_compiled(schema) == schema


def test_a_server_survives_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(schema: Any) -> dict[str, Any]:
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {"model": "demo", "prompt": "x", "max_tokens": 4, "response_format": asked}

    with running_server(SelfSpecGenerator.from_pretrained(DEMO_PATH)) as server:
        for schema in (chain(1000), {"type": "?"}, {"const": float("inf")}):
            assert refusal(server, "/v1/completions", body(schema))["param"] == "response_format"
        assert post(server, "/v1/completions", body(chain(20)))[0] == 200
        # What the trial lets through and a step refuses is the client's error as well.
        monkeypatch.setattr(SchemaCheck, "__call__", lambda check, schema: None)
        error = refusal(server, "/v1/completions", body({"enum": ["x" * 1_000_000]}))
        assert error["param"] == "response_format"


TOKENIZER = tiny_tokenizer()
STOPS = st.lists(st.text("ab c.\n", min_size=1, max_size=4), max_size=3)
BLOCKS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4), max_size=8)


@given(stops=STOPS, blocks=BLOCKS)
def test_pieces_are_the_text_before_the_first_stop(stops: list[str], blocks: list[list[int]]) -> None:
    """The tokens end, as the engine's do, with the one that completes a stop string."""
    tokens = [token for block in blocks for token in block]
    ends = (n for n in range(len(tokens)) if any(stop in TOKENIZER.decode(tokens[:n]) for stop in stops))
    tokens = tokens[: next(ends, len(tokens))]
    text = TrimmedText(TOKENIZER, Stops(stops))
    pieces, left = [], tokens
    for block in blocks:
        pieces.append(text.push(left[: len(block)]))
        left = left[len(block) :]
    pieces.append(text.finish())
    whole = TOKENIZER.decode(tokens)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    assert "".join(pieces) == whole[: min(places, default=len(whole))]
    assert text.ended == bool(places) and (text.found is None or whole.startswith(text.found, min(places)))
    at_once = TrimmedText(TOKENIZER, Stops(stops))
    assert at_once.push(tokens) + at_once.finish() == "".join(pieces)


def test_what_may_become_a_stop_is_held_back() -> None:
    text = TrimmedText(TOKENIZER, Stops(["be.", "."]))
    a, be, dot = TOKENIZER.convert_tokens_to_ids(["a", " be", "."])
    assert [text.push([token]) for token in (a, be, a, be)] == ["a", " ", "bea", " "] and not text.ended
    assert (text.push([dot, a]), text.ended, text.finish()) == ("", True, "")


def test_a_stop_may_have_special_tokens_which_an_answer_does_not_show() -> None:
    tokenizer = tiny_tokenizer()
    a, be = tokenizer.convert_tokens_to_ids(["a", " be"])
    names = ("<|im_end|>", "<|im_start|>", "<|other|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*names]})
    end, begin, other = map(int, tokenizer.convert_tokens_to_ids([*names]))
    special = skipped_tokens(tokenizer)
    tokens = [a, begin, be, other, a, end, begin, a]
    for stop, shown, length in (
        ("<|im_end|>", "a bea", 6), ("<|im_end|><|im_start|>", "a bea", 7), ("<|im_start|>a", "a bea", 8),
        ("ea", "a b", 5), ("<|im_end|>a", "a bea", 8), ("<|im_end|> ", "a beaa", None), ("<|other|>", "a be", 4),
    ):  # fmt: skip
        stops = Stops([stop], special=special)
        assert stopped(StopTexts(tokenizer, stops, 0), tokens, 0) == length
        text = TrimmedText(tokenizer, stops)
        assert "".join(text.push([token]) for token in tokens[:length]) + text.finish() == shown
        assert (text.ended, text.found) == (length is not None, stop if length else None)


def stopped(criterion: StoppingCriteria, tokens: list[int], prompt: int) -> int | None:
    """How many tokens the text has when the criterion ends it."""
    lengths = range(prompt + 1, len(tokens) + 1)
    return next((n for n in lengths if bool(criterion(torch.tensor([tokens[:n]]), torch.empty(0)))), None)


@pytest.mark.parametrize("stop", ["A", "\n", "a\n", "é"])
def test_a_stop_of_byte_tokens_ends_the_text_at_its_last_byte(stop: str) -> None:
    """And no token later, though more bytes might have made another text of them."""
    tokenizer = TOKENIZERS["byte_fallback"]
    spelled = ["a" if one == "a" else f"<0x{byte:02X}>" for one in stop for byte in one.encode()]
    names = ["a", "<0x42>", *spelled, "b", "b"]
    tokens = tokenizer.convert_tokens_to_ids(names)
    assert stopped(StopTexts(tokenizer, Stops([stop]), 1), tokens, 1) == len(tokens) - 2
    text = TrimmedText(tokenizer, Stops([stop]))
    assert text.push(tokens[:-2]) + text.finish() == "aB"


def test_a_stop_may_begin_with_the_space_behind_the_prompt() -> None:
    """Which is there only if the text is decoded after its prompt: SentencePiece tokenizers strip a text's first space."""
    tokenizer = TOKENIZERS["byte_fallback"]
    a, be, b = tokenizer.convert_tokens_to_ids(["▁a", "▁be", "b"])
    assert stopped(StopTexts(tokenizer, Stops([" be"]), 1), [a, be, b], 1) == 2
    text = TrimmedText(tokenizer, Stops(["b"]), prompt=[a])
    assert text.push([be]) + text.finish() == " "


def test_a_completion_has_the_space_behind_its_prompt() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    a, be = tokenizer.convert_tokens_to_ids(["▁a", "▁be"])
    generator = SelfSpecGenerator(tiny_llama(vocab_size=len(tokenizer), seed=3), tokenizer, "ls:1-3")
    asked = {"prompt": [a], "max_tokens": 2, "temperature": 0, "logit_bias": {str(be): 100}}
    with running_server(generator, served_name="m") as server:

        def choice(**more: Any) -> Any:
            return json.loads(ask(server, "POST", "/v1/completions", {**asked, **more})[1])["choices"][0]

        assert choice()["text"] == " be be"
        assert choice(echo=True)["text"] == "a be be"
        assert (choice(stop=[" be"])["text"], choice(stop=[" be"])["finish_reason"]) == ("", "stop")
        assert choice(logprobs=1)["logprobs"]["text_offset"] == [0, 3]


def test_a_stop_is_found_where_tokens_are_shown_again() -> None:
    """A round that breaks off has shown tokens that are then not committed, or are shown once more."""
    a, be, dot, space = TOKENIZER.convert_tokens_to_ids(["a", " be", ".", " "])
    criterion = StopTexts(TOKENIZER, Stops(["be."]), 1)
    for tokens in ([a], [a, be], [a, a], [a, a, dot], [a, a], [a, a, be], [a, a, be, dot]):
        ends = bool(criterion(torch.tensor([[space, *tokens]]), torch.empty(0)))
        assert ends == (tokens[-2:] == [be, dot])
