"""Run at the end of the sampler's image's build, as the image's user: what the service compiles at
run time compiles there, and computes what it should.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile

MODULE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject *seven(PyObject *self, PyObject *none) { return PyLong_FromLong(7); }
static PyMethodDef methods[] = {{"seven", seven, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "hone_check", NULL, -1, methods};
PyMODINIT_FUNC PyInit_hone_check(void) { return PyModule_Create(&module); }
"""

DRIVER = "libcuda.so.1"
ARCHITECTURE = "9.0a"
"""What FlashInfer is compiled for here, where no GPU says it: Hopper."""


def main() -> None:
    """Inductor's kernels for a CPU, Triton's launchers, and FlashInfer's sampler where torch has
    CUDA."""
    import torch
    import vllm  # noqa: F401
    from triton.runtime.build import compile_module_from_src

    compiled = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    assert torch.equal(compiled(torch.zeros(4)), torch.ones(4))
    assert compile_module_from_src(MODULE, "hone_check").seven() == 7
    if torch.version.cuda:
        flashinfer()


def flashinfer() -> None:
    """FlashInfer compiles its sampler, and links it up to the functions of NVIDIA's driver, which
    is the host's: a library without any stands in for it."""
    with tempfile.TemporaryDirectory() as folder:
        driver = f"{folder}/libcuda.so"
        empty = ["-shared", "-o", driver, f"-Wl,-soname,{DRIVER}", "-x", "c", "/dev/null"]
        subprocess.run(["gcc", *empty], check=True)
        os.environ |= {
            "FLASHINFER_WORKSPACE_BASE": folder,
            "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
            "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}",
        }
        from flashinfer.jit.sampling import (  # pyright: ignore[reportMissingImports]
            gen_sampling_module,
        )

        module = gen_sampling_module()
        module.build(verbose=True)
        ctypes.CDLL(driver)
        try:
            ctypes.CDLL(str(module.jit_library_path), mode=os.RTLD_NOW)
        except OSError as error:
            assert re.search(r"undefined symbol: cu[A-Z]", str(error)), error


if __name__ == "__main__":
    main()
