"""A process of its own that checks whether llguidance can use a JSON schema. It imports nothing of selfspec.

The compiler is foreign code whose time, memory and stack depend on what a client sent. Here it may end the process without
harm. Each line of input is a schema as JSON; each answer is a line: {"refused": why} or {"seconds": of processor time}.
argv: the folder of llguidance, seconds of processor time for each schema, bytes of memory.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

STACK_BYTES = 2 << 20
"""Stack of the compiling thread, less than that of the server's thread, so that what fits here fits there."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 30_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Limits on a grammar, in llguidance's units. A core does about 20 of them in a microsecond."""
COMPACT: Any = {"whitespace_flexible": False}
"""No white space between JSON tokens: a weak model might write spaces forever."""
_STEPS = 48


class _Bytes:
    """A tokenizer whose tokens are all bytes and an end token."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return [*(text.encode() if isinstance(text, str) else text)]


def refusal(schema: str, tokenizer: Any, llguidance: Any) -> str | None:
    """Why llguidance cannot use the schema; None if it can. Compiles it and writes the beginning of a text."""
    matcher_type = llguidance.LLMatcher
    try:
        grammar = matcher_type.grammar_from_json_schema(schema, defaults=COMPACT)
        matcher = matcher_type(tokenizer, grammar, limits=llguidance.LLParserLimits(**LIMITS), log_level=0)
    except ValueError as error:
        return one_line(str(error))
    for step in range(_STEPS):
        if matcher.is_error():
            return one_line(matcher.get_error())
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(257) if mask[token // 8] >> (token % 8) & 1]
        if matcher.is_error() or not allowed:
            continue
        token = allowed[step * 7 % len(allowed)]
        if token == 256:
            break
        matcher.consume_token(token)
    return one_line(matcher.get_error()) if matcher.is_error() else None


def one_line(text: str) -> str:
    """Put the compiler's error in a line. A pattern's has several: the pattern, a mark below it, and the reason."""
    lines = text.splitlines() or ["no reason was given"]
    if lines[0] == "NoExtensionBias":  # what the library says of this
        return "it refers to itself and to nothing else"
    if not lines[0].endswith("regex parse error:") or len(lines) < 4:
        return lines[0][:200]
    place = max(0, len(lines[2]) - len(lines[2].lstrip()) - 4)
    part, reason = lines[1][4:][place : place + 20], lines[-1].removeprefix("error: ")
    return f"at character {place + 1} of a pattern, {part!r}: {reason}"[:200]


def main() -> None:
    sys.path.append(sys.argv[1])
    seconds, max_bytes = float(sys.argv[2]), int(sys.argv[3])
    import os
    import resource
    import signal

    import llguidance
    from llguidance import TokenizerWrapper

    os.nice(5)
    tokenizer = llguidance.LLTokenizer(TokenizerWrapper(_Bytes()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    threading.stack_size(STACK_BYTES)
    for line in sys.stdin:
        answer: dict[str, object] = {}

        def work(schema: str = line, answer: dict[str, object] = answer) -> None:
            started = time.thread_time()
            try:
                why = refusal(json.loads(schema), tokenizer, llguidance)
            except BaseException as error:  # a panic in the library, or no memory
                why = one_line(f"{type(error).__name__}: {error}")
            answer |= {"seconds": time.thread_time() - started} if why is None else {"refused": why}

        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
