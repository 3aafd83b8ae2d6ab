"""Old networks are collected while new ones are made: TensorRT must not wait for itself."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import gc
import plugins.trt.backend as backend
import plugins.trt.logger as logger
from plugins.trt.network import Network

make = logger.make_logger

def collecting(trt):
    inner = type(make(trt))

    class Collecting(inner):
        def log(self, severity, message):
            # What python may do at any allocation, done at the worst moment.
            if gc.isenabled():
                gc.collect()
            inner.log(self, severity, message)

    return Collecting()

backend.make_logger = collecting
for _ in range(3):
    net = Network(backend.load_backend("tensorrt_rtx"))
    net.output(net.mul(net.input("x", "float32", (2,)), 2.0), "y")
    net.itself = net
    del net
print("done")
"""


def test_collecting_an_old_network_inside_a_callback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == "done", done.stderr
