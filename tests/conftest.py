"""Settings that must stand before JAX and the package are imported, and the fixtures all tests share."""

import atexit
import collections
import dataclasses
import functools
import gc
import importlib.util
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import typing
import zlib
from typing import Any

_ASKED = os.environ.get("EJKERNEL_EQX_TESTS", "").split()
# Compiling takes most of the suite's time: less of it, unless "optimised" is asked for. A test that measures what XLA makes of a
# program has the fixture `optimised`.
_OPTIMISED = "optimised" in _ASKED
# Checking annotations takes most of the rest, at import and in every trace. Those of what users call are checked always, all with
# "checked", which `.ci/run` asks for where time is less of a matter.
_CHECKED = "checked" in _ASKED
_ROOMS = "attention cells convolution custom matmul nn normalization paged pooling recurrence selective_scan sequences weights".split()
# Seconds of tests after which a run says which files they went to.
_LONG = 60
# JAX makes so many objects that looking for garbage among them takes long; little of it is large.
gc.set_threshold(50_000, 20, 100)
# Programs that run once: the CPU's newer emitters take four times as long to make them, and parts of a program are for more cores.
_QUICK_FLAGS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")


def _known(*flags: str) -> bool:
    """Whether this version of XLA has the flags: it aborts the process over one that it has not."""
    script = "import resource, jaxlib.xla_client as x; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); x.make_cpu_client()"
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    return (
        subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True).returncode == 0
    )


# Eight CPU devices for the sharding tests. The flag touches only the CPU, so it is harmless on a GPU machine.
_flags = os.environ.get("XLA_FLAGS", "")
if "--xla_force_host_platform_device_count" not in _flags:
    _flags += " --xla_force_host_platform_device_count=8"
if "PYTEST_XDIST_WORKER" in os.environ and "--xla_cpu_multi_thread_eigen" not in _flags:
    # The suite is parallel over processes already; threads inside each would only get in each other's way.
    _flags += " --xla_cpu_multi_thread_eigen=false"
if not _OPTIMISED:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # in the processes that tests start, too
    _quick = [flag for flag in _QUICK_FLAGS if flag not in _flags]
    _flags = " ".join([_flags, *(_quick if not _quick or _known(*_quick) else filter(_known, _quick))])
os.environ["XLA_FLAGS"] = _flags.strip()
# A program that one worker has compiled is read by the others, and by later runs where the variable names a folder that stays.
if "EJKERNEL_EQX_TESTS_PROGRAMS" not in os.environ:
    os.environ["EJKERNEL_EQX_TESTS_PROGRAMS"] = tempfile.mkdtemp(prefix="ejkernel_eqx-programs-")
    atexit.register(shutil.rmtree, os.environ["EJKERNEL_EQX_TESTS_PROGRAMS"], ignore_errors=True)
    # For one run, programs that compile faster than this are not worth storing.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
else:
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# The frames of a trace in what is lowered are read by nobody here, and writing them takes a twentieth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Compilers allocate and free much: memory that a process has is kept, in large pages. Read at a process's start: by the workers.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**32))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TOP_PAD_", str(2**26))
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
# NumPy's threads would wait for work on the cores of the other workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Several processes share one GPU: none of them may reserve most of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Nothing that the tests tune may reach the tables of whoever runs them, and no such table may decide what is tested. Processes that
# a test starts inherit the folder.
os.environ["EJKERNEL_EQX_CACHE_DIR"] = tempfile.mkdtemp(prefix="ejkernel_eqx-tests-")
atexit.register(shutil.rmtree, os.environ["EJKERNEL_EQX_CACHE_DIR"], ignore_errors=True)

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402


def _leave() -> None:
    """Ends a worker. Its memory goes with its process: to take JAX's caches apart first takes seconds, for which xdist waits."""
    shutil.rmtree(os.environ["EJKERNEL_EQX_CACHE_DIR"], ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(_leave)  # after JAX's import, and so run before what JAX does at an exit

# What a user may switch on must work: an implicit promotion between dtypes or ranks is an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", os.environ["EJKERNEL_EQX_TESTS_PROGRAMS"])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _checked_modules(package: str) -> list[str]:
    """The modules whose annotations are checked, but for those that define Triton kernels: Triton compiles a function's source
    with the function's own globals, and a type-checking wrapper around the function would hide both."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{package} is not importable; install it first: pip install -e '.[test]'")
    root = pathlib.Path(spec.submodule_search_locations[0])
    modules = []
    for file in sorted(root.rglob("*.py")):
        # The hook also takes in whatever lies below a name, so packages are left out: they only re-export.
        text = file.read_text(encoding="utf-8")
        if file.stem in ("__init__", "__main__") or "triton.jit" in text or "gluon.jit" in text:
            continue
        if _CHECKED or _is_public(file):
            modules.append(".".join((package, *file.relative_to(root).with_suffix("").parts)))
    return modules


def _is_public(file: pathlib.Path) -> bool:
    """Whether the module has an operation, a layer or a function that its package exports: what users call."""
    exported = set(
        re.findall(
            r"^from \.[\w.]* import (\w+)", (file.parent / "__init__.py").read_text(encoding="utf-8"), re.M
        )
    )
    own = set(re.findall(r"^(?:class|def) (\w+)", file.read_text(encoding="utf-8"), re.M))
    return file.parent.name in _ROOMS and bool(exported & own)


def _has_shapes(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return not annotation.isidentifier()
    return type(annotation).__module__.startswith("jaxtyping") or any(
        map(_has_shapes, typing.get_args(annotation))
    )


def _jaxtyped(function: Any, *, typechecker: Any, shaped: Any = jaxtyping.jaxtyped) -> Any:
    """`jaxtyping.jaxtyped`, which binds the arguments of every call anew, where an annotation has a shape; elsewhere the type checker alone."""
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and not hasattr(function.__init__, "__wrapped__"):
            setattr(function, "__init__", _jaxtyped(function.__init__, typechecker=typechecker))  # noqa: B010
        return function
    if any(map(_has_shapes, function.__annotations__.values())):
        return shaped(function, typechecker=typechecker)
    written = dict(function.__annotations__)
    checked = typechecker(function)
    function.__annotations__ = written  # beartype writes what it resolves

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if jaxtyping.config.jaxtyping_disable else checked)(*args, **kwargs)

    return function if checked is function else call


# Annotations of the package are checked at run time, in tests only. This must come before its first import.
jaxtyping.install_import_hook(_checked_modules("ejkernel_eqx"), "beartype.beartype")
jaxtyping.jaxtyped = lambda *, typechecker: functools.partial(_jaxtyped, typechecker=typechecker)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="I/N", help="only every N-th case, by a hash of its id: the I-th of N shares"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `few(n)`, n cases run by default, chosen to have as many of the parameters' values as they can; the others are slow. Of all,
    those of one share run, if one is asked for."""
    tests: dict[tuple[object, ...], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few"):
            tests.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("few")
        assert marker is not None
        (number,) = marker.args
        for case in _others(cases, number):
            case.add_marker(pytest.mark.slow)
    if share := config.getoption("share"):
        part, parts = map(int, share.split("/"))
        mine = lambda item: zlib.crc32(item.nodeid.encode()) % parts == part
        config.hook.pytest_deselected(items=[item for item in items if not mine(item)])
        items[:] = filter(mine, items)


def _others(cases: list[pytest.Function], number: int) -> list[pytest.Function]:
    """The cases beside `number` chosen ones: each next one has the most values of parameters that none before has."""
    left = [case for case in cases if not case.get_closest_marker("slow")]
    # Objects are told apart by their place: not all can be compared, and a value that cases share is one object.
    values_of = lambda case: {(name, id(value)) for name, value in case.callspec.params.items()}
    seen: set[tuple[str, int]] = set()
    for _ in range(min(number, len(left))):
        values = [values_of(case) for case in left]
        best = max(range(len(left)), key=lambda i: (len(values[i] - seen), zlib.crc32(left[i].name.encode())))
        seen |= values[best]
        del left[best]
    return left


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where the time went: the files that took longest, in all processes together."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if sum(seconds.values()) > _LONG:
        terminalreporter.section("dearest files")
        for file, number in sorted(seconds.items(), key=lambda item: -item[1])[:20]:
            terminalreporter.write_line(f"{number:7.1f} s  {file}")


def pytest_collection_finish() -> None:
    """What was made so far stays: it is not looked at again."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Looks for garbage once: what is left is not looked at again, as pytest does twice for objects that were not closed."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Every program compiled for the CPU holds memory mappings, of which Linux gives a process 65530; past that it crashes. The programs of
    the modules before are let go in time."""
    yield
    if _mappings() > 15_000:
        jax.clear_caches()
        gc.collect()


def _mappings() -> int:
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture
def optimised():
    """`optimised(lowered)` is compiled as it is for users, with XLA's optimisations on."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    given = {"xla_cpu_use_fusion_emitters": True} if _QUICK_FLAGS[0] in os.environ["XLA_FLAGS"] else {}
    yield lambda lowered: lowered.compile(compiler_options=given)
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def enable_x64():
    """Run the whole test with 64-bit types; inside a test, `with jax.enable_x64(True):` does it for a part."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def no_races():
    """Pallas kernels that the test interprets have no races."""
    from tests.tpus import without_races

    with without_races():
        yield


@pytest.fixture
def unchecked():
    """Annotations are not checked during the test: for the errors that users see, who have no checker installed."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
