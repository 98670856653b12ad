"""Llama 2, Llama 3 and CodeLlama: what the other families are compared with."""

from __future__ import annotations

from layerskip_models.families.family import Family

LLAMA = Family(title="Llama 2, Llama 3, CodeLlama", model_type="llama", architecture="Llama")
