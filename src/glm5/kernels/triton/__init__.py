"""The GPU form of the kernels, in Triton: same signatures and contracts as ``reference``.

``rowwise`` holds RMSNorm, RoPE, SwiGLU and sampling; ``indexing`` index scores, top-k and the indexer's KL loss;
``attention`` sparse absorbed attention; ``experts`` the grouped products of the mixture of experts. Importing a module
needs Triton (extra ``gpu``); ``dispatch`` imports them when it first meets a CUDA tensor. Sums have one fixed order: no
kernel uses atomics.
"""
