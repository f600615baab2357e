"""Answers that follow a grammar: which ids may come next, by ``llguidance`` (extra ``grammar``). Free of torch.

Special tokens are symbols of their own in a grammar (``<[ID]>``); a rule for text never matches one, nor the characters
of a stop token. The stop ids of the tokenizer are allowed exactly where the grammar may end.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from glm5.engine.requests import InvalidRequestError
from glm5.tokenizer.bpe import Tokenizer

_COMPILED = 64
"""Grammars kept ready; agents send the same tools with every turn."""
_log = logging.getLogger(__name__)


class Constraint:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> np.ndarray | None:
        """bool [ids of the tokenizer]: which may come next. None when the library gave up; the log says why."""
        bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        if self._matcher.is_error():
            _log.error("grammar: %s", self._matcher.get_error())
            return None
        return bias > 0

    def advance(self, token: int) -> None:
        """``token`` was sampled. After the end of the grammar nothing changes any more."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._library_tokenizer: Any = None
        self._ready: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, grammar: str) -> Constraint:
        """A fresh state of ``grammar``. Raises InvalidRequestError when it is wrong or ``llguidance`` is missing."""
        with self._lock:
            matcher = self._ready.get(grammar)
            if matcher is None:
                matcher = self._ready[grammar] = self._compile(grammar)
                if len(self._ready) > _COMPILED:
                    self._ready.popitem(last=False)
            self._ready.move_to_end(grammar)
            return Constraint(matcher.deep_copy())

    def _compile(self, grammar: str) -> Any:
        try:
            import llguidance
        except ImportError:
            raise InvalidRequestError(
                "JSON schemas and forced tool calls need llguidance; install glm5[grammar] on the server"
            ) from None
        if self._library_tokenizer is None:
            self._library_tokenizer = llguidance.LLTokenizer(
                _with_all_special(self._tokenizer.to_json()), eos_token=list(self._tokenizer.stop_ids)
            )
        matcher = llguidance.LLMatcher(self._library_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise InvalidRequestError(f"grammar: {reason}; correct the schema")
        return matcher


def _with_all_special(tokenizer_json: str) -> str:
    """The tokenizer with every added token special, so that text cannot spell ``<tool_call>`` with that token."""
    data = json.loads(tokenizer_json)
    for token in data["added_tokens"]:
        token["special"] = True
    return json.dumps(data)
