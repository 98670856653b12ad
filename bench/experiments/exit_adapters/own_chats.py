"""Conversations with a chat model's own answers, as text to train on: `python -m bench.experiments.exit_adapters.own_chats`.

Each document is a conversation as the model's chat template writes it, special tokens included. Run the same command again,
and it goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from layerskip_models.text_files import write_text
from layerskip_models.training.examples import read_examples
from selfspec import SelfSpecGenerator
from selfspec.exits.own_answers import own_answers
from selfspec.messages import OWN_TEMPLATE, conversation_ids

_SEPARATOR = "\n<|endoftext|>\n"


def own_chats(
    generator: SelfSpecGenerator,
    conversations: Iterable[list[dict[str, str]]],
    answers: Path,
    *,
    most_tokens: int,
    answer_tokens: int,
    batch_size: int,
) -> Iterator[str]:
    """Documents until the answers have `most_tokens` tokens together. answers: a file that keeps them as they come.

    answer_tokens: of one answer, at most. One that is longer breaks off there.
    """
    tokenizer = generator.tokenizer
    assert tokenizer is not None
    prompts = (conversation_ids(messages, tokenizer, OWN_TEMPLATE, ask=True) for messages in conversations)
    written = 0
    for text in own_answers(generator, prompts, answers, most_tokens=answer_tokens, batch_size=batch_size):
        yield tokenizer.decode(text.tokens)
        written += text.num_scored
        if written >= most_tokens:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, GGUF file, short or hub name")
    parser.add_argument("chats", type=Path, help='questions, .jsonl with "messages"')
    parser.add_argument("target", type=Path, help="the .txt file to write; TARGET.answers.jsonl keeps the answers")
    parser.add_argument("--max-tokens", type=int, default=400_000, help="tokens of all answers")
    parser.add_argument("--answer-tokens", type=int, default=192, help="maximum tokens of an answer")
    parser.add_argument("--batch-size", type=int, default=8, help="answers that are written at a time")
    options = parser.parse_args()
    conversations = [example.messages for example in read_examples(options.chats, ()) if example.messages]
    found = own_chats(
        SelfSpecGenerator.from_pretrained(options.model),
        conversations,
        options.target.with_name(options.target.name + ".answers.jsonl"),
        most_tokens=options.max_tokens,
        answer_tokens=options.answer_tokens,
        batch_size=options.batch_size,
    )
    write_text(options.target, _SEPARATOR.join(found) + "\n")


if __name__ == "__main__":
    main()
