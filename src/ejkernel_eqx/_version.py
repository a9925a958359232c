"""The version, as the installed package says: asked for when it is wanted."""

import importlib.metadata


def version() -> str:
    """That of the installed package; `"0+unknown"` where its source is used without being installed."""
    try:
        return importlib.metadata.version("ejkernel-eqx")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> str:
    """`ejkernel_eqx.__version__`: the module's own `__getattr__` is this one."""
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'ejkernel_eqx' has no attribute {name!r}")
