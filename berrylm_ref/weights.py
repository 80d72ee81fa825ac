"""Checkpoints: safetensors files <-> parameters, with the official names, one tensor in memory at a time.

Loading has three steps, so that nothing is used before everything fits: ``open_checkpoint`` reads the headers, ``plan``
matches them with the model, ``load`` copies.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import BerryLMConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
PER_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint, by its header only."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Copy:
    """One step of the plan: ``source`` becomes ``target``, or the part of it at ``index``."""

    source: Entry
    target: str
    index: tuple = ()


def open_checkpoint(folder: str | Path) -> dict[str, Entry]:
    """The headers of a checkpoint folder: what its index names, else model.safetensors; other files are not looked at."""
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: expected a JSON object with a weight_map of names to files, got {error!r}") from error
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise ValueError(f"{index}: expected every shard that it names, missing: {', '.join(missing)}")
    elif (folder / SINGLE).is_file():
        weight_map, names = None, [SINGLE]
    else:
        raise ValueError(f"checkpoint folder: expected {SINGLE} or {INDEX} in it, got {str(folder)!r}")
    entries: dict[str, Entry] = {}
    for name in names:
        for entry in _headers(folder / name):
            if weight_map is not None and weight_map.get(entry.name) != name:
                where = weight_map.get(entry.name)
                raise ValueError(f"{folder / name}: {entry.name}: expected in {where} by the index, got it here")
            entries[entry.name] = entry
    lost = sorted(set(weight_map or ()) - set(entries))
    if lost:
        raise ValueError(f"{index}: expected {lost[0]} in {weight_map[lost[0]]}, the file does not hold it")
    return entries


def _headers(path: Path) -> Iterator[Entry]:
    try:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - the file object is no mapping
                part = f.get_slice(name)
                yield Entry(name, path, tuple(part.get_shape()), part.get_dtype())
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a whole safetensors file, got {error}") from error


def plan(entries: dict[str, Entry], config: BerryLMConfig, parameters: dict[str, Tensor]) -> list[Copy]:
    """Match headers and parameters; raises ValueError that lists every missing, unwanted or misshapen tensor."""
    copies, faults, filled = [], [], set()
    for name, entry in entries.items():
        if IGNORED.search(name):
            continue
        target, index = name, ()
        found = PER_EXPERT.match(name)
        if found:
            target, index = _expert_place(found, config)
        elif name == "lm_head.weight" and config.tie_word_embeddings:
            target = "model.embed_tokens.weight"  # saved twice by some writers: accepted if it is the same
        if target not in parameters:
            faults.append(f"{name}: nothing in the model wants it")
            continue
        want = tuple(parameters[target][index].shape) if _inside(index, parameters[target]) else None
        if entry.shape != want:
            faults.append(f"{name}: expected shape {want}, got {entry.shape} in {entry.file.name}")
        elif entry.dtype not in FLOATS:
            faults.append(f"{name}: expected a float dtype, got {entry.dtype} in {entry.file.name}")
        elif target != name and name == "lm_head.weight":
            _check_tied(entries, entry, faults)
        else:
            copies.append(Copy(entry, target, index))
            filled.add((target, str(index)))
    for name, parameter in parameters.items():
        for index in _parts(name, parameter, filled, config):
            if (name, str(index)) not in filled:
                faults.append(f"{name}{list(index) if index else ''}: missing from the checkpoint")
    if faults:
        more = f" (and {len(faults) - 20} more)" if len(faults) > 20 else ""
        raise ValueError("checkpoint does not fit the configuration: " + "; ".join(faults[:20]) + more)
    return copies


def _expert_place(found: re.Match, config: BerryLMConfig) -> tuple[str, tuple]:
    """Where a per-expert tensor lies in the stacked one; the gate rows stand before the up rows."""
    prefix, expert, kind = found[1], int(found[2]), found[3]
    width = config.moe_intermediate_size
    if kind == "down":
        return f"{prefix}.down_proj", (expert,)
    return f"{prefix}.gate_up_proj", (expert, slice(0, width) if kind == "gate" else slice(width, 2 * width))


def _inside(index: tuple, parameter: Tensor) -> bool:
    return not index or index[0] < parameter.shape[0]


def _parts(name: str, parameter: Tensor, filled: set, config: BerryLMConfig) -> list[tuple]:
    """The pieces that together fill a parameter: itself, or one a expert where the checkpoint has per-expert names."""
    if ".mlp.experts." not in name or (name, "()") in filled:
        return [()]
    if not any(target == name for target, _ in filled):
        return [()]
    if name.endswith("down_proj"):
        return [(e,) for e in range(parameter.shape[0])]
    width = config.moe_intermediate_size
    return [(e, half) for e in range(parameter.shape[0]) for half in (slice(0, width), slice(width, 2 * width))]


def _check_tied(entries: dict[str, Entry], head: Entry, faults: list[str]) -> None:
    embedding = entries.get("model.embed_tokens.weight")
    if embedding is not None and not torch.equal(read(head), read(embedding)):
        faults.append("lm_head.weight: expected the embedding with tie_word_embeddings, got other values")


def read(entry: Entry) -> Tensor:
    with safe_open(entry.file, framework="pt") as f:
        return f.get_tensor(entry.name)


@torch.no_grad()
def load(copies: list[Copy], parameters: dict[str, Tensor]) -> None:
    """Carry out the plan; one tensor is read at a time, and cast on the way."""
    by_file: dict[Path, list[Copy]] = {}
    for copy in copies:
        by_file.setdefault(copy.source.file, []).append(copy)
    for path, steps in by_file.items():
        with safe_open(path, framework="pt") as f:
            for step in steps:
                parameters[step.target][step.index].copy_(f.get_tensor(step.source.name))


def save(model, folder: str | Path, max_shard_size: str | int = "2GB") -> None:
    """Write ``model`` with the official names; files of an earlier save that the new one does not use are removed."""
    limit, folder = parse_size(max_shard_size), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    written = [f"{name}.partial" for name in names]
    for shard, name in zip(shards, written, strict=True):  # whole files first, their real names last
        save_file({k: v.detach().cpu().contiguous() for k, v in shard.items()}, folder / name, metadata={"format": "pt"})
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX]:
        old.unlink(missing_ok=True)
    for partial, name in zip(written, names, strict=True):
        os.replace(folder / partial, folder / name)
    if count > 1:
        weight_map = {k: name for shard, name in zip(shards, names, strict=True) for k in shard}
        total = sum(v.nbytes for shard in shards for v in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    dtype = str(model.dtype).removeprefix("torch.")
    model.config.with_dtype(dtype).save_pretrained(folder)


def parse_size(size: str | int) -> int:
    """Bytes from "2GB", "15MB", "100KB" or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)?", str(size).strip(), re.IGNORECASE)
    value = int(float(found[1]) * UNITS.get((found[2] or "").upper(), 1)) if found else 0
    if value <= 0:
        raise ValueError(f"save_pretrained: max_shard_size: expected a size such as '2GB' or a number of bytes, got {size!r}")
    return value
