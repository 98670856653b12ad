"""A model whose logits spell given answers: its layers add nothing, and its head maps each token to the one that follows.

The answer is decided by the last token of the prompt. So a template ends the prompt with a key, one token, and the scripts
say what follows each key. All exits agree with the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

END = "<|end|>"
_SHORTEST = 5  # characters of a piece


def scripted_generator(
    scripts: Mapping[str, str],
    template: str,
    words: Sequence[str] = (),
) -> SelfSpecGenerator:
    """scripts: what the model says, by the key at the prompt's end. template: a chat template that ends with a key.

    words: further texts that are one token each.
    """
    pieces: dict[str, list[str]] = {}
    for key, text in scripts.items():
        used = {one for said in pieces.values() for one in said} | {*scripts, *words}
        pieces[key] = _pieces(text, used)
    tokenizer = scripted_tokenizer(template, [*scripts, *words, *(one for said in pieces.values() for one in said)])
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.get_vocab()}
    size = -(-len(tokenizer) // 64) * 64
    llama = tiny_llama(
        num_layers=4, heads=size // 64, kv_heads=size // 64, head_dim=64, hidden_size=size, vocab_size=size,
        tie_word_embeddings=False, max_position_embeddings=2048, eos_token_id=ids[END],
    )  # fmt: skip
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        llama.model.norm.weight.fill_(1.0)
        llama.model.embed_tokens.weight.copy_(torch.eye(size))
        llama.lm_head.weight.zero_()
        for key, said in pieces.items():
            for before, after in zip([key, *said], [*said, END]):
                llama.lm_head.weight[ids[after], ids[before]] = 1.0
    llama.generation_config.eos_token_id = ids[END]
    return SelfSpecGenerator(from_transformers(llama, layout="plain"), tokenizer, policy="ls:2-3")


def _pieces(text: str, used: set[str]) -> list[str]:
    """The text in pieces that occur once, so that each has one successor."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + _SHORTEST
        while text[start:end] in used and end < len(text):
            end += 1
        piece = text[start:end]
        if piece in used or (len(piece) < _SHORTEST and pieces):
            used.discard(pieces[-1])
            piece = pieces.pop() + piece
        pieces.append(piece)
        used.add(piece)
        start = end
    return pieces


def scripted_tokenizer(template: str, words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Bytes, and a token for each of these texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.chat_template = template
    return tokenizer
