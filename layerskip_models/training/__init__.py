"""The LayerSkip training recipe: documents, set-up, the loop, evaluation."""
