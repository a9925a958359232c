"""From a user's line to the launch of a kernel the way is short: its files and functions are counted in a fresh process."""

import pytest

from tests.corridor import attention, corridors_of, mamba2

# The most files and functions of the package that a call may go through.
MOST = {"FlashAttention(...)": (19, 74), "op(q, k, v)": (23, 152), "Mamba2Mixer": (56, 285)}


@pytest.mark.parametrize("calls", [attention, mamba2])
def test_the_way_to_the_launch_is_short(calls):
    for name, corridor in corridors_of(calls).items():
        files, functions = MOST[name]
        assert len(corridor.files) <= files, (name, sorted(corridor.files))
        assert len(corridor.functions) <= functions, (name, corridor.functions)
        # A call that is not followed to its end would be short, too.
        assert name == "FlashAttention(...)" or "launch/by_name.py" in corridor.files
