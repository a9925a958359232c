"""The exceptions of this package. A user's mistake is a `ValueError`; these cover the rest."""

from collections.abc import Mapping


class EjkernelError(Exception):
    """Base class of the exceptions that `ejkernel_eqx` defines."""


class UnsupportedError(EjkernelError):
    """No platform that may be used can run the request.

    **Arguments:**

    - `operation`: the name of the operation, for example `"FlashAttention"`.
    - `reasons`: platform name (or enumeration member) to the sentence that says why it cannot run here.
    - `remedy`: optionally, one sentence on what to change.

    All are kept as attributes, `reasons` with plain strings as keys; the message lists every platform.
    """

    operation: str
    reasons: dict[str, str]
    remedy: str | None

    def __init__(self, operation: str, reasons: Mapping, remedy: str | None = None):
        self.operation = operation
        self.reasons = {str(getattr(platform, "value", platform)): why for platform, why in reasons.items()}
        self.remedy = remedy
        # The arguments, not the message, so that the exception survives pickling between processes.
        super().__init__(operation, self.reasons, remedy)

    def __str__(self) -> str:
        if not self.reasons:
            message = f"{self.operation}: no platform is registered for this operation."
        elif len(self.reasons) == 1:
            ((platform, why),) = self.reasons.items()
            message = f"{self.operation} cannot run this request on platform {platform!r}: {why}"
        else:
            lines = [f"  {platform}: {why}" for platform, why in self.reasons.items()]
            message = "\n".join([f"{self.operation} cannot run this request on any platform:", *lines])
        return message if self.remedy is None else f"{message}\n{self.remedy}"


class TuningError(EjkernelError):
    """Tuning was asked for where it cannot be done, or ended without a configuration that may be used."""


class CheckpointError(EjkernelError, ValueError):
    """A checkpoint is foreign, damaged, newer than this package, or does not fit the model it is loaded into.
    The message names the file."""
