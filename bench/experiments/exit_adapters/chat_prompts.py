"""Questions to an instruct model, out of plain texts: `python -m bench.experiments.exit_adapters.chat_prompts CORPUS TARGET`.

CORPUS has the files named below, in the formats of docs/training.md; the model's own answers to the questions are what
`selfspec train-exit --own-answers` trains on. `--benchmark` makes held-out questions, out of Spec-Bench's and GSM8K's.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from layerskip_models.training.documents import open_text, read_documents

_ABOUT = (
    "What is {}?", "Tell me about {}.", "Explain {} to a child.", "Write a short story about {}.", "Why is {} important?",
    "Write a poem about {}.", "List five facts about {}.", "Give me three questions about {} and answer them.",
    "Write an e-mail to a friend about {}.", "What should a beginner know about {}?",
)  # fmt: skip
_WITH = (
    "Summarise this text in two sentences:\n\n{}", "Rewrite this in plain modern English:\n\n{}",
    "Go on with this story:\n\n{}", "What is the following text about, and who speaks?\n\n{}",
    "List the names and places in this text:\n\n{}", "Ask three questions about this text, then answer them:\n\n{}",
)  # fmt: skip
_TOPICS = (
    "photosynthesis", "the French Revolution", "recursion in programming", "a healthy breakfast", "how planes fly",
    "the water cycle", "learning to swim", "black holes", "negotiating a salary", "the history of chess", "a lost dog",
    "an old lighthouse", "baking bread", "climate change", "a robot that paints", "the human heart", "sorting algorithms",
    "training for a marathon", "the stock market", "growing tomatoes", "a haunted library", "vaccines", "jazz music",
    "public speaking", "the Roman Empire", "electric cars", "meditation", "a train journey at night", "whales",
    "probability", "the internet", "good sleep", "volcanoes", "a birthday party", "saving money", "the Moon", "honey bees",
    "renewable energy", "writing a CV", "the number pi", "Shakespeare", "a dragon that is afraid of fire", "coffee",
    "databases", "friendship", "the immune system", "moving to a new city", "gravity", "origami", "time zones",
)  # fmt: skip


def _of_texts(path: Path, draw: random.Random) -> Iterator[str]:
    """Something to do with paragraphs of books, articles and speeches."""
    for document in read_documents(path, ()):
        for paragraph in document.split("\n\n"):
            if 300 <= len(paragraph) <= 900 and "<unk>" not in paragraph:
                yield draw.choice(_WITH).format(paragraph)


def _of_titles(path: Path, draw: random.Random) -> Iterator[str]:
    for document in read_documents(path, ()):
        for title in re.findall(r"^= ([^=]+) =$", document, flags=re.MULTILINE):
            if "<unk>" not in title:
                yield draw.choice(_ABOUT).format(title)


def _of_topics(draw: random.Random) -> Iterator[str]:
    for form in _ABOUT:
        for topic in draw.sample(_TOPICS, 20):
            yield form.format(topic)


def _first_lines(path: Path, before: str, after: str) -> Iterator[str]:
    """What stands between two marks in each document: a question without its answer."""
    for document in read_documents(path, ()):
        for found in re.findall(f"{re.escape(before)}(.*?){re.escape(after)}", document, flags=re.DOTALL):
            yield found.strip()


def _prompts(corpus: Path, draw: random.Random) -> list[list[str]]:
    """Questions by source, most telling first."""
    translations = _first_lines(corpus / "tatoeba_de_en.txt.gz", "Translate German to English: ", "\nEnglish:")
    tests = re.compile("Your code should pass these tests:.*", flags=re.DOTALL)
    return [
        [*_of_topics(draw)],
        [*_of_titles(corpus / "wikitext2_valid_test.txt.gz", draw)],
        [*_of_texts(corpus / "wikitext2_valid_test.txt.gz", draw)],
        [*_of_texts(corpus / "gutenberg_books.txt.gz", draw)],
        [*_of_texts(corpus / "us_addresses.txt.gz", draw)],
        [*_first_lines(corpus / "gsm8k_train.txt.gz", "Question: ", "\nAnswer:")],
        [
            tests.sub("", found).strip()
            for found in _first_lines(corpus / "mbpp_train.txt.gz", "your task: ", "[BEGIN]")
        ],
        [f"Translate into English: {found}" for found in translations][:400],
    ]


def training_prompts(corpus: Path, number: int, seed: int = 0) -> list[str]:
    """Questions of all sources in turn, in a random order within each. The same ones whenever it is asked."""
    draw = random.Random(seed)
    sources = _prompts(corpus, draw)
    for source in sources:
        draw.shuffle(source)
    return [source[turn] for turn in range(number) for source in sources if turn < len(source)][:number]


def held_out_prompts(benchmark: Path) -> list[str]:
    """MT-Bench's first turns, then questions of Natural Questions and GSM8K in turn, as one would ask them."""

    def prompts(name: str) -> list[str]:
        with open_text(benchmark / f"{name}.jsonl.gz") as lines:
            return [json.loads(line)["prompt"] for line in lines]

    def asked(prompt: str) -> str:
        return prompt.rsplit("Question: ", 1)[-1].removesuffix("Answer:").strip()

    mixed = zip(prompts("mt_bench"), prompts("qa"), prompts("gsm8k"))
    return [text for chat, question, problem in mixed for text in (chat, asked(question), asked(problem))]


def write_chats(prompts: Sequence[str], path: Path) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of the corpus, or of the benchmark's prompts")
    parser.add_argument("target", type=Path, help="the .jsonl file to write")
    parser.add_argument("--number", type=int, default=2000, help="questions to train on")
    parser.add_argument("--benchmark", action="store_true", help="held-out questions")
    options = parser.parse_args()
    found = held_out_prompts(options.source) if options.benchmark else training_prompts(options.source, options.number)
    write_chats(found, options.target)
