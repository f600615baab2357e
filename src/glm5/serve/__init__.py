"""HTTP over the engine: the token-level protocol, the OpenAI API, metrics. Importing this layer loads no torch."""
