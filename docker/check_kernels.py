"""Run at the end of an image's build, as the image's user: what the service compiles at run time
compiles there, and computes what it should. `check_kernels.py rollout` or `trainer`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject *seven(PyObject *self, PyObject *none) { return PyLong_FromLong(7); }
static PyMethodDef methods[] = {{"seven", seven, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "hone_check", NULL, -1, methods};
PyMODINIT_FUNC PyInit_hone_check(void) { return PyModule_Create(&module); }
"""

KERNEL = "__global__ void twice(float *x) { x[threadIdx.x] *= 2.0f; }"


def trainer() -> None:
    """DeepSpeed's CPU Adam takes a step: its first is the learning rate long."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    DeepSpeedCPUAdam([parameter], lr=0.1).step()
    assert torch.allclose(parameter, torch.full((8,), 0.9)), parameter


def rollout() -> None:
    """Inductor's kernels for a CPU, Triton's launchers, and CUDA kernels where torch has CUDA."""
    import torch
    import vllm  # noqa: F401
    from triton.runtime.build import compile_module_from_src

    compiled = torch.compile(lambda x: torch.sin(x) * 2 + 1)
    assert torch.equal(compiled(torch.zeros(4)), torch.ones(4))
    assert compile_module_from_src(MODULE, "hone_check").seven() == 7
    if torch.version.cuda:
        nvcc = shutil.which("nvcc") or f"{os.environ['CUDA_HOME']}/bin/nvcc"
        with tempfile.TemporaryDirectory() as folder:
            source, binary = Path(folder, "twice.cu"), Path(folder, "twice.cubin")
            source.write_text(KERNEL)
            subprocess.run(
                [nvcc, "-arch=sm_80", "-cubin", "-o", str(binary), str(source)], check=True
            )
            assert binary.stat().st_size > 0


if __name__ == "__main__":
    {"rollout": rollout, "trainer": trainer}[sys.argv[1]]()
