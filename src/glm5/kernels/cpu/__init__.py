"""The native CPU form of the kernels: C++ behind a plain C interface, compiled at install, called through ctypes.

``build`` compiles it (``setup.py`` and ``python -m glm5.kernels.cpu`` both call it), ``library`` loads it and knows the
C signatures, ``inference`` and ``training`` wrap the functions for tensors. It does not depend on torch's ABI.
"""
