"""Questions of one kind, out of a file of them: `python -m bench.experiments.online_exits.domain_questions FILE TARGET`.

FILE: documents that begin "Question: ... Answer:", in the formats of docs/training.md. Those of other chats are left out.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from bench.experiments.exit_adapters.chat_prompts import write_chats
from layerskip_models.training.documents import read_documents
from layerskip_models.training.examples import read_examples

_QUESTION = re.compile(r"Question: (.*?)\nAnswer:", flags=re.DOTALL)


def domain_questions(path: Path, number: int, but: Path | None = None, seed: int = 0) -> list[str]:
    """So many questions, in a random order; the same ones whenever it is asked. but: chats whose questions are left out."""
    known: set[str] = set()
    if but is not None:
        known = {message["content"] for one in read_examples(but, ()) for message in one.messages or []}
    found = [text.strip() for document in read_documents(path, ()) for text in _QUESTION.findall(document)]
    chosen = [text for text in dict.fromkeys(found) if text not in known]
    random.Random(seed).shuffle(chosen)
    return chosen[:number]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of questions")
    parser.add_argument("target", type=Path, help="the .jsonl file to write")
    parser.add_argument("--number", type=int, default=2000, help="questions")
    parser.add_argument("--but", type=Path, help="chats, .jsonl, whose questions are left out")
    options = parser.parse_args()
    write_chats(domain_questions(options.source, options.number, options.but), options.target)
