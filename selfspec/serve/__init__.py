"""An OpenAI-compatible server over the engine. Needs `pip install -e '.[serve]'`."""
