"""Peers in Triton compile and time many configurations when they are first called: here both can be done apart, and in less time."""

import functools
import gc
import itertools
from typing import Any

_FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)
_MANY = 12


def compile_only(process: int, processes: int) -> None:
    """Makes this process's Triton compile every `processes`-th configuration, and launch nothing."""
    from triton.errors import TritonError
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    turns, launch = itertools.count(), JITFunction.run
    tuning = False

    def is_mine() -> bool:
        return next(turns) % processes == process

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        if tuning or is_mine():
            launch(self, *args, **{**kwargs, "warmup": True})

    def tune(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal tuning
        self.nargs = dict(zip(self.arg_names, args))
        self.best_config = self.configs[0]  # some ask for it after the launch
        for config in self.prune_configs(kwargs):
            if is_mine():
                tuning = True
                try:
                    self.fn.run(*args, **kwargs, **config.all_kwargs())
                except (*_FAILURES, TritonError):  # a configuration that does not fit, which tuning skips too
                    pass
                finally:
                    tuning = False

    JITFunction.run, Autotuner.run = run, tune  # type: ignore[method-assign]


@functools.cache
def try_fewer() -> None:
    """Of kernels with a dozen configurations and more, peers only try those of two or four warps and two or three stages."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def fewer(self: Any, kwargs: Any) -> Any:
        found = prune(self, kwargs)
        usual = [c for c in found if c.num_warps in (2, 4) and c.num_stages in (2, 3)]
        return usual or found if len(found) >= _MANY else found

    Autotuner.prune_configs = fewer  # type: ignore[method-assign]


@functools.cache
def tune_briefly() -> None:
    """Makes peers try fewer configurations when they tune themselves, and take short samples."""
    import triton.testing

    try_fewer()
    bench = triton.testing.do_bench

    def briefly(function: Any, *args: Any, warmup: int = 0, rep: int = 0, **kwargs: Any) -> Any:
        return bench(function, *args, warmup=1, rep=5, **kwargs)

    triton.testing.do_bench = briefly


class Later:
    """Tuning that is put off: until `tune`, the first configuration that runs is taken, and afterwards each kernel is tuned when it is called.

    So a program can be compiled while others use the device, and be tuned when it has the device for itself.
    """

    def __init__(self, warmup: int = 5, rep: int = 25):
        """Milliseconds of each configuration that are not timed, and that are."""
        import triton.testing

        self._bench, self._sample = triton.testing.do_bench, {"warmup": warmup, "rep": rep}
        self._timed = False
        triton.testing.do_bench = self._take  # tuners keep what they find there

    def _take(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self._timed:
            return self._bench(function, *args, **{**kwargs, **self._sample})
        function()
        return [0.0, 0.0, 0.0]

    def tune(self) -> None:
        from triton.runtime.autotuner import Autotuner

        self._timed = True
        for tuner in gc.get_objects():
            if issubclass(type(tuner), Autotuner):  # isinstance() asks proxies of other packages, too
                tuner.cache.clear()
