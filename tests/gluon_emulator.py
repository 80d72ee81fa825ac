"""Runs the project's Gluon kernels on a CPU, with torch, one program after the other. Gluon itself has no interpreter.

Layouts are ignored; numbers are rounded where the kernel rounds them. What the emulator is strict about is what a GPU
would answer with rare wrong numbers: reading or writing outside a tensor, a matrix product's result read before its wait, an
operand overwritten while a product may still read it, an operand or copied tile not yet visible to its reader, roles that wait
for each other. Shared memory that nobody wrote reads as NaN.

    emulator = Emulator("berrylm_kernels.hopper_tiles", "berrylm_kernels.kda_front_hopper")
    emulator.run("kda_front_hopper_kernel", grid, *args, **constants)
"""

import ctypes
import importlib
import math
import threading
import types

import torch
from torch import Tensor
from triton.language import constexpr

INT32, INT64, FP32, FP16, BF16 = torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16


def raw(x):
    return x.t if isinstance(x, Value) else x


class Value:
    """A tensor or scalar of the kernel."""

    def __init__(self, t):
        self.t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=INT32 if isinstance(t, int) else FP32)

    type = property(lambda self: types.SimpleNamespace(layout=None))
    shape = property(lambda self: list(self.t.shape))
    dtype = property(lambda self: self.t.dtype)

    def to(self, dtype, bitcast=False):
        return Value(self.t.view(dtype) if bitcast else self.t.to(dtype))

    def __bool__(self):
        return bool(self.t)

    def __index__(self):
        return int(self.t)

    def __neg__(self):
        return Value(-self.t)

    def __floordiv__(self, other):
        return Value(torch.div(self.t, raw(other), rounding_mode="trunc"))

    def __mod__(self, other):
        return Value(torch.fmod(self.t, raw(other)))


def _operator(name):
    def apply(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(getattr(self.t, name)(raw(other)))

    return apply


for _name in ("add sub mul truediv radd rsub rmul rtruediv rshift lshift and or xor lt le gt ge eq ne").split():
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
Value.__rand__, Value.__ror__ = Value.__and__, Value.__or__


class Pointer:
    """Element offsets into a flat tensor: ``flat`` reaches exactly as far as the argument's storage may be touched."""

    def __init__(self, flat: Tensor, offset=0):
        self.flat, self.offset = flat, torch.as_tensor(offset, dtype=INT64)

    def __add__(self, other):
        return Pointer(self.flat, self.offset + raw(other))

    __radd__ = __add__

    def select(self, mask):
        offset, mask = torch.broadcast_tensors(self.offset, torch.as_tensor(True if mask is None else raw(mask)))
        inside = (offset >= 0) & (offset < self.flat.numel())
        if bool((mask & ~inside).any()):
            raise IndexError(f"offsets {offset[mask].min()} .. {offset[mask].max()} outside {self.flat.numel()} elements")
        return offset, mask


class Pending:
    """A matrix product that was not waited for: it can be accumulated into, not read."""

    def __init__(self, t, operands):
        self.t, self.operands = t, operands


class Shared:
    """Shared memory. ``unseen`` counts what is missing between a write and a product's read: a fence, then a barrier."""

    def __init__(self, emulator, t, cells):
        self.emulator, self.t, self.cells = emulator, t, cells

    layout = None

    def index(self, i):
        i = int(i)
        assert 0 <= i < self.t.shape[0]
        return Shared(self.emulator, self.t[i], [self.cells[i]] if len(self.cells) > 1 else self.cells)

    def slice(self, start, length, dim=0):
        return Shared(self.emulator, self.t.narrow(dim, start, length), self.cells)

    def permute(self, order):
        return Shared(self.emulator, self.t.permute(*order), self.cells)

    def load(self, layout):
        for cell in self.cells:
            cell.check_arrived()
        return Value(self.t.clone())

    def store(self, value):
        for cell in self.cells:
            cell.check_free("stored to")
            cell.fenced, cell.visible = False, False
        assert value.t.shape == self.t.shape and value.t.dtype == self.t.dtype, (value.t.shape, value.t.dtype, self.t.dtype)
        self.t.copy_(value.t)


class Cell:
    """What is known about one stage of a shared allocation."""

    def __init__(self):
        self.fenced = self.visible = True
        self.readers = 0  # products in flight
        self.settled = True  # a barrier since the last product that read it was waited for
        self.arriving = None  # the barrier a copy into it will complete on

    def check_arrived(self):
        assert self.arriving is None, "read of a tile whose copy was not waited for"

    def check_free(self, how):
        self.check_arrived()
        assert self.readers == 0, f"{how} while a matrix product may read it"
        assert self.settled, f"{how} while another warp's matrix product may read it: no barrier since the wait"


class Emulator:
    def __init__(self, *modules: str):
        self.cells: list[Cell] = []
        self.groups: list[Pending] = []
        self.space: dict = {}
        loaded = [importlib.import_module(name) for name in modules]
        for module in loaded:
            self.space.update({name: self.translate(name, x) for name, x in vars(module).items()})
        self.space["gl"] = Language(self)
        self.space["range"] = lambda *a: (Value(i) for i in range(*(int(x) for x in a)))

    def translate(self, name, x):
        if hasattr(type(self), f"do_{name}"):
            return getattr(self, f"do_{name}")
        if hasattr(x, "fn") and hasattr(x, "arg_names"):  # a jit function
            return types.FunctionType(x.fn.__code__, self.space, name, x.fn.__defaults__)
        if isinstance(x, constexpr):
            return x.value
        if name == "mbarrier":
            return MBarriers(self)
        return x

    def run(self, kernel: str, grid: int, *args, **constants) -> None:
        """Each Tensor argument is a pointer to its first element; a (Tensor, rows, width) triple is a copy descriptor."""
        for program in range(grid):
            self.program, self.cells, self.groups, self.roles = program, [], [], Roles()
            self.space[kernel](*map(self.argument, args), **constants)
            assert not self.groups, "the kernel ends with a matrix product that was never waited for"

    def launcher(self, kernel: str):
        """What stands in for the jit function: launcher[grid](*args, **constants)."""

        def on(grid):
            def launch(*args, num_warps, **constants):
                args = [(at_address(x.base, x.shape), *x.shape) if hasattr(x, "block_shape") else x for x in args]
                self.run(kernel, grid[0], *args, **constants)

            return launch

        return Launcher(on)

    @staticmethod
    def argument(x):
        if isinstance(x, Tensor):
            return Pointer(torch.as_strided(x, (_reach(x),), (1,)))
        return Value(x) if isinstance(x, (int, float)) else x

    # what the kernels import by name
    def do_exp2(self, x):
        y = torch.exp2(x.t)
        return Value(torch.where(y < 2.0**-126, 0.0, y))

    def do_scaled(self, x, f):
        return Value(x.t * f.t.to(BF16))

    def do_barrier(self):
        for cell in self.cells:
            cell.visible, cell.settled = cell.visible or cell.fenced, cell.readers == 0

    def do_fence_async_shared(self):
        for cell in self.cells:
            cell.fenced = True

    def do_mma_v2(self, a, b, acc):
        return Value(a.t.to(FP32) @ b.t.to(FP32) + acc.t)

    def do_warpgroup_mma_init(self, x):
        return Pending(x.t, [])

    def do_warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        operands = [x for x in (a, b) if isinstance(x, Shared)]
        for cell in (cell for x in operands for cell in x.cells):
            cell.check_arrived()
            assert cell.visible, "a product reads shared memory without fence and barrier since the store"
            cell.readers, cell.settled = cell.readers + 1, False
        assert not b.t.isnan().any(), "a product reads shared memory that nobody wrote"
        product = a.t.to(FP32) @ b.t.to(FP32)
        self.groups.append(Pending(product + acc.t if bool(raw(use_acc)) else product, operands))
        return self.groups[-1]

    def do_warpgroup_mma_wait(self, pending=0, deps=()):
        while len(self.groups) > pending:
            done = self.groups.pop(0)
            for cell in (cell for x in done.operands for cell in x.cells):
                cell.readers -= 1
        assert not any(x is y for x in deps for y in self.groups), "a result taken before its product is done"
        out = [Value(x.t) for x in deps]
        return out[0] if len(out) == 1 else out

    def do_tma_load(self, descriptor, at, bar, out, wanted=True):
        if not bool(raw(wanted)):
            return
        t, rows, width = descriptor
        row, column = (int(x) for x in at)
        assert 0 <= row and row + out.t.shape[0] <= rows and column == 0 and out.t.shape[1] == width
        for cell in out.cells:
            cell.check_free("copied to")
            cell.arriving = bar
        out.t.copy_(t.as_strided((rows, width), (width, 1))[row : row + out.t.shape[0]])
        bar.cells += out.cells
        bar.add_bytes(-out.t.numel() * out.t.element_size())


class Launcher:
    def __init__(self, on):
        self.on = on

    def __getitem__(self, grid):
        return self.on(grid)


class Roles:
    """Programs that specialise their warps: one role runs at a time, until it waits for a barrier that is not there yet."""

    def __init__(self):
        self.turn = threading.Condition()
        self.active, self.waits, self.error = 1, [], None

    def run(self, roles):
        self.active = len(roles)
        threads = [threading.Thread(target=self.role, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.active = 1
        if self.error:
            raise self.error

    def role(self, fn, args):
        with self.turn:
            try:
                fn(*args)
            except BaseException as error:  # shown by run, in the thread that can fail the test
                self.error = self.error or error
            self.active -= 1
            self.turn.notify_all()

    def wait_until(self, ready):
        """Give the turn away until ready()."""
        self.waits.append(ready)
        while not ready() and not self.error:
            if len(self.waits) >= self.active and not any(other() for other in self.waits):
                self.error = AssertionError("every role waits for another")
            self.turn.notify_all()
            if not self.error:
                self.turn.wait()
        self.waits.remove(ready)
        if self.error:
            raise self.error


class Bar:
    """A barrier in shared memory: a phase ends with its last arrival and its last byte."""

    def __init__(self):
        self.count, self.phase, self.missing, self.bytes, self.cells = None, 0, None, 0, []

    def add_bytes(self, n):
        self.bytes += n
        self.turn_over()

    def arrive(self):
        assert self.missing > 0, "more arrivals than the barrier counts"
        self.missing -= 1
        self.turn_over()

    def turn_over(self):
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class MBarriers:
    def __init__(self, emulator):
        self.emulator = emulator

    def MBarrierLayout(self):
        return "mbarrier"

    def init(self, bar, count):
        bar.count = bar.missing = count

    def expect(self, bar, count, pred=True):
        if bool(raw(pred)):
            bar.bytes += count
            bar.arrive()

    def arrive(self, bar, count=1, pred=True):
        if bool(raw(pred)):
            assert count == 1
            bar.arrive()

    def wait(self, bar, phase, pred=True):
        """Returns once the current phase is no longer ``phase``."""
        if not bool(raw(pred)):
            return
        phase = int(raw(phase)) & 1
        if bar.phase & 1 == phase:
            assert self.emulator.roles.active > 1, "this wait would never end"
            self.emulator.roles.wait_until(lambda: bar.phase & 1 != phase)
        for cell in bar.cells:
            cell.arriving, cell.visible = None, True
        bar.cells.clear()


class BarArray(list):
    def index(self, i):
        return self[int(i)]


class Language:
    """The part of ``gl`` that the kernels use."""

    int32, int64, float32, float16, bfloat16 = INT32, INT64, FP32, FP16, BF16
    constexpr = staticmethod(lambda x: x)
    static_range = staticmethod(range)

    def __init__(self, emulator):
        self.emulator = emulator

    def __getattr__(self, name):
        if name in ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout"):
            return lambda *a, **k: None
        raise AttributeError(name)

    def warp_specialize(self, functions_and_args, worker_num_warps, worker_num_regs):
        self.emulator.roles.run(functions_and_args)

    def program_id(self, axis):
        return Value(self.emulator.program)

    def arange(self, start, end, layout=None):
        return Value(torch.arange(start, end, dtype=INT32))

    def zeros(self, shape, dtype, layout=None):
        return Value(torch.zeros(shape, dtype=dtype))

    def full(self, shape, value, dtype, layout=None):
        return Value(torch.full(shape, value, dtype=dtype))

    def load(self, pointer, mask=None, other=0):
        offset, mask = pointer.select(mask)
        values = pointer.flat[torch.where(mask, offset, 0)]
        return Value(torch.where(mask, values, torch.as_tensor(other, dtype=values.dtype)))

    def store(self, pointer, value, mask=None):
        offset, mask = pointer.select(mask)
        assert value.t.dtype == pointer.flat.dtype
        value = torch.broadcast_to(value.t, offset.shape)
        pointer.flat[offset[mask]] = value[mask]

    def where(self, condition, a, b):
        a, b = (x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=FP32 if isinstance(x, float) else INT32)
                for x in (raw(a), raw(b)))  # fmt: skip
        return Value(torch.where(condition.t, a, b))

    def expand_dims(self, x, axis):
        return Value(x.t.unsqueeze(axis))

    def reshape(self, x, shape):
        return Value(x.t.reshape(shape))

    def permute(self, x, order):
        return Value(x.t.permute(order))

    def convert_layout(self, x, layout, assert_trivial=False):
        assert isinstance(x, Value), "layout change of a product that was not waited for"
        return x

    def associative_scan(self, x, axis, combine):
        columns = list(x.t.unbind(axis))
        for i in range(1, len(columns)):
            columns[i] = combine(Value(columns[i - 1]), Value(columns[i])).t
        return Value(torch.stack(columns, axis))

    def reduce(self, x, axis, combine):
        columns = [Value(c) for c in x.t.unbind(axis)]
        out = columns[0]
        for column in columns[1:]:
            out = combine(out, column)
        return out

    def sum(self, x, axis):
        return Value(x.t.sum(axis, dtype=x.t.dtype))

    def maximum(self, a, b):
        return Value(torch.maximum(*torch.broadcast_tensors(torch.as_tensor(raw(a)), torch.as_tensor(raw(b)))))

    def minimum(self, a, b):
        return Value(torch.minimum(*torch.broadcast_tensors(torch.as_tensor(raw(a)), torch.as_tensor(raw(b)))))

    def abs(self, x):
        return Value(x.t.abs())

    def rsqrt(self, x):
        return Value(x.t.rsqrt())

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout == "mbarrier":
            return BarArray(Bar() for _ in range(shape[0]))
        stages = [Cell() for _ in range(shape[0] if len(shape) > 2 or shape[0] < 8 else 1)]
        self.emulator.cells += stages
        return Shared(self.emulator, torch.full(shape, float("nan"), dtype=dtype), stages)


def at_address(base, shape) -> Tensor:
    """The memory a copy descriptor points at."""
    size = math.prod(shape)
    buffer = (ctypes.c_char * (size * base.dtype.itemsize)).from_address(base.data_ptr())
    return torch.frombuffer(buffer, dtype=base.dtype, count=size)


def _reach(x: Tensor) -> int:
    return 0 if not x.numel() else 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
