"""How other engines are told to draft with an exported checkpoint: the lines to run, as a page beside it.

Sources: the engines' own documentation: vLLM (features/speculative_decoding/draft_model), SGLang
(advanced_features/speculative_decoding, "standalone"), TensorRT-LLM (features/speculative-decoding, "draft/target") and
`llama-server --help`. Of these lines only that of `llama-server` was run here, on the draft of a GGUF file.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

GGUF_NAME = "draft.gguf"
_PAGE = """\
# Drafting with this checkpoint in other engines

On the texts that were tried, {num_drafts} drafts a round bring most: {tokens:.2f} tokens a round, {speedup:.2f} times
plain decoding by what is read.
{verdict}Try numbers nearby on your own machine. FULL is the checkpoint that this draft was made from{full}.

## vLLM

    vllm serve FULL --speculative-config '{vllm}'

## SGLang

    python -m sglang.launch_server --model-path FULL \\
        --speculative-algorithm STANDALONE --speculative-draft-model-path {folder} \\
        --speculative-num-steps {num_drafts} --speculative-eagle-topk 1 --speculative-num-draft-tokens {and_bonus}

{others}"""
_OTHERS = """\
## TensorRT-LLM

In `speculative.yaml`:

    disable_overlap_scheduler: true
    speculative_config:
      decoding_type: Draft_Target
      max_draft_len: {num_drafts}
      speculative_model: {yaml_folder}

Then:

    trtllm-serve FULL --extra_llm_api_options speculative.yaml

## llama.cpp

{llama_cpp}
"""
_NO_OTHERS = """\
llama.cpp has 4-bit formats of its own: convert FULL with its script, make the draft with
`llama-quantize full.gguf draft.gguf Q4_0`, and give it with `-md draft.gguf`.
"""
_LLAMA = "    llama-server -m {full} -md {draft} --spec-type draft-simple --spec-draft-n-max {num_drafts}"
_CONVERT = """\
    python convert_hf_to_gguf.py FULL --outfile full.gguf
    python convert_hf_to_gguf.py {folder} --outfile {draft}
"""


def engines_page(
    folder: Path,
    source: Path | None,
    *,
    num_drafts: int,
    tokens_per_round: float,
    speedup: float,
    in_four_bits: bool = False,
) -> str:
    """The page. folder: of the draft.

    source: the GGUF file whose first layers are `draft.gguf` there; None for another checkpoint, which llama.cpp's own
        script converts.
    in_four_bits: whether it is the whole model in 4 bits, as compressed-tensors: a format of vLLM and SGLang.
    """
    path = str(folder.resolve())
    draft = shlex.quote(str(folder.resolve() / GGUF_NAME))
    settings = {"method": "draft_model", "model": path, "num_speculative_tokens": num_drafts}
    llama = _LLAMA.format(
        full="full.gguf" if source is None else shlex.quote(str(source.resolve())), draft=draft, num_drafts=num_drafts
    )
    others = _OTHERS.format(
        num_drafts=num_drafts,
        yaml_folder=json.dumps(path),
        llama_cpp=llama if source is not None else _CONVERT.format(folder=shlex.quote(path), draft=draft) + llama,
    )
    return _PAGE.format(
        num_drafts=num_drafts,
        and_bonus=num_drafts + 1,
        tokens=tokens_per_round,
        speedup=speedup,
        verdict="" if speedup > 1 else "That is no gain: this draft makes decoding slower.\n",
        full="" if source is None else f" (for llama.cpp {source.name} itself)",
        folder=shlex.quote(path),
        vllm=json.dumps(settings).replace("'", "'\\''"),
        others=_NO_OTHERS if in_four_bits else others,
    )
