"""Forms of tool calls: found out from a chat template, and read from a text, wherever it is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripted_model import scripted_tokenizer
from selfspec.messages import OWN_TEMPLATE, PLAIN_TEMPLATE, ChatTemplate
from selfspec.serve.tools.call_readers import BareReader, CallReader, TagReader, Written
from selfspec.serve.tools.tool_formats import NoToolsError, ToolFormat, format_of
from tool_templates import BARE, HIDDEN, OTHER, REVERSED, TAGS, tagged


class TestFormats:
    def test_the_template_says_how_calls_are_written(self) -> None:
        tokenizer = scripted_tokenizer(TAGS, ())

        def found(template: str) -> ToolFormat:
            tokenizer.chat_template = template
            return format_of(tokenizer, OWN_TEMPLATE)

        tags = ToolFormat(kind="tags", before="<tool_call>\n", after="\n</tool_call>", between="")
        assert found(TAGS) == tags
        assert found(REVERSED) == ToolFormat(
            kind="tags", keys=("arguments", "name"), before="<tool_call>\n", after="\n</tool_call>", between=""
        )
        assert found(BARE) == ToolFormat(kind="bare", keys=("name", "parameters"))
        assert found(HIDDEN) == ToolFormat(
            kind="tags", before="<tool_call>\n", after="\n</tool_call>", between="\n", shows_calls=False
        )
        with pytest.raises(NoToolsError, match="in a form that is not read"):
            found(OTHER)
        for template in (PLAIN_TEMPLATE, ChatTemplate("{{ raise_exception('no') }}")):
            with pytest.raises(NoToolsError, match="knows no tools"):
                format_of(tokenizer, template)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
        with pytest.raises(NoToolsError, match="special tokens"):
            found(TAGS)


NAMES = ["weather", "add", "now"]
PARTS = st.lists(
    st.sampled_from([
        "a", " ", "\n", "<", "<tool_", "call>", "</tool_call>", "<tool_call>", "{", '"', '{"name": "now", "arguments": {}}',
        tagged("now"), tagged("weather", city="x</tool_call>"), tagged("sing"), "; ",
        '{"name": "add", "parameters": {"a": 1}}',
        "<tool_call>[1]</tool_call>", "<tool_call></tool_call>", '<tool_call>{"name": "now", "arguments": NaN}</tool_call>',
    ]),
    max_size=8,
).map("".join)  # fmt: skip


@given(text=PARTS, cuts=st.lists(st.integers(0, 200), max_size=12), kind=st.sampled_from([TagReader, BareReader]))
def test_calls_do_not_depend_on_where_the_text_is_cut(text: str, cuts: list[int], kind: type[CallReader]) -> None:
    def read(pieces: list[str]) -> Written:
        reader, written = kind(NAMES), Written()
        for piece in pieces:
            written.add(reader.push(piece, ()))
        written.add(reader.finish())
        assert [call.index for call in written.calls] == [*range(reader.num_calls)]
        return written

    whole = read([text])
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    apart = read([text[start:end] for start, end in pairwise(places)])
    assert apart.content == whole.content
    assert [(c.name, c.arguments) for c in apart.calls] == [(c.name, c.arguments) for c in whole.calls]
    if not whole.calls:
        assert whole.content == text
    for call in whole.calls:
        assert call.name in NAMES and isinstance(json.loads(call.arguments), dict)
