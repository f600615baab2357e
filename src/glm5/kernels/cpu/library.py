"""Loads the native library and declares its C functions.

The only place that knows C signatures. Every function returns an int whose meaning its C++ comment gives; pointers are
addresses of contiguous memory (or with strides where the C++ comment says so), sizes and strides count elements.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from glm5.errors import KernelError
from glm5.kernels.cpu.build import instruction_sets, library_path, source_digest
from glm5.kernels.cpu.proof import disagreement

_log = logging.getLogger(__name__)

_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
_PROBLEM = "p nnn p nnn p nnn p nn nnnnnn f"
_LISTED = "pp p nnnnn n"
_SIGNATURES = {  # p pointer, n int64, f float, i int (a flag or the thread count)
    "rms_norm": "p n p f nn pp i",
    "rms_norm_backward": "p n p p p nn pp i",
    "swiglu": "p nn p i",
    "swiglu_backward": "pp nn p i",
    "sample": "p nn ppppp pp i",
    "rope": "p nnnn pp n nnn p i",
    "rope_backward": "p pp n nnn nn p i",
    "experts": "p n pp pp nnnnn pp i",
    "experts_backward": "p n pp pp pp nnnnn pppp i",
    "index_scores": "ppp p nn nnnnn f p i",
    "index_scores_backward": "ppp p nn nnnnn f p ppp i",
    "select_topk": "p p nn nnn n p i",
    "indexer_kl": "pp p nn nnn pp p i",
    "masked_attention": _PROBLEM + "pp i",
    "masked_attention_backward": _PROBLEM + "ppp ppp i",
    "attention_targets": _PROBLEM + "p i",
    "sparse_attention_backward": "pp p nnn nnn n f ppp pp i",
    "sparse_scores": "p" + _LISTED + "f p i",
    "sparse_scores_backward": "p" + _LISTED + "f p ppp i",
    "sparse_targets": _LISTED + "f p i",
    "int8_linear": "p n pp nnn p i",
    "int4_linear": "p n pp nnnn p i",
    "ragged_select": "i pp n p nnn p nn ppp n n p i",
    "ragged_attention": "i p n p nnn n p nn pp n p n f pp i",
    "ragged_dsa": "i p n pp n p nnn n p n p nn pp n n f p i",
}

NativeFunctions = Mapping[str, Callable[..., int]]


@functools.cache
def native(instruction_set: str = "") -> NativeFunctions:
    """The C functions by name, for one of ``runnable_sets()`` or, by default, the ``proven_set()``.

    Raises KernelError when the library is missing, out of date or lacks the instruction set.
    """
    library, chosen = _library(), instruction_set or proven_set()
    functions = {}
    sets = ("amx", "avx512") if chosen == "amx" else (chosen,)  # only some functions use the matrix unit
    for name, signature in _SIGNATURES.items():
        function = next((library[symbol] for form in sets if hasattr(library, symbol := f"glm5_{name}_{form}")), None)
        if function is None:
            raise KernelError(f"native kernels: {library_path()} has no {chosen} form of {name}; it has "
                              f"{', '.join(instruction_sets())}")
        function.argtypes = [_TYPES[letter] for letter in signature.replace(" ", "")]
        function.restype = ctypes.c_int
        functions[name] = function
    return MappingProxyType(functions)


def runnable_sets() -> tuple[str, ...]:
    """Instruction sets that the library contains and this machine can run, best first."""
    sets = instruction_sets()
    return sets[sets.index(_text(_library(), "glm5_best_isa")) :]


@functools.cache
def proven_set() -> str:
    """The best instruction set whose results are right on this machine; a warning names one that is passed over."""
    *vectorised, plain = runnable_sets()
    for name in vectorised:
        wrong = disagreement(native(name))
        if wrong is None:
            return name
        _log.warning("native kernels: %s gives wrong results in its %s form on this machine; a slower form is used; "
                     "build the library here with 'python -m glm5.kernels.cpu'", wrong, name)
    return plain


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    if not path.exists():
        raise KernelError(f"native kernels: {path} is missing; run 'make setup' (or 'pip install .') to compile them")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"native kernels: {path} does not load ({error}); run 'make setup' to compile it") from None
    if _text(library, "glm5_sources") != source_digest():
        raise KernelError(f"native kernels: {path} was compiled from other sources; run 'python -m glm5.kernels.cpu'")
    return library


def _text(library: ctypes.CDLL, name: str) -> str:
    function = library[name]
    function.restype = ctypes.c_char_p
    return str(function().decode())
