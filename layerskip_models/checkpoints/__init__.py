"""From a name, a folder or a transformers module to a model: what is supported, read, converted, made up."""
