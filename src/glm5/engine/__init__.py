"""Inference: scheduling, prefix cache, sampling, speculative decoding. Only runner, sampler, speculative and engine need torch."""
