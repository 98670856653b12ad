"""How well an output answers its prompt: exact match of a final number or letter, ROUGE for text. No generated code is run.

A score is the model's, not the engine's: greedy outputs of all engines are the same, sampled ones follow one distribution.
The metric is the prompt's own ("metric" in a file of prompts), or read off its reference (`metric_of`).
ROUGE is a page of code here: rouge-score would bring nltk and absl, and lm-eval its own tasks and prompts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from bench.datasets import EncodedPrompt, Prompt

EXACT_MATCH, ROUGE = "exact match", ("ROUGE-1", "ROUGE-2", "ROUGE-L")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARKED_NUMBER = re.compile(rf"####\s*\$?\s*({_NUMBER.pattern})")
_CHOICE = re.compile(r"answer is:?\s*\(?([A-E])\b")
_CODE = re.compile(r"^\s*(?:def \w+\s*\(|class \w+|return\b|import \w|from \w+ import )", re.MULTILINE)
_LONGEST_CUE = 60  # characters


class Scorer:
    """Scores the tokens that an engine generated for a prompt. tokenizer: of the model. ends: tokens that end a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends

    def __call__(self, prompt: EncodedPrompt, tokens: Sequence[int]) -> dict[str, float] | None:
        """Metric -> score in [0, 1]; None for a prompt without a reference, or with one that cannot be scored."""
        if prompt.origin is None:
            return None
        # Engines are measured with EOS off, and go on after it.
        kept = [*takewhile(lambda token: token not in self._ends, tokens)]
        return score(prompt.origin, self._tokenizer.decode(kept, skip_special_tokens=True))


def score(prompt: Prompt, text: str) -> dict[str, float] | None:
    """Metric -> score in [0, 1] of a continuation; None where nothing can be scored."""
    metric = metric_of(prompt)
    if metric is None or prompt.reference is None:
        return None
    answer = until_next_example(prompt.prompt, text)
    if metric == "number":
        return {EXACT_MATCH: float(final_number(answer) == final_number(prompt.reference))}
    if metric == "choice":
        return {EXACT_MATCH: float(final_choice(answer) == final_choice(prompt.reference))}
    references = prompt.reference.split(" | ")
    return {name: max(rouge(answer, reference)[name] for reference in references) for name in ROUGE}


def metric_of(prompt: Prompt) -> str | None:
    """Return the prompt's own metric, or one by the form of its reference; None for no reference and for code.

    "#### 42" at the end or nothing but a number: number. "The answer is B." at the end: choice. Anything else: rouge.
    """
    if prompt.metric is not None:
        return None if prompt.metric == "none" else prompt.metric
    reference = (prompt.reference or "").strip()
    if not reference or _CODE.search(reference):
        return None
    if _MARKED_NUMBER.search(reference) or _NUMBER.fullmatch(reference):
        return "number"
    if _CHOICE.search(reference[-40:]):
        return "choice"
    return "rouge"


def until_next_example(prompt: str, text: str) -> str:
    """Cut the text where a base model adds an example of its own, which begins as the prompt does ("Question:")."""
    first_line = prompt.lstrip().partition("\n")[0]
    cue, colon, _ = first_line.partition(":")
    if not colon or len(cue) > _LONGEST_CUE:
        return text
    return text.partition(f"\n{cue}:")[0]


def final_number(text: str) -> float | None:
    """Find the number after "####" as GSM8K marks it, else the last one in the text, or None."""
    marked = _MARKED_NUMBER.search(text)
    found = [marked[1]] if marked else _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def final_choice(text: str) -> str | None:
    """Find the letter in the last "The answer is X", else one that the text begins with ("B", "(B) 12"), else None."""
    found = _CHOICE.findall(text)
    if found:
        return str(found[-1])
    first = re.match(r"\s*\(?([A-E])(?:[).:]|\s*$)", text)
    return None if first is None else first[1]


def rouge(text: str, reference: str) -> Mapping[str, float]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L (over the whole text as one sentence), without stemming.

    Words are runs of a-z and 0-9 in the lower-cased text, as the usual implementations have it.
    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries".
    """
    ours, theirs = (re.findall(r"[a-z0-9]+", each.lower()) for each in (text, reference))
    scores = [_f1(*_ngram_overlap(ours, theirs, size)) for size in (1, 2)]
    return dict(zip(ROUGE, [*scores, _f1(_longest_common(ours, theirs), len(ours), len(theirs))]))


def _ngram_overlap(ours: Sequence[str], theirs: Sequence[str], size: int) -> tuple[int, int, int]:
    left, right = (Counter(zip(*(words[start:] for start in range(size)))) for words in (ours, theirs))
    return sum((left & right).values()), sum(left.values()), sum(right.values())


def _longest_common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(theirs) + 1)
    for word in ours:
        diagonal = 0
        for place, other in enumerate(theirs, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def _f1(matches: int, ours: int, theirs: int) -> float:
    return 2 * matches / (ours + theirs) if matches else 0.0
