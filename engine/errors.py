"""Errors of the engine.

EngineError
├── ModelError
│   ├── ModelNotFound        nothing by that name: no folder, not on the hub, or the hub cannot be reached
│   ├── ModelFilesInvalid    the folder is there but cannot be used (no config.json, only pickled weights, ...)
│   └── UnsupportedModel     we would give wrong text for this architecture, so we refuse it by name
├── CacheFolderUnusable      compiled kernels cannot be kept, and compiling them takes a minute at each start
├── InvalidRequest           a Sequence that cannot be run: empty, finished, or here already
│   └── RequestTooLarge      longer than the context, or than the whole device pool
├── InvalidSampling          a sampling parameter is out of range
├── SequenceFailed           a Sequence that can have no further right token: it fails, no other
│   ├── InvalidLogits        the model gave NaN or infinite logits
│   └── GrammarFailed        its grammar cannot be used, refuses a token of its log, or grew beyond its limits
└── InvalidCall              the runner was called with rows, positions or pages that do not fit together
"""


class EngineError(Exception):
    """Has a message for people and a ``hint`` that names the fix."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ModelError(EngineError):
    """The model cannot be served; ``name`` is what was asked for."""

    def __init__(self, message: str, hint: str = "", *, name: str = "") -> None:
        super().__init__(message, hint)
        self.name = name


class ModelNotFound(ModelError):
    """No model of this name can be found."""


class ModelFilesInvalid(ModelError):
    """The model's folder lacks files, or holds them in a form that we do not read."""


class UnsupportedModel(ModelError):
    """The architecture needs something that we do not do; ``field`` names what (``sliding_window``, ``s_aux``, ...)."""

    def __init__(self, message: str, hint: str = "", *, name: str = "", field: str = "") -> None:
        super().__init__(message, hint, name=name)
        self.field = field


class CacheFolderUnusable(EngineError):
    """Nothing can be written where compiled kernels are kept."""


class InvalidRequest(EngineError, ValueError):
    """The engine cannot take this Sequence in."""


class RequestTooLarge(InvalidRequest):
    """The Sequence would not fit even alone."""


class InvalidSampling(EngineError, ValueError):
    """A sampling parameter is out of range; ``field`` names it."""

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(f"{field}: {message}", hint)
        self.field = field


class SequenceFailed(EngineError):
    """The job cannot go on, here or elsewhere. ``code`` is that of its failure."""

    code: str


class InvalidLogits(SequenceFailed):
    """The model's logits for a row hold NaN or +inf, or nothing is left to choose from."""

    code = "invalid_logits"


class GrammarFailed(SequenceFailed):
    """A grammar that does not compile, or allows no text; a logged token that it refuses; or one that became too complex."""

    code = "grammar_failed"


class InvalidCall(EngineError, ValueError):
    """The caller's rows, positions and page tables do not fit together: a bug of the caller."""
