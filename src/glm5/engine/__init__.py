"""Inference: scheduling, prefix cache, sampling, speculative decoding."""
