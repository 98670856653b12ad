"""An OpenAI-compatible server over the engine. Needs `pip install 'selfspec[serve]'`."""
