"""What is known of a candidate without running it, and compiling for it beside everything else."""

import concurrent.futures
import dataclasses
import gc
import threading

from ejkernel_eqx import Backend, DeviceFacts, TuneOptions
from ejkernel_eqx.tuning import Status
from tests.launch.test_compile import matmul
from tests.tuning import parts, toy

H200 = DeviceFacts(Backend.GPU, "NVIDIA H200", "nvidia", "9.0", shared_memory=232_448)


def test_the_target_of_a_device_has_its_shared_memory():
    assert parts.target_for(H200) == parts.TARGETS["sm_90"]
    rtx = dataclasses.replace(H200, kind="NVIDIA RTX 4090", compute_capability="8.9", shared_memory=101_376)
    found = parts.target_for(rtx)
    assert found is not None and (found.name, found.arch, found.shared_limit) == ("sm_89", 89, 101_376)
    amd = DeviceFacts(Backend.GPU, "AMD MI300X", "amd", "gfx942:sramecc+:xnack-", shared_memory=65_536)
    assert parts.target_for(amd) == parts.TARGETS["gfx942"]


def test_what_is_not_known_to_compile_is_not_compiled():
    unknown = ({"compute_capability": "99.0"}, {"compute_capability": ""}, {"vendor": "other"})
    for changes in (*unknown, {"vendor": "amd", "compute_capability": "gfx9999"}, {"backend": Backend.CPU}):
        assert parts.target_for(dataclasses.replace(H200, **changes)) is None


FEW, MANY = (32, 32, 32), (64, 128, 32)


def workload(launches):
    nothing = lambda *_: {}
    return parts.Workload(nothing, nothing, nothing, {}, ("y",), launches=launches)


def refused(config, heuristic, launches, part="", device=H200):
    job = parts.Job(toy.problem(), toy.PLANTED, device, heuristic, (), (), None, TuneOptions(), 1.0)
    return parts.refusal(parts.Candidate(part, config), config, job, workload(launches))


def test_what_the_heuristic_launches_too_says_nothing_about_a_candidate():
    """The first kernel spills in both; only a second one that spills speaks against the candidate."""
    one, two, three = (toy.ToyConfig(n) for n in (1, 2, 3))
    spilling, other, sound = matmul(*MANY, num_warps=1), matmul(64, 128, 64, num_warps=1), matmul(*FEW)
    launches = {
        one: [spilling, sound],
        two: [spilling, matmul(*FEW, num_stages=2)],
        three: [other, sound],
    }.get
    assert refused(one, one, launches) is None
    assert refused(two, one, launches) is None
    found = refused(three, one, launches)
    assert found is not None and found[0] is Status.SKIPPED and found[1].startswith("spills ")


def test_a_launch_that_cannot_be_described_or_compiled_is_left_to_the_compilation():
    def broken(config):
        raise ValueError("no launch")

    assert refused(toy.ToyConfig(1), toy.ToyConfig(2), broken) is None
    # On a device whose architecture is not known nothing is compiled ahead.
    newer = dataclasses.replace(H200, compute_capability="99.0")
    assert refused(toy.ToyConfig(1), toy.ToyConfig(2), broken, device=newer) is None


def test_compilations_run_beside_each_other_and_give_what_they_give_alone():
    launches = [matmul(16, 16, 16, num_stages=n) for n in (1, 2, 3, 4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda launch: parts.compile_ahead(launch, "sm_80"), launches))
    assert together == [parts.compile_ahead(launch, "sm_80") for launch in launches]
    assert len({report.shared for report in together}) > 1
    assert gc.isenabled()


def _in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_many_compile_or_one_interprets():
    lock = parts.LanguageLock()
    both, release, interpreting = threading.Barrier(3), threading.Event(), threading.Event()

    def compiles():
        with lock.shared():
            both.wait(10)  # passed only if two hold the lock at once
            release.wait(10)
            assert not interpreting.is_set()

    def interprets():
        with lock, lock:  # the same thread may take it again
            interpreting.set()

    compilers = [_in_thread(compiles) for _ in range(2)]
    both.wait(10)
    interpreter = _in_thread(interprets)
    assert not interpreting.wait(0.05)
    late = threading.Event()
    # Who comes after a waiting interpretation waits for it.
    _in_thread(lambda: (lock.shared().__enter__(), late.set()))
    assert not late.wait(0.05)
    release.set()
    assert interpreting.wait(10) and late.wait(10)
    for thread in (*compilers, interpreter):
        thread.join(10)
        assert not thread.is_alive()
