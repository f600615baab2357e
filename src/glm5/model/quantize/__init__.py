"""Quantised weights: formats, rounding, the transforms that prepare for it, published directories, training for it.

``plan`` says which matrices get which format, ``formats`` holds the one rounding code, ``projections`` the modules that
compute with integers, ``hadamard`` and ``scaling`` the function-preserving transforms, ``export`` the way from one
checkpoint directory to another, ``fake`` the training view of the same weights, ``caches`` the same for key caches.
"""
