"""The ops that change their arguments: the decode step its slots of two pools, qk_norm_rope the pages that it appends to."""

from torch import Tensor

from ..shadow import POOLS, SLOTS, own_slots

STEP, APPENDS = "kda_decode_step", "qk_norm_rope"
APPEND = 8  # argument of qk_norm_rope: None, or (v, k_pages, v_pages, rows of the flattened pages)


def isolated(op: str, args: tuple) -> tuple:
    """``args`` with copies in place of what the op will change; of the pools only the slots in use."""
    if op == STEP:
        copies, rows = own_slots(args)
        return (*args[: POOLS.start], *copies, rows, *args[SLOTS + 1 :])
    if appends(op, args):
        v, k_pages, v_pages, rows = args[APPEND]
        return (*args[:APPEND], (v, k_pages.clone(), v_pages.clone(), rows), *args[APPEND + 1 :])
    return args


def places(op: str, args: tuple) -> list[Tensor]:
    """Copies of what the op has written into ``args``."""
    if op == STEP:
        return [pool[args[SLOTS].long()] for pool in args[POOLS]]
    if appends(op, args):
        _, *pages, rows = args[APPEND]
        return [x.flatten(0, 1)[rows.long()] for x in pages]
    return []


def write(op: str, args: tuple, values: list[Tensor]) -> None:
    """Put ``values`` where the op would have written."""
    if op == STEP:
        for pool, value in zip(args[POOLS], values, strict=True):
            pool[args[SLOTS].long()] = value
    elif appends(op, args):
        _, *pages, rows = args[APPEND]
        for x, value in zip(pages, values, strict=True):
            x.flatten(0, 1)[rows.long()] = value


def appends(op: str, args: tuple) -> bool:
    return op == APPENDS and len(args) > APPEND and args[APPEND] is not None
