"""Isolated places to run what a model wrote; see ``base`` for the protocol and ``pool`` for the backends."""

from glm5.env.sandbox.base import ExecResult, Limits, Sandbox
from glm5.env.sandbox.pool import BACKENDS, SandboxPool

__all__ = ["BACKENDS", "ExecResult", "Limits", "Sandbox", "SandboxPool"]
