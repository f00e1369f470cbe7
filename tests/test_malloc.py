"""The settings of glibc's allocator: what a thread frees is returned to the system."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from fedcomp import malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

def flood():
    blocks = [libc.malloc(4000) for _ in range(12_000)]
    for block in blocks:
        ctypes.memset(block, 1, 4000)
    for block in blocks:
        libc.free(block)

if sys.argv[1] == "shared":
    malloc.share_freed_memory()
libc.free(libc.malloc(30 << 20))  # glibc then keeps up to 60 MB of freed memory in each arena
before = resident_mb()
thread = threading.Thread(target=flood)
thread.start()
thread.join()
malloc.return_freed_memory()
print(resident_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings apply to glibc only")
@pytest.mark.parametrize(("setting", "kept"), [("default", True), ("shared", False)])
def test_memory_that_a_thread_freed_is_returned(setting, kept):
    command = [sys.executable, "-c", PROGRAM, setting]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 30) == kept
