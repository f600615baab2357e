"""HTTP over the engine: the token-level protocol, the OpenAI and Anthropic APIs. Importing this layer loads no torch."""
