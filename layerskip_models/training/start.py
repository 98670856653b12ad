"""What a training run starts from: its model, tokenizer and packed tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from layerskip_models.checkpoints.loading import find_source, load_float, load_tokenizer
from layerskip_models.training.documents import num_blocks, pack_streams, split_sources, train_tokenizer
from layerskip_models.training.looped import as_llama
from layerskip_models.training.run_folder import write_folder
from layerskip_models.training.training_config import TrainingConfig


def own_tokenizer(config: TrainingConfig, output_dir: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer, which is kept in output_dir/tokenizer. Raises ValueError when it has no EOS token."""
    own = output_dir / "tokenizer"
    if own.exists():
        return AutoTokenizer.from_pretrained(own)
    if config.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    elif config.init is not None:
        tokenizer = load_tokenizer(config.init)
    else:
        train, _ = split_sources(config.sources(), config.exclude, config.holdout_fraction)
        tokenizer = train_tokenizer((text for _, texts in train for text in texts), config.vocab_size)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, which separates the documents: set eos_token in its config")
    write_folder(own, tokenizer.save_pretrained)
    return tokenizer


def initial_model(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Make the model in float32 at its start: init's, or a new one.

    Raises ValueError when init is no Llama, its context is too short or its vocabulary smaller than the tokenizer's.
    """
    if config.init is None:
        described = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_length,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
            attn_implementation="sdpa",
        )
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(described).train()
    source = find_source(config.init, revision=None, local_files_only=False)
    if config.loops > 1:
        source = replace(source, config=as_llama(source.config))
    found = source.float_config()
    if not isinstance(found, LlamaConfig):
        raise ValueError(
            f"init must be a Llama checkpoint, {config.init!r} is of type {found.model_type!r}: "
            "other families can be run, but not trained here"
        )
    longest = max(config.sequence_lengths())
    if longest > found.max_position_embeddings:
        raise ValueError(
            f"sequences of {longest} tokens are longer than the context of {config.init!r}"
            f" ({found.max_position_embeddings}): shorten sequence_length or long_sequence_length"
        )
    if len(tokenizer) > found.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model only {found.vocab_size}")
    model = load_float(source, torch.float32, "cpu")
    assert isinstance(model, LlamaForCausalLM)
    model.set_attn_implementation("sdpa")
    return model.train()


def token_streams(
    config: TrainingConfig, output_dir: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """Return packed training and held-out tokens, kept in output_dir/tokens. Raises ValueError for less than a sequence."""
    folder = output_dir / "tokens"
    if not folder.exists():
        documents = split_sources(config.sources(), config.exclude, config.holdout_fraction)
        packed = pack_streams(*documents, tokenizer, config.seed)

        def write(path: Path) -> None:
            for name, tokens in zip(("train", "held_out"), packed):
                np.save(path / f"{name}.npy", tokens)

        write_folder(folder, write)
    train, held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out"))
    for length in config.sequence_lengths():
        if num_blocks(train, length) < 1:
            few = f"{len(train)} tokens, too few for one sequence of {length}"
            raise ValueError(f"the training text has {few}: add data or shorten the sequences")
    return train, held_out
