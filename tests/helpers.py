"""The error measure of the project, and the assertion that reports it."""

import torch


def rel_l2(x, ref):
    """|x - ref| / |ref| in fp64. For an all-zero ref: 0 if x is zero too, else infinity."""
    x = torch.as_tensor(x).detach().to("cpu", torch.float64)
    ref = torch.as_tensor(ref).detach().to("cpu", torch.float64)
    assert x.shape == ref.shape, f"rel_l2: shape {tuple(x.shape)} against the reference's {tuple(ref.shape)}"
    error, size = torch.linalg.vector_norm(x - ref).item(), torch.linalg.vector_norm(ref).item()
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


def assert_close(name, x, ref, budget):
    """Assert rel_l2(x, ref) <= budget. Prints error and budget on success as well, so that slack can be seen.

    A NaN or an infinity on either side fails: an infinite reference would make any error look small.
    """
    ref = torch.as_tensor(ref)
    assert torch.isfinite(ref).all(), f"{name}: the reference is not finite"
    error = rel_l2(x, ref)
    ratio = f", {error / budget:.2f} of it" if budget else ""
    line = f"{name}: rel-L2 {error:.3e}, budget {budget:.3e}{ratio}"
    print(line)
    assert error <= budget, line
