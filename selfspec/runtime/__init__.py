"""What a call holds while it runs: model, runner, policy state, switches of PyTorch; and whether weights have changed."""
