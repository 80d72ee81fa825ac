"""The environment of every pytest run, unit tests and notebooks alike: notebook kernels inherit it.

Triton reads TRITON_INTERPRET when it is imported, and torch reads OMP_NUM_THREADS, so both are set before anything
else is loaded.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
