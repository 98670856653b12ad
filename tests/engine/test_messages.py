"""Messages become a prompt by a chat template: the same one whichever way they are given, and one error without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerskip_models import DEMO_PATH, from_transformers, load_tokenizer
from selfspec import SelfSpecGenerator
from selfspec.messages import PLAIN_TEMPLATE, ChatTemplate, encode_messages, read_template
from tiny_llama import WORDS, tiny_llama, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role[0] }} {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
TALK = [
    {"role": "user", "content": "a bed"},
    {"role": "assistant", "content": "fig"},
    {"role": "user", "content": "cab"},
]


@pytest.fixture
def generator() -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(seed=3, max_position_embeddings=512), layout="plain")
    made = SelfSpecGenerator(model, tiny_tokenizer(), policy="ls:2-4", prefix_cache="1MB")
    assert made.tokenizer is not None
    made.tokenizer.chat_template = TEMPLATE.replace("message.role[0]", "'d' if message.role == 'user' else 'a'")
    return made


def ids(generator: SelfSpecGenerator, text: str) -> list[int]:
    assert generator.tokenizer is not None
    return generator.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_way_to_give_them(generator: SelfSpecGenerator) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12}
    expected = generator.generate(ids(generator, "d a bed\na fig\nd cab\na "), **options)
    assert generator.generate(messages=TALK, **options).sequences.equal(expected.sequences)
    assert generator.generate(TALK, **options).sequences.equal(expected.sequences)
    assert "".join(map(str, generator.stream(messages=TALK, **options))) == expected.text
    both = generator.generate_batch([TALK, TALK[:1]], **options)
    assert both[0].sequences.equal(expected.sequences)
    assert both[1].sequences[0, :-12].tolist() == ids(generator, "d a bed\na ")
    with generator.engine() as engine:
        engine.add(messages=TALK, **options)
        results = [progress.result for _ in range(12) for progress in engine.step() if progress.result]
    assert results[0].sequences.equal(expected.sequences)


def test_what_is_wrong_with_them(generator: SelfSpecGenerator) -> None:
    silent = SelfSpecGenerator(generator.model, tiny_tokenizer())
    missing = r"has no chat template: give a text prompt, or set tokenizer\.chat_template"
    calls: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (silent.generate, {"messages": TALK}, ValueError, missing),
        (silent.stream, {"messages": TALK}, ValueError, missing),
        (
            silent.generate_batch,
            {"prompts": ["a", TALK]},
            ValueError,
            "text 1: this model's tokenizer has no chat template",
        ),
        (SelfSpecGenerator(generator.model).generate, {"messages": TALK}, ValueError, "messages need a tokenizer"),
        (generator.generate, {"messages": [{"role": "tool", "content": "a"}]}, ValueError, "refuses .*: no tools here"),
        (generator.generate, {"prompt": "a", "messages": TALK}, TypeError, "a prompt or messages, not both"),
        (generator.generate_batch, {"prompts": ["a"], "messages": [TALK]}, TypeError, "conversations as its prompts"),
    ]
    for wrong in ([], [{"content": "a"}], [{"role": 1, "content": "a"}], "a", ["a"]):
        calls.append((generator.generate, {"messages": wrong}, ValueError, "messages must be a list of"))
    for call, arguments, error, message in calls:
        with pytest.raises(error, match=message):
            call(**arguments)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 2.0 ** 99999 }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x' * 2 ** 62 }}", "MemoryError"),
        ("{{ messages[5].content.strip() }}", "messages"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_one_error(source: str, kind: str) -> None:
    tokenizer = tiny_tokenizer()
    for role in ("user", "developer"):
        with pytest.raises(ValueError, match=kind) as raised:
            encode_messages([{"role": role, "content": "a"}], tokenizer, ChatTemplate(source))
        assert str(raised.value).startswith(("the chat template fails on", "the chat template refuses"))


def test_a_role_that_the_template_does_not_know_is_read_as_the_systems_or_refused() -> None:
    """A template skips a role for which it has no branch, and the model would never see the message."""
    tokenizer = tiny_tokenizer()
    talk = [{"role": "developer", "content": "bad cafe"}, {"role": "user", "content": "cab"}]
    as_system = [{**talk[0], "role": "system"}, talk[1]]

    def read(template: str, messages: list[dict[str, str]]) -> list[int]:
        return encode_messages(messages, tokenizer, ChatTemplate(template))

    branch = "{% for m in messages %}{% if m.role in KNOWN %}{{ m.role[0] + m.content }}{% endif %}{% endfor %}"
    unknowing = branch.replace("KNOWN", "['user', 'system', 'assistant']")
    assert read(unknowing, talk) == read(unknowing, as_system) != read(unknowing, talk[1:])
    knowing = branch.replace("KNOWN", "['user', 'developer']")
    assert read(knowing, talk) != read(knowing, talk[1:])
    for template, messages in (
        (branch.replace("KNOWN", "['user']"), talk),
        (unknowing, [{"role": "critic", "content": "bed"}, talk[1]]),
    ):
        with pytest.raises(ValueError, match=r"leaves out messages\[0\], whose role is '(developer|critic)'"):
            read(template, messages)
    # Of the roles that all templates know, a template leaves out what it likes.
    assert read(branch.replace("KNOWN", "['user']"), as_system) == read(branch.replace("KNOWN", "['user']"), talk[1:])


def test_templates_by_name_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8-sig")  # of which the byte order mark is no part
    assert read_template(None) == ChatTemplate()
    assert read_template("plain") is PLAIN_TEMPLATE
    found = encode_messages([{"role": "user", "content": "head"}], tiny_tokenizer(), read_template(str(file)))
    assert found == [WORDS.index(letter) for letter in "head"]
    with pytest.raises(FileNotFoundError):
        read_template(str(tmp_path / "none"))
    tokenizer = load_tokenizer(str(DEMO_PATH), local_files_only=True)
    talk = [{"role": "system", "content": "Be brief."}, *TALK[:2], {"role": "user", "content": " And now? "}]
    text = tokenizer.decode(encode_messages(talk, tokenizer, PLAIN_TEMPLATE))
    assert text == "Be brief.\n\nQuestion: a bed\nAnswer: fig\n\nQuestion: And now?\nAnswer:"


def test_half_a_character_is_named(generator: SelfSpecGenerator) -> None:
    """JSON can write one, and no tokenizer takes it."""
    with pytest.raises(ValueError, match=r"the prompt has half a character at 2, \\ud800: leave it out"):
        generator.generate("a \ud800", max_new_tokens=1)
    with pytest.raises(ValueError, match=r"a message has half a character at 0, \\udc00"):
        generator.generate([{"role": "user", "content": "\udc00"}], max_new_tokens=1)
