"""The exceptions themselves: readable and safe to send between processes."""

import pickle

from ejkernel_eqx import EjkernelError, UnsupportedError


def test_unsupported_lists_every_platform():
    error = UnsupportedError(
        "FlashAttention", {"triton": "needs a GPU", "cuda": "needs V = D"}, "Use platform='xla'."
    )
    assert str(error) == (
        "FlashAttention cannot run this request on any platform:\n"
        "  triton: needs a GPU\n"
        "  cuda: needs V = D\n"
        "Use platform='xla'."
    )
    assert isinstance(error, EjkernelError)
    assert "no platform is registered" in str(UnsupportedError("X", {}))
    assert str(UnsupportedError("X", {"cuda": "no."})) == "X cannot run this request on platform 'cuda': no."


def test_unsupported_survives_pickling():
    error = UnsupportedError("X", {"xla": "why"})
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.operation, copy.reasons, copy.remedy, str(copy)) == ("X", {"xla": "why"}, None, str(error))
