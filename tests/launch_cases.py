"""A GPU that is not there: Triton compiles for sm_90 as ever, and what would be launched is written down.

Run as a program it launches small kernels in many ways, each time by ``kernel[grid]`` and twice by ``launch``, and prints what
differed. A program of its own, because triton.jit gives no compilable function where TRITON_INTERPRET is set.
"""

import itertools
import json
import random
import tempfile

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from berrylm_kernels.launch import launch


class Driver:
    """The parts of a Triton driver that a launch needs. ``launched`` is what came through since it was last emptied."""

    def __init__(self):
        self.utils, self.handles, self.launched, self.device = self, itertools.count(1), [], 0

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 10 + device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name, binary, shared, device):
        return 1, next(self.handles), 32, 0, 1024  # module, function, registers, spills, most threads

    def unload_module(self, module):
        pass

    def launcher_cls(self, source, metadata):
        def start(x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *args):
            self.launched.append([x, y, z, stream, function, str(packed), *((id(a) if a is not None else None) for a in args)])

        return start


@triton.jit(do_not_specialize=["n", "eps"])
def rows_kernel(x, y, out, sx, n, sy, eps, scale, D: tl.constexpr, USE_Y: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * D + tl.arange(0, D)
    a = tl.load(x + o * sx, mask=o < n, other=0.0).to(tl.float32) * scale + eps
    if USE_Y:
        a += tl.load(y + o * sy, mask=o < n, other=0.0)
    tl.store(out + o, a, mask=o < n)


@triton.jit
def copied_kernel(source, out, stride, FACTOR: tl.constexpr):
    b = source.load([0, 0]) * FACTOR
    o = tl.arange(0, b.shape[0])
    tl.store(out + o[:, None] * stride + o[None, :], b.to(out.dtype.element_ty))


@gluon.jit
def placed_kernel(source, out, n, FACTOR: gl.constexpr):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    o = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, rows)), 0)
    gl.store(out + o * FACTOR, gl.sum(tile.load(rows), 0, keep_dims=True).to(out.dtype.element_ty), mask=o < n)


RARE = (1 << 31, -(1 << 31) - 1)  # integers that are not 32 bits wide


def calls():
    """(name, whether a second one is launched directly, arguments of ``launch``, options): a usual call, and others that differ
    from it in one thing each, so that none of the things can stand in for another."""
    x, half = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    usual = dict(x=x, y=x, out=x, sx=48, n=17, sy=48, eps=1e-6, scale=2.0, D=16, USE_Y=False, num_warps=1, grid=(2,))
    others = [
        *({name: x[1:]} for name in ("x", "y", "out")), *({name: half} for name in ("x", "y", "out")), {"y": None},
        *({name: value} for name in ("sx", "sy") for value in (1, True, 7, 32, 1 << 31)),
        *({"n": n} for n in (1, 16, 1 << 31, -(1 << 31), -(1 << 31) - 1)), {"eps": 1}, {"eps": 0.5}, {"scale": 2}, {"scale": 3.0},
        {"D": 32}, {"USE_Y": True}, {"num_warps": 2}, {"grid": (3, 2)},
    ]  # fmt: skip
    for other in ({}, *others):
        c = usual | other
        (value,) = other.values() or (None,)
        is_known = value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else value not in RARE
        tensors, numbers = (c["x"], c["y"], c["out"]), (c["sx"], c["n"], c["sy"], c["eps"], c["scale"])
        constants, options = dict(D=c["D"], USE_Y=c["USE_Y"]), dict(num_warps=c["num_warps"])
        yield repr(other), is_known, (rows_kernel, c["grid"], tensors, numbers, constants), options
    for dtype, B, stride in ((torch.float32, 16, 32), (torch.bfloat16, 16, 32), (torch.float32, 32, 32), (torch.float32, 16, 40)):
        tensors = (TensorDescriptor.from_tensor(torch.zeros(64, 64, dtype=dtype), [B, B]), x)
        yield f"descriptor {dtype} {B} {stride}", True, (copied_kernel, (2, 3), tensors, (stride,), dict(FACTOR=2)), {}
    for swizzle in (0, 32):
        layout = gl.NVMMASharedLayout(swizzle, 16, 2)
        tensors = (GluonDescriptor.from_tensor(torch.zeros(64, 64, dtype=torch.bfloat16), [16, 16], layout), x)
        yield f"descriptor swizzled by {swizzle}", True, (placed_kernel, (1,), tensors, (16,), dict(FACTOR=2)), dict(num_warps=1)


def main() -> None:
    driver, slow, problems, known = Driver(), [], [], 0
    triton.runtime.driver.set_active(driver)
    torch.cuda.current_device = driver.get_current_device
    usual = JITFunction.run
    JITFunction.run = lambda self, *args, **options: slow.append(self) or usual(self, *args, **options)

    def launched(start):
        driver.launched.clear()
        slow.clear()
        start()
        return list(driver.launched), bool(slow)

    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        every = list(calls()) * 2
        random.Random(0).shuffle(every)
        for turn, (name, is_known, (kernel, grid, tensors, numbers, constants), options) in itertools.product((0, 1), every):
            driver.device = turn

            def ours(call=(kernel, grid, tensors, numbers, constants), options=options):
                launch(*call, **options)

            first, _ = launched(ours)
            second, is_slow = launched(ours)
            want, _ = launched(lambda: kernel[grid](*tensors, *numbers, **constants, **options))  # noqa: B023
            if not first == second == want or len(want) != 1:
                problems.append(f"{name}, turn {turn}: {first} and {second}, not {want}")
            if is_slow == is_known:
                problems.append(f"{name}, turn {turn}: a known one takes the {'usual' if is_slow else 'direct'} way")
            known += not is_slow
        try:
            launch(rows_kernel, (1,), (torch.zeros(4),) * 3, (1, 1, 1, 0.0, 1.0), dict(USE_Y=True, D=16), num_warps=1)
        except ValueError as error:
            refused = str(error)
        else:
            refused = "nothing"
    print(json.dumps({"problems": problems, "calls": 2 * len(every), "direct": known, "refused": refused}))


if __name__ == "__main__":
    main()
