"""Triton kernels of BerryLM. Each module ``X`` exports what ``berrylm_ref/ops/X.py`` exports, with the same signatures.

On a machine without a GPU, set TRITON_INTERPRET=1 before triton is imported: the same kernels then run on the CPU in fp32.
"""
