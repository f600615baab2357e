"""HTTP over the engine: the token-level protocol, the OpenAI and Anthropic APIs. Importing it loads no torch."""
