"""Linear maps of the same input as one product: their weights are rows of one matrix, and each keeps its name.

A decode step reads every weight once, and many small products in a row cost a launch each. A checkpoint knows nothing of this:
every map stays a parameter of its own, a view of its rows.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Merged(nn.Module):
    """A module that applies its children ``merged`` to one input. No weight exists twice.

    Whatever gives a parameter new memory parts it from the others: a cast, a move, a copy of the module, assigned weights.
    After ``_apply`` (casts and moves; memory of a new model is laid out before it is filled) they are joined at once,
    otherwise when they are used next.
    """

    merged: tuple[str, ...]

    def __init__(self):
        super().__init__()
        self._joined: dict[str, tuple[list[int], Tensor]] = {}  # by kind: where the parts lie, and all of them

    def __getstate__(self):
        return {**self.__dict__, "_joined": {}}  # a copy would hold a second matrix, found by where the original's parts lie

    def _apply(self, fn, recurse=True):
        self._joined.clear()  # or the old memory would stay until the new is joined
        super()._apply(fn, recurse)
        for kind in ("weight", "bias"):
            self.join(kind)
        return self

    def join(self, kind: str = "weight") -> Tensor | None:
        """The children's weights [rows of all, in] or biases [rows of all] in one piece, made so where they are not."""
        parts = [self._modules[name]._parameters[kind] for name in self.merged]  # not by attribute: this runs in every layer
        if parts[0] is None:
            return None
        known = self._joined.get(kind)
        if known is not None and known[0] == [p.data_ptr() for p in parts]:  # it holds that memory, so no other lies there
            return known[1]
        first, rows = parts[0].data, [p.shape[0] for p in parts]
        if not _in_one_piece(parts):
            if len({(p.dtype, p.device) for p in parts}) > 1:
                got = ", ".join(f"{name} {p.dtype} on {p.device}" for name, p in zip(self.merged, parts, strict=True))
                raise ValueError(f"{type(self).__name__}: {kind}s: expected one dtype and device for all, got {got}")
            # outside inference mode: may be needed for training later. A model that was made inside it stays there.
            with torch.inference_mode(parts[0].is_inference()), torch.no_grad():
                whole = torch.cat([p.data for p in parts])
                for p, part in zip(parts, whole.split(rows), strict=True):
                    p.data = part
        else:
            whole = first.as_strided((sum(rows), *first.shape[1:]), first.stride())
        if whole.device.type != "meta":  # where all addresses are 0
            self._joined[kind] = [p.data_ptr() for p in parts], whole
        return whole

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [.., in] -> each child's output, in order: columns of one matrix, so rows of each lie apart."""
        weight, bias = self.join("weight"), self.join("bias")
        children = [self._modules[name] for name in self.merged]
        if torch.is_grad_enabled() and any(p.requires_grad for child in children for p in child.parameters()):
            weight = torch.cat([child.weight for child in children])  # what ``join`` returns has no history
            bias = None if bias is None else torch.cat([child.bias for child in children])
        return linear(x, weight, bias).split_with_sizes([child.out_features for child in children], -1)


def _in_one_piece(parts: list[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one allocation. (On the meta device nothing lies anywhere.)"""
    begin, storage = parts[0].data_ptr(), parts[0].untyped_storage()
    end = begin
    for p in parts:
        if p.data_ptr() != end or not p.is_contiguous():
            return False
        end += p.nbytes
    return begin != 0 and end <= storage.data_ptr() + storage.nbytes()
