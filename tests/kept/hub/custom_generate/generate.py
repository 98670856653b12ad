"""transformers runs this instead of `model.generate`: self-speculative decoding with selfspec."""

from selfspec.integrations.hub_generate import hub_generate

POLICY = 'ls:2-3'


def generate(*arguments, model, **options):
    """As transformers' `generate`; `policy`, `exit_layer` and `num_speculations` may be given as well."""
    return hub_generate(model, arguments, options, policy=POLICY)
