"""What a training run starts from: its model, tokenizer and packed tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from layerskip_models.checkpoints.loading import find_source, load_tokenizer, load_transformers
from layerskip_models.training import documents as training_data
from layerskip_models.training import saving as checkpoints
from layerskip_models.training.training_config import OWN_TEXT_PROMPT, TrainingConfig


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
        train, _ = _documents(config)
        texts = (text for _, documents in train for text in documents)
        tokenizer = training_data.train_tokenizer(texts, config.vocab_size)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, which separates the documents: set eos_token in its config")
    checkpoints.write_folder(own, tokenizer.save_pretrained)
    return tokenizer


def described_model(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    """Describe what the model will be.

    Raises ValueError when init is no Llama, its context is too short or its vocabulary smaller than the tokenizer's.
    """
    if config.init is None:
        described = _fresh_config(config, tokenizer)
    else:
        described = find_source(config.init, revision=None, local_files_only=False).float_config()
        if not isinstance(described, LlamaConfig):
            raise ValueError(
                f"init must be a Llama checkpoint, {config.init!r} is of type {described.model_type!r}: "
                "other families can be run, but not trained here"
            )
        longest = config.longest_sequence()
        if longest > described.max_position_embeddings:
            raise ValueError(
                f"sequences of {longest} tokens are longer than the context of {config.init!r}"
                f" ({described.max_position_embeddings}): shorten sequence_length or long_sequence_length"
            )
    if len(tokenizer) > described.vocab_size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model only {described.vocab_size}")
    return described


def initial_model(config: TrainingConfig, described: LlamaConfig) -> LlamaForCausalLM:
    """Make the model in float32 at its start: init's, or a new one."""
    torch.manual_seed(config.seed)
    if config.init is None:
        return LlamaForCausalLM(described).train()
    model = load_transformers(config.init, dtype=torch.float32, device="cpu")
    assert isinstance(model, LlamaForCausalLM)
    model.set_attn_implementation("sdpa")
    return model.train()


def _fresh_config(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    return LlamaConfig(
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


def _documents(config: TrainingConfig) -> tuple[list[tuple[training_data.DataSource, list[str]]], list[str]]:
    return training_data.split_sources(config.sources(), config.exclude, config.holdout_fraction)


def token_streams(
    config: TrainingConfig, output_dir: Path, tokenizer: PreTrainedTokenizerBase
) -> training_data.TokenStreams:
    """Packed tokens, made once and kept in output_dir/tokens, so that a resumed run reads the same.

    Raises ValueError when the text does not fill one sequence.
    """
    folder = output_dir / "tokens"
    if not folder.exists():
        packed = training_data.pack_streams(*_documents(config), tokenizer, config.seed)

        def write(path: Path) -> None:
            np.save(path / "train.npy", packed.train)
            np.save(path / "held_out.npy", packed.held_out)

        checkpoints.write_folder(folder, write)
    streams = training_data.TokenStreams(
        train=np.load(folder / "train.npy", mmap_mode="r"), held_out=np.load(folder / "held_out.npy", mmap_mode="r")
    )
    for length in config.sequence_lengths() | ({OWN_TEXT_PROMPT} if config.own_text_steps else set()):
        if training_data.num_blocks(streams.train, length) < 1:
            raise ValueError(
                f"the training text has {len(streams.train)} tokens, too few for one sequence of {length}:"
                " add data or shorten the sequences"
            )
    return streams
