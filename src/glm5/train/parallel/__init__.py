"""Training on several processes: sharded parameters, experts, rows, tokens and heads; one process is the plain case."""
