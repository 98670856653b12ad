"""What runs rows through the model: called from Python, or replayed as CUDA graphs."""
