"""The module that folders exported so far import `hub_generate` from."""

from selfspec.integrations.custom_generate import hub_generate

__all__ = ["hub_generate"]
