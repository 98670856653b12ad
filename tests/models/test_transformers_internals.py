"""Methods of transformers that it does not promise to keep and that preparing a call stands on, as they were in 5.23.

Which version broke one of them is in the message. What they do is covered by the tests of requests and of equivalence.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

import selfspec.engine.request

CALLED_WITH: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "_prepare_generation_config": ((None,), ()),
    "_prepare_special_tokens": ((None,), ("kwargs_has_attention_mask", "device")),
    "_get_logits_processor": (
        (),
        ("generation_config", "input_ids_seq_length", "encoder_input_ids", "logits_processor", "device"),
    ),
    "_get_stopping_criteria": ((), ("generation_config", "stopping_criteria", "tokenizer")),
}
"""How each is called: positional arguments, names of the others."""


@pytest.mark.parametrize("name", CALLED_WITH)
def test_a_private_method_is_there_and_takes_what_it_is_given(name: str) -> None:
    method = getattr(selfspec.engine.request.host_class(), name, None)
    assert method is not None, f"transformers {transformers.__version__} has no GenerationMixin.{name}"
    positional, names = CALLED_WITH[name]
    try:
        inspect.signature(method).bind(object(), *positional, **dict.fromkeys(names))
    except TypeError as error:
        pytest.fail(f"transformers {transformers.__version__} calls GenerationMixin.{name} otherwise: {error}")


def test_these_are_all() -> None:
    source = Path(selfspec.engine.request.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"\bhost\.(_\w+)\(", source)) == set(CALLED_WITH)
