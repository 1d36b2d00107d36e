"""Process settings that decide speed on a CPU. They must be made before torch is imported."""

import ctypes
import os
import sys

# glibc's names for mallopt; they are part of its ABI.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_LARGEST_INT = 2**31 - 1


def configure_process() -> None:
    """Sets thread waiting and the allocator; what the user set in the environment wins.

    OpenMP threads that spin while they wait make a shared machine up to ten times slower. And
    glibc returns every large block to the kernel at once, which then clears its pages again for
    the next one: training steps on a CPU took twice as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform == "linux" and not chosen:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # musl has none
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
