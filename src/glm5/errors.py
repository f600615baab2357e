"""Every error that a user can cause or meet, one class per boundary.

Glm5Error
├── ConfigError        a file, key or value of a configuration
├── DataError          a corpus, a conversation file, an empty or unreadable source
├── CheckpointError    a checkpoint directory: missing, extra, misshapen or truncated tensors, wrong tokenizer
├── KernelError        native code that is missing or cannot be built
├── EngineError        the inference engine or its protocol
├── GatewayError       sessions and token-exact recording
├── SandboxError       isolation that is missing or broken
├── TaskError          a task service, a taskset, a verifier
├── WeightSyncError    publication or loading of a weight version
└── ServiceError       a process of ours: port in use, start-up failure, deadline passed

A message states what happened, what was found, what was expected and what to do, in one line. The command line
prints it and exits with 2; anything that is not a ``Glm5Error`` is a defect and shows its traceback.
"""


class Glm5Error(Exception):
    """Root of the errors that are reported in one line."""

    status: int = 500
    """HTTP status with which a service of ours reports it."""
    code: str | None = "internal_error"
    """Machine-readable word beside the message."""


class ConfigError(Glm5Error, ValueError):
    """A configuration file, key or value is wrong."""


class DataError(Glm5Error, ValueError):
    """A source of text or conversations is empty, missing or malformed."""

    status, code = 400, "invalid_request"


class CheckpointError(Glm5Error, ValueError):
    """A checkpoint directory does not hold what its configuration promises."""


class KernelError(Glm5Error, RuntimeError):
    """Native code is missing or cannot be built."""


class EngineError(Glm5Error, RuntimeError):
    """The inference engine refused or failed a request."""

    code = "engine_error"


class GatewayError(Glm5Error, RuntimeError):
    """A recorded session refused or failed a request."""

    status, code = 503, "gateway_error"


class SandboxError(Glm5Error, RuntimeError):
    """Isolation is missing or a sandbox broke."""


class TaskError(Glm5Error, RuntimeError):
    """A task service, taskset or verifier failed."""


class WeightSyncError(Glm5Error, RuntimeError):
    """A weight version could not be published, verified or loaded."""


class ServiceError(Glm5Error, RuntimeError):
    """A process of ours did not start, answer or stop as it should."""
