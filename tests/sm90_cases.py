"""Kernels to compile for sm_90 without a GPU, and what each may use. Run as a program it compiles them and prints JSON.

A program of its own, because triton.jit gives no compilable function where TRITON_INTERPRET is set, as it is in CPU tests.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from berrylm_kernels import (
    attention,
    attention_decode,
    attnres,
    conv,
    moe_few,
    moe_gemm,
    moe_persistent,
    moe_router,
    moe_tiles,
    norm,
    qk_rope,
)
from berrylm_kernels.hopper_tiles import TILE
from berrylm_kernels.kda_decode import _prepare_kernel, _update_kernel
from berrylm_kernels.kda_front import FORMS, kda_front_kernel
from berrylm_kernels.kda_front_hopper import kda_front_hopper_kernel
from berrylm_kernels.kda_state import kda_state_kernel
from berrylm_kernels.kda_state_hopper import DECAY, kda_state_hopper_kernel

SHARED = 227 * 1024  # bytes a block can have on sm_90
TWO_BLOCKS = (228 // 2 - 1) * 1024  # the same where a multiprocessor holds two blocks
POINTERS = {"fp32": "*fp32", "bf16": "*bf16"}


@dataclass
class Case:
    """One kernel at one set of constants. An argument that is neither in types nor in constants is passed as None."""

    fn: object
    types: dict[str, str]  # of run-time arguments; pointers are taken to be 16-byte aligned
    constants: dict[str, object]
    num_warps: int = 4
    num_stages: int = 1
    aligned: tuple[str, ...] = ()  # integers known to be multiples of 16, such as strides
    stack: int = 0  # bytes of spilled registers allowed
    shared: int = SHARED
    registers: int = 255
    options: dict = field(default_factory=dict)
    waits: int | None = None  # for a warpgroup's products allowed; the compiler adds one to each if it cannot overlap them


def kda_front(element="bf16", K=128, V=128, BK=128, BV=64, raw=False, packed=False, form="dyadic", l2norm=True, **limits):
    padded = triton.next_power_of_2
    types = dict.fromkeys(("q", "k", "v", "beta", "W", "U", "QG", "KG", "AQ"), POINTERS[element])
    types |= dict.fromkeys(("g", "DD", "TOT"), "*fp32") | dict.fromkeys(("T", "N"), "i32")
    types |= dict.fromkeys(("sq", "sk", "sv", "sg", "sb"), "i32") | dict.fromkeys(("scale", "lower_bound"), "fp32")
    types |= dict.fromkeys(("A_log", "dt_bias"), "*fp32") if raw else {}
    types |= {"cu": "*i32"} if packed else {}
    constants = dict(
        H=16, HV=32, K=K, V=V, BK=BK, PK=padded(K), BV=BV, PV=padded(V), BN=16, FORM=FORMS[form], L2NORM=l2norm,
        RAW=raw, BOUND=raw, LOGIT=raw, PACKED=packed,
    )  # fmt: skip
    return Case(kda_front_kernel, types, constants, num_warps=8, aligned=("sq", "sk", "sv", "sg", "sb"), **limits)


def kda_state(element="bf16", K=128, V=128, BV=64, STAGES=3, num_warps=4, packed=False, kept=False, **limits):
    padded = triton.next_power_of_2
    types = dict.fromkeys(("W", "U", "QG", "KG", "AQ", "o"), POINTERS[element])
    types |= dict.fromkeys(("DD", "initial", "final"), "*fp32") | dict.fromkeys(("T", "N", "M", "chunks"), "i32")
    types |= {"cu": "*i32"} if packed else {}
    types |= {"boundaries": "*i32", "kept": "*fp32"} if kept else {}
    constants = dict(
        HV=32, K=K, V=V, BK=padded(K), PV=padded(V), BV=BV, BN=16, BM=16, INITIAL=True, FINAL=True, KEPT=kept,
        PACKED=packed, STAGES=STAGES,
    )  # fmt: skip
    return Case(kda_state_kernel, types, constants, num_warps=num_warps, **limits)


def hopper_front(raw=False, packed=False, l2norm=True, **limits):
    types = dict.fromkeys(("q", "k", "v", "beta", "W", "U", "QG", "KG", "AQ"), "*bf16") | dict.fromkeys(("g", "DD"), "*fp32")
    types |= dict.fromkeys(("T", "N", "sq", "sk", "sv", "sg", "sb"), "i32") | dict.fromkeys(("scale", "lower_bound"), "fp32")
    types |= dict.fromkeys(("A_log", "dt_bias"), "*fp32") if raw else {}
    types |= {"cu": "*i32"} if packed else {}
    constants = dict(H=16, HV=32, BN=128, L2NORM=l2norm, RAW=raw, BOUND=raw, LOGIT=raw, PACKED=packed)
    aligned = ("sq", "sk", "sv", "sg", "sb")
    return Case(kda_front_hopper_kernel, types, constants, aligned=aligned, shared=TWO_BLOCKS, waits=36, **limits)


def hopper_state(packed=False, kept=False, **limits):
    blocks = {"d_k": ("bf16[64,128]", TILE), "d_v": ("bf16[64,64]", TILE), "d_d": ("fp32[1,128]", DECAY)}
    types = {name: f"tensordesc<{block},{layout.value!r}>" for name, (block, layout) in blocks.items()} | {"o": "*bf16"}
    types |= dict.fromkeys(("initial", "final"), "*fp32") | dict.fromkeys(("T", "N", "M", "chunks"), "i32")
    types |= {"cu": "*i32"} if packed else {}
    types |= {"boundaries": "*i32", "kept": "*fp32"} if kept else {}
    constants = dict(HV=32, BN=128, BM=128, INITIAL=True, FINAL=True, KEPT=kept, PACKED=packed)
    return Case(kda_state_hopper_kernel, types, constants, waits=4, **limits)


def by_name(fn, element="bf16", num_warps=4, **constants_and_limits):
    """The types of a kernel whose arguments are what their names say; constants are those of the model's sizes."""
    limits = {name: constants_and_limits.pop(name) for name in ("num_stages", "shared", "registers", "options", "stack")
              if name in constants_and_limits}  # fmt: skip
    named = dict.fromkeys(("eps", "norm_eps", "scale"), "fp32") | dict.fromkeys(("P", "N", "R", "S", "rows", "blocks"), "i32")
    named |= dict.fromkeys(("cu_seqlens", "context_lens", "places"), "*i64")
    named |= {"page_table": "*i32", "parts": "*fp32", "lses": "*fp32", "begins": "*i32", "first": "i32"}
    if "PDL" in fn.arg_names:
        constants_and_limits.setdefault("PDL", True)  # as in a decode step
    names = [name for name in fn.arg_names if name not in constants_and_limits]
    strides = tuple(name for name in names if name.startswith("stride_"))
    types = {name: "i32" if name in strides else named.get(name, POINTERS[element]) for name in names}
    return Case(fn, types, constants_and_limits, num_warps, aligned=strides, **limits)


def decode(element="bf16", **limits):
    BS, warps, stages = attention_decode.STEP[{"bf16": torch.bfloat16, "fp32": torch.float32}[element]]
    constants = dict(PAGE=16, HK=2, G=8, D=256, BG=16, BS=BS, BD=256, MIN_SHARE=attention_decode.MIN_SHARE)
    return by_name(attention_decode._decode_kernel, element, warps, num_stages=stages, **constants, **limits)


def kda_step(fn, element="bf16", num_warps=4, **constants_and_limits):
    """A kernel of the KDA decode step at the model's sizes, as it is launched up to 64 rows."""
    sizes = dict(H=16, HV=32, K=128, V=128, W=4, BK=128, BV=64, NV=2, BW=4, PDL=True)
    constants = {name: value for name, value in sizes.items() if name in fn.arg_names} | constants_and_limits
    case = by_name(fn, element, num_warps, **constants)
    wide = dict.fromkeys(("A_log", "dt_bias", "state_pool", "ready"), "*fp32") | {"slots": "*i64", "n_slots": "i32"}
    case.types |= {name: kind for name, kind in wide.items() if name in case.types}
    case.types.pop("lower_bound", None)
    return case


def moe(fn, tile=None, **constants_and_limits):
    """A kernel of the mixture of experts at the model's sizes."""
    BM, BN, BK, warps, stages, halves, programs = tile or (None, None, None, 4, 1, False, 0)
    sizes = dict(E=128, D=2048, F=512, BM=BM, BN=BN, BK=BK, TOP_K=8, BE=128, PROGRAMS=132 * programs, IS_ALIGNED=True)
    sizes |= {"USE_HALVES": halves}
    constants = {name: value for name, value in sizes.items() if name in fn.arg_names} | constants_and_limits
    case = by_name(fn, num_warps=constants.pop("warps", warps), num_stages=stages, **constants)
    integers = ("order", "rows", "block_list", "counts", "ranks", "experts")
    special = dict.fromkeys(integers, "*i32") | dict.fromkeys(("pairs", "depth", "shared_blocks"), "i32") | {"weights": "*fp32"}
    special |= {"d_hidden": f"tensordesc<bf16[{BM},{BK}]>"}
    special |= dict.fromkeys(("d_down", "d_shared"), f"tensordesc<bf16[{BN},{BK}]>")
    case.types |= {name: kind for name, kind in special.items() if name in case.types}
    return case


def moe_products():
    cases = {}
    for _, first, second in moe_tiles.TILES:
        cases[f"moe gate_up, {first.BM} rows"] = moe(moe_gemm._gate_up_kernel, first)
        if second.per_multiprocessor:  # as many at once as are launched
            limits = dict(shared=SHARED // second.per_multiprocessor, registers=240)
            cases[f"moe down, {second.BM} rows"] = moe(moe_persistent._down_persistent_kernel, second, **limits)
        else:
            cases[f"moe down, {second.BM} rows"] = moe(moe_gemm._down_kernel, second)
    return cases


UNFUSED = {"enable_fp_fusion": False}
MIXER = dict(IS_GATED=True, USE_NORM=True, options=UNFUSED)
ADD = dict(USE_ADD=True, USE_WEIGHT=True, IS_MEAN=True)
ROPE = dict(HQ=16, HK=2, D=256, R=64, BR=8, BD=256, BH=32, APPEND=True)
MERGE = dict(BS=64, MIN_SHARE=attention_decode.MIN_SHARE, BM=attention_decode.BM, BMD=attention_decode.BMD, USE_GATE=True)
CONV = dict(C=8192, W=4, BT=conv.BT, BA=conv.BA, BC=conv.BC, STEPS=4, BN=64)

CASES = {
    "kda front": kda_front(shared=48 * 1024),
    "kda front, packed, gate fused": kda_front(packed=True, raw=True, shared=48 * 1024),
    "kda front, keys as they come": kda_front(l2norm=False, shared=48 * 1024),
    "kda front, K = V = 256": kda_front(K=256, V=256, BK=64),
    "kda front, K = V = 64": kda_front(K=64, V=64, BK=64),
    "kda front, difference": kda_front(form="difference", BK=64),
    "kda front, clamped": kda_front(form="clamped", BK=64),
    "kda front, fp32": kda_front("fp32", BK=16, BV=16, stack=192),
    "kda state": kda_state(shared=192 * 1024),
    "kda state, packed, boundaries": kda_state(packed=True, kept=True, shared=192 * 1024, stack=8),  # outside the loops
    "kda state, K = V = 256": kda_state(K=256, V=256, BV=16, STAGES=2),
    "kda state, fp32": kda_state("fp32", BV=16, STAGES=1, num_warps=8),
    "hopper front": hopper_front(stack=16),
    "hopper front, packed, gate fused": hopper_front(raw=True, packed=True, stack=32),
    "hopper front, keys as they come": hopper_front(l2norm=False, stack=16),
    "hopper state": hopper_state(),
    "hopper state, packed, boundaries": hopper_state(packed=True, kept=True),
    "kda decode, prepare": kda_step(_prepare_kernel, num_warps=8, BG=8, registers=64),
    "kda decode, update": kda_step(_update_kernel),
    "kda decode, update, fp32": kda_step(_update_kernel, "fp32"),
    "kda decode, update, K = V = 256": kda_step(_update_kernel, num_warps=8, K=256, V=256, BK=256, BV=32, NV=8),
    "attn_res, D = 2048": by_name(attnres._attn_res_kernel, D=2048, BD=2048, **MIXER, registers=88),
    "attn_res, D = 8192": by_name(attnres._attn_res_kernel, num_warps=16, D=8192, BD=8192, **MIXER, registers=128),
    "attention, gather": by_name(attention._gather_kernel, SIZE=16, W=512, BT=4, BW=512, registers=48),
    "add_rms_norm": by_name(norm._rms_norm_kernel, BR=1, D=2048, BD=2048, **ADD, registers=40),
    "gated_rms_norm": by_name(norm._gated_rms_norm_kernel, H=32, D=128, BR=16, BD=128, registers=48),
    "qk_norm_rope": by_name(qk_rope._qk_norm_rope_kernel, **ROPE, options=UNFUSED, registers=64),
    "causal_conv": by_name(conv._conv_kernel, num_warps=8, **CONV, registers=104),
    "decode attention": decode(shared=75 * 1024, registers=170),  # three programs a multiprocessor
    "decode attention, fp32": decode("fp32"),
    "decode attention, merge": by_name(attention_decode._merge_kernel, HQ=16, D=256, **MERGE, registers=72),
    "attention gate": by_name(attention._gate_kernel, HQ=16, D=256, BR=8, BD=256, registers=64),
    "moe logits": moe(moe_router._logits_kernel, BN=4, BK=1024, registers=80),
    "moe route": moe(moe_router._route_kernel, warps=1, IS_NORMALISED=True, USE_RANKS=True, registers=64),
    "moe plan": moe(moe_router._plan_kernel, BM=128, BT=64, registers=96),
    "moe plan, one program": moe(moe_router._plan_at_once_kernel, warps=8, BM=16, BP=64, IS_NORMALISED=True, USE_SHARED=True),
    **moe_products(),
    "moe combine": moe(moe_gemm._combine_kernel, BD=1024, USE_SHARED=True, USE_RESIDUAL=True, registers=48),
    "moe gate_up, few tokens": moe(moe_few._few_gate_up_kernel, SLOTS=9, BN=16, BK=256, IS_NORMALISED=True, registers=192),
    "moe down, few tokens": moe(moe_few._few_down_kernel, warps=8, SLOTS=9, BN=8, BK=256, USE_RESIDUAL=True, registers=128),
}


def compile_case(case: Case) -> dict[str, int]:
    """-> registers a thread, bytes of stack a thread, bytes of shared memory a block, waits for products."""
    names = case.fn.arg_names
    constants = dict.fromkeys(names) | case.constants
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {name: constants[name] for name in names if signature[name] == "constexpr"}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in case.aligned]
    source_of = GluonASTSource if case.fn.is_gluon() else ASTSource
    source = source_of(case.fn, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = dict(num_warps=case.num_warps, num_stages=case.num_stages, **case.options)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    used = {"registers": int(registers), "stack": int(stack), "shared": kernel.metadata.shared}
    return used | {"waits": code.count("WARPGROUP.DEPBAR")}


if __name__ == "__main__":
    print(json.dumps({name: compile_case(CASES[name]) for name in sys.argv[1:] or CASES}))
