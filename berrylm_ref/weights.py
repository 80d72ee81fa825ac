"""Checkpoints: safetensors files <-> parameters, with the official names, one tensor in memory at a time.

Loading has three steps, so that nothing is used before everything fits: ``open_checkpoint`` reads the headers, ``plan``
matches them with the model, ``load`` copies.
"""

import json
import math
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
from .sharding import Shard

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of one number
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint, by its header only."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * FLOATS[self.dtype]


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
            odd = [n for n in names if not n or Path(n).name != n]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: expected a JSON object with a weight_map of names to files, got {error!r}") from error
        if odd:
            raise ValueError(f"{index}: expected the names of files beside it, got {odd[0]!r}")
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
                where = weight_map.get(entry.name, "no file")
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


def plan(entries: dict[str, Entry], shard: Shard, parameters: dict[str, Tensor]) -> list[Copy]:
    """Match headers and the parameters of ``shard``; raises ValueError that lists every missing, unwanted or misshapen tensor."""
    config = shard.local
    pieces = {name: _expert_pieces(name, config) for name in parameters}
    places = {name: (name, ()) for name in parameters}
    places |= {piece: (name, index) for name in parameters for piece, index in pieces[name].items()}
    if config.tie_word_embeddings:
        places["lm_head.weight"] = ("model.embed_tokens.weight", ())  # saved twice by some writers: fine if it is the same
    copies, faults = [], []
    for name, entry in entries.items():
        if IGNORED.search(name):
            continue
        if name not in places:
            faults.append(f"{name}: nothing in the model wants it")
            continue
        target, index = places[name]
        want = shard.whole_shape(name, tuple(parameters[target][index].shape))
        if entry.shape != want:
            faults.append(f"{name}: expected shape {want}, got {entry.shape} in {entry.file.name}")
        elif entry.dtype not in FLOATS:
            faults.append(f"{name}: expected a float dtype, got {entry.dtype} in {entry.file.name}")
        elif name == "lm_head.weight" and config.tie_word_embeddings:
            _check_tied(entries, entry, shard, faults)
        else:
            copies.append(Copy(entry, target, index))
    for name in parameters:
        given = [piece for piece in pieces[name] if piece in entries]
        if name in entries and given:
            faults.append(f"{name}: expected once, got it whole and as {given[0]}")
        elif name not in entries:
            absent = [piece for piece in pieces[name] if piece not in entries] if given else [name]
            faults += [f"{missing}: missing from the checkpoint" for missing in absent]
    if faults:
        more = f" (and {len(faults) - 20} more)" if len(faults) > 20 else ""
        raise ValueError("checkpoint does not fit the configuration: " + "; ".join(faults[:20]) + more)
    return copies


def _expert_pieces(name: str, config: BerryLMConfig) -> dict[str, tuple]:
    """The per-expert names that may stand for a stacked parameter, and where in it each lies: gate rows before up rows."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".mlp.experts"):
        return {}
    width = config.moe_intermediate_size
    rows = {"gate": slice(0, width), "up": slice(width, 2 * width)} if kind == "gate_up_proj" else {"down": slice(None)}
    return {f"{prefix}.{e}.{part}_proj.weight": (e, at) for e in range(config.num_experts) for part, at in rows.items()}


def _check_tied(entries: dict[str, Entry], head: Entry, shard: Shard, faults: list[str]) -> None:
    embedding = entries.get("model.embed_tokens.weight")
    if embedding is None:
        return
    with safe_open(head.file, framework="pt") as f, safe_open(embedding.file, framework="pt") as g:
        if not torch.equal(_read(f, head, shard), _read(g, embedding, shard)):
            faults.append("lm_head.weight: expected the embedding with tie_word_embeddings, got other values")


def _read(f, entry: Entry, shard: Shard) -> Tensor:
    """What ``shard`` holds of a tensor, from an open file; nothing else is read."""
    spans = shard.spans(entry.name, entry.shape)
    if spans is None:
        return f.get_tensor(entry.name)
    dim, ranges = spans
    part = f.get_slice(entry.name)
    if not ranges:  # held by another rank, and added up with zeros
        return torch.zeros(entry.shape)
    return torch.cat([part[(slice(None),) * dim + (slice(begin, end),)] for begin, end in ranges], dim)


@torch.no_grad()
def load(copies: list[Copy], shard: Shard, parameters: dict[str, Tensor]) -> None:
    """Carry out the plan; one tensor is read at a time, and cast on the way.

    An open file is a memory map: what was read stays resident until it is closed. So it is opened anew whenever more than
    the largest tensor would be, and the peak stays at the weights plus about one tensor.
    """
    largest = max((copy.source.nbytes for copy in copies), default=0)
    runs: list[list[Copy]] = []  # of one file, at most `largest` bytes each
    room = 0
    for copy in sorted(copies, key=lambda copy: copy.source.file):
        if not runs or runs[-1][0].source.file != copy.source.file or copy.source.nbytes > room:
            runs.append([])
            room = largest
        runs[-1].append(copy)
        room -= copy.source.nbytes
    for run in runs:
        with safe_open(run[0].source.file, framework="pt") as f:
            for step in run:
                parameters[step.target][step.index].copy_(_read(f, step.source, shard))


def save(model, folder: str | Path, max_shard_size: str | int = "2GB") -> None:
    """Write ``model`` with the official names; files of an earlier save that the new one does not use are removed.

    Everything is written beside the old files first. The switch is one rename or removal, so that a reader finds the old
    weights, the new ones, or an error, and never a mixture.
    """
    if model.shard.size > 1:
        raise ValueError(f"save_pretrained: model: expected a whole one, got rank {model.shard.rank} of {model.shard.size}")
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
    try:
        for shard, name in zip(shards, names, strict=True):
            whole = {k: v.detach().cpu().contiguous() for k, v in shard.items()}
            save_file(whole, folder / f"{name}.partial", metadata={"format": "pt"})
        if count > 1:
            weight_map = {k: name for shard, name in zip(shards, names, strict=True) for k in shard}
            total = sum(v.nbytes for shard in shards for v in shard.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / f"{INDEX}.partial").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            if (folder / INDEX).is_file():  # its shards may have the names of the new ones
                (folder / SINGLE).unlink(missing_ok=True)
                (folder / INDEX).unlink()
            names.append(INDEX)
        for name in names:
            os.replace(folder / f"{name}.partial", folder / name)
    finally:
        for partial in [*folder.glob("model*.safetensors.partial"), folder / f"{INDEX}.partial"]:
            partial.unlink(missing_ok=True)
    for old in [folder / INDEX, folder / SINGLE, *folder.glob("model-*-of-*.safetensors")]:
        if old.name not in names:
            old.unlink(missing_ok=True)
    dtype = str(model.dtype).removeprefix("torch.")
    model.config.with_dtype(dtype).save_pretrained(folder)


def parse_size(size: str | int) -> int:
    """Bytes from "2GB", "15MB", "100KB" or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)?", str(size).strip(), re.IGNORECASE)
    value = int(float(found[1]) * UNITS.get((found[2] or "").upper(), 1)) if found else 0
    if value <= 0:
        raise ValueError(f"save_pretrained: max_shard_size: expected a size such as '2GB' or a number of bytes, got {size!r}")
    return value
