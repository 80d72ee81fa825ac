"""Launching a kernel that was launched like this before, for less host time.

``kernel[grid](...)`` works out at every call which compiled form its arguments need: it binds them by name, describes each
one, writes the options out as text and compares the globals that the kernel uses. ``launch`` keeps the forms under a key of
its own, which tells apart whatever Triton tells apart, and starts a known one directly (``CompiledKernel.__getitem__``).
Rare arguments (see ``ALIGNED``, ``INT32``) have no key and always go the usual way: the same answer, only later.
"""

from operator import itemgetter

import torch
from torch import Tensor

from .arguments import INTERPRETED

ALIGNED = 16  # bytes. Triton compiles a form of its own for a pointer that is no multiple,
INT32 = 1 << 31  # and for an integer from here on, or below minus this


class _Forms:
    """The compiled forms of one kernel that takes so many tensors, by key."""

    def __init__(self, kernel, tensors: int):
        self.kernel = kernel  # kept, as ``launch`` finds these by its id
        self.compiled = {}
        self.constants = [p.name for p in kernel.params if p.is_constexpr]
        places = [p.num - tensors for p in kernel.params[tensors:] if not p.is_constexpr and not p.do_not_specialize]
        self.specialised = itemgetter(*places) if places else len  # of the numbers, what goes into the compiled code


_kernels: dict[tuple[int, int], _Forms] = {}


def launch(kernel, grid: tuple[int, ...], tensors: tuple, numbers: tuple, constants: dict, **options) -> None:
    """``kernel[grid](*tensors, *numbers, **constants, **options)``, on the current device.

    ``tensors`` are the kernel's first parameters: Tensor, None or a tensor descriptor. ``numbers`` are those after them, int or
    float, at least one. ``constants`` are its constexprs, in the order of its signature. Triton's knobs count where a form is
    launched for the first time.

    Raises:
        ValueError: constants that are not the kernel's, or in another order.
    """
    if INTERPRETED:
        kernel[grid](*tensors, *numbers, **constants, **options)
        return
    forms = _kernels.get((id(kernel), len(tensors)))
    if forms is None:
        forms = _kernels[id(kernel), len(tensors)] = _Forms(kernel, len(tensors))
    values, addresses = tuple(constants.values()), 0
    key = [torch.cuda.current_device(), forms.specialised(numbers), values, *map(type, numbers), *options.items()]
    for x in tensors:
        if x is None:
            key.append(None)
        elif isinstance(x, Tensor):
            addresses |= x.data_ptr()
            key.append(x.dtype)
        else:  # its base is aligned, or it could not have been made; shape and strides are arguments of the compiled code
            key += x.base.dtype, getattr(x, "layout", None), *x.block_shape
    key = tuple(key)
    has_key = addresses % ALIGNED == 0 and -INT32 <= min(numbers) and max(numbers) < INT32
    compiled = forms.compiled.get(key) if has_key else None
    if compiled is not None:
        compiled[(*grid, 1, 1)](*tensors, *numbers, *values)
        return
    if list(constants) != forms.constants:
        raise ValueError(f"launch: constants: expected {forms.constants} in this order, got {list(constants)}")
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    if has_key:
        forms.compiled[key] = compiled
