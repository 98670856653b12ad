"""Messages to a chat model from prompts of other sets, of four kinds: free answers, copying, code, questions on a document.

The sets are Spec-Bench's (mt_bench, qa, summarization, rag) and HumanEval, as JSON lines with "id" and "prompt".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest

from bench.datasets import Prompt

FREE, COPYING, CODE, DOCUMENT = "free answers", "summaries and edits", "code", "questions on a document"
SETS = ("mt_bench", "qa", "summarization", "humaneval", "rag")
_PASSAGE_WORDS = 110
"""Most words of a text to edit, in whole sentences."""
_NEW_NAME = "Morgan"


def chat_messages(sets: Mapping[str, Sequence[Prompt]]) -> list[Prompt]:
    """Messages of every kind, the kinds one after another; within a kind its sources take turns. sets: by name, as `SETS`."""
    articles, functions = sets["summarization"], sets["humaneval"]
    middle = len(articles) // 2  # other articles are edited than are summarised
    free = _turns(_made(sets["mt_bench"], FREE, "", _as_it_is), _made(sets["qa"], FREE, "", _question))
    copying = _turns(
        _made(articles[:middle], COPYING, "summary", _summary),
        _made(articles[middle:], COPYING, "name", _other_name),
        _made(articles[middle:], COPYING, "repeat", _repeat),
        _made(functions[1::2], COPYING, "function", _renamed),
    )
    code = _made(functions[::2], CODE, "", _completion)
    return [*free, *copying, *code, *_made(sets["rag"], DOCUMENT, "", _on_document)]


def _made(prompts: Sequence[Prompt], kind: str, what: str, make: Callable[[str], str | None]) -> list[Prompt]:
    """A message from each prompt that one can be made from."""
    made = ((prompt, make(prompt.prompt)) for prompt in prompts)
    ending = f"/{what}" if what else ""
    return [
        Prompt(id=f"{prompt.id}{ending}", task=kind, prompt=text, source=prompt.source)
        for prompt, text in made
        if text is not None
    ]


def _turns(*lists: Sequence[Prompt]) -> list[Prompt]:
    return [prompt for prompt in chain.from_iterable(zip_longest(*lists)) if prompt is not None]


def _as_it_is(text: str) -> str:
    return text


def _question(text: str) -> str:
    return text.removeprefix("Question: ").removesuffix("\nAnswer:")


def _article(text: str) -> str:
    return text.removeprefix("Article: ").removesuffix("\nSummary:")


def _summary(text: str) -> str:
    return f"Summarize this article in three sentences.\n\n{_article(text)}"


def _passage(text: str) -> str:
    """The first sentences of an article, at least one."""
    sentences = re.split(r"(?<=[.!?]) ", _article(text))
    passage = sentences[0]
    for sentence in sentences[1:]:
        if len(f"{passage} {sentence}".split()) > _PASSAGE_WORDS:
            break
        passage = f"{passage} {sentence}"
    return passage


def _repeat(text: str) -> str:
    return f"Repeat this text word for word.\n\n{_passage(text)}"


def _other_name(text: str) -> str | None:
    """Replace the name that a passage has most often; None without one."""
    passage = _passage(text)
    names = re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", passage)
    if not names:
        return None
    name = max(names, key=names.count)
    return f'Rewrite this text, changing only "{name}" to "{_NEW_NAME}". Keep every other word as it is.\n\n{passage}'


def _renamed(text: str) -> str:
    return (
        'Rewrite this function, changing only its name to "solve". Keep every other line as it is, with the examples.\n\n'
        f"```python\n{text.strip()}\n```"
    )


def _completion(text: str) -> str:
    return f"Complete this Python function.\n\n```python\n{text.strip()}\n```"


def _on_document(text: str) -> str | None:
    document, found, question = text.removesuffix("\nAnswer:").rpartition("\n\nQuestion: ")
    return f"{document}\n\nAnswer this question with the text above: {question}" if found else None
