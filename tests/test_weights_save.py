"""Saving a checkpoint: shards, what an earlier save leaves behind, and that nothing half-written is ever visible."""

import json
import shutil

import pytest
import torch
from helpers import randomise, tiny_config
from safetensors.torch import load_file, save_file

from berrylm_ref import BerryLM, weights
from berrylm_ref.weights import INDEX, SINGLE, parse_size


@pytest.fixture(scope="module")
def model():
    return randomise(BerryLM(tiny_config()), seed=0).eval()


def same(a, b):
    """Bit for bit, names and dtypes included."""
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def files(folder):
    return {p.name for p in folder.iterdir()}


def test_shards_stay_under_the_limit_and_one_big_tensor_gets_its_own(model, tmp_path):
    limit = 10_000
    model.save_pretrained(tmp_path, max_shard_size=limit)
    index = json.loads((tmp_path / INDEX).read_text())
    total = 0
    for shard in tmp_path.glob("model-*-of-*.safetensors"):
        tensors = load_file(shard)
        size = sum(x.nbytes for x in tensors.values())
        assert size <= limit or len(tensors) == 1
        assert all(index["weight_map"][n] == shard.name for n in tensors)
        total += size
    assert index["metadata"]["total_size"] == total == sum(p.nbytes for p in model.parameters())
    assert set(index["weight_map"]) == set(model.state_dict())


@pytest.mark.parametrize(
    "size, parsed",
    [("2GB", 2 * 10**9), ("15 MB", 15 * 10**6), ("100kb", 10**5), ("0.5MB", 500_000), ("1000", 1000), (1000, 1000)],
)
def test_shard_sizes(size, parsed):
    assert parse_size(size) == parsed


@pytest.mark.parametrize("size", [0, -1, "0GB", "2GiB", "2 apples", "", "GB", "1e9", None, True])
def test_refused_shard_sizes(model, tmp_path, size):
    """Refused before a file is touched."""
    with pytest.raises(ValueError, match="save_pretrained: max_shard_size: expected a size such as '2GB'.*got"):
        model.save_pretrained(tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_saving_again_removes_the_older_shards(model, tmp_path):
    """Leftover shards of an earlier save look like part of the checkpoint; files of others are left alone."""
    (tmp_path / "tokenizer.json").write_text("{}")
    mine = {"tokenizer.json", "config.json"}
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    many = files(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    few = files(tmp_path)
    assert 4 < len(few) < len(many) and INDEX in few and len(few & many) == 3
    assert same(BerryLM.from_pretrained(tmp_path), model)
    model.save_pretrained(tmp_path)
    assert files(tmp_path) == mine | {SINGLE}
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert files(tmp_path) == few
    assert same(BerryLM.from_pretrained(tmp_path), model)


class Killed(BaseException):
    """The process ended here."""


@pytest.mark.parametrize("new", ["2GB", "60KB", "35KB"])
@pytest.mark.parametrize("old", ["2GB", "60KB", "35KB"])
def test_no_half_written_checkpoint_is_ever_visible(tmp_path, monkeypatch, old, new):
    """A save that stops before any of its file operations leaves the old weights, the new ones or an error: never a mixture.

    The operations are counted in a first run; then each run is stopped at another one.
    """
    model, other = (randomise(BerryLM(tiny_config(num_hidden_layers=2)), seed) for seed in (0, 9))
    template = tmp_path / "template"
    model.save_pretrained(template, max_shard_size=old)
    assert len(files(template)) == {"2GB": 2, "60KB": 5, "35KB": 7}[old]
    left = 10**9

    def counted(function):
        def run(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(weights, "save_file", counted(weights.save_file))
    monkeypatch.setattr(weights.os, "replace", counted(weights.os.replace))
    monkeypatch.setattr(weights.Path, "unlink", counted(weights.Path.unlink))
    monkeypatch.setattr(weights.Path, "write_text", counted(weights.Path.write_text))
    outcomes, stop, finished = set(), 0, False
    while not finished:
        folder = tmp_path / f"run-{stop}"
        shutil.copytree(template, folder)
        left = stop
        try:
            other.save_pretrained(folder, max_shard_size=new)
            finished = True
        except Killed:
            pass
        left, stop = 10**9, stop + 1
        try:
            loaded = BerryLM.from_pretrained(folder)
        except ValueError:
            outcomes.add("refused")
        else:
            assert same(loaded, model) or same(loaded, other)
            outcomes.add("old" if same(loaded, model) else "new")
        shutil.rmtree(folder)
    assert same(loaded, other) and {"old", "new"} <= outcomes
    if old == new == "2GB":
        assert "refused" not in outcomes  # one rename: there is always a checkpoint


def test_a_failed_save_leaves_the_old_checkpoint_and_no_litter(model, tmp_path, monkeypatch):
    """A full disk in the second shard."""
    folder, written = tmp_path, []
    model.save_pretrained(folder)

    def full(tensors, path, metadata):
        written.append(path)
        if len(written) == 2:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        save_file(tensors, path, metadata)

    before = files(folder)
    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        randomise(BerryLM(tiny_config()), seed=9).save_pretrained(folder, max_shard_size="40KB")
    assert files(folder) == before
    assert same(BerryLM.from_pretrained(folder), model)


@pytest.mark.parametrize("name", ["hf-tiny-default", "hf-odd", "hf-odd/sharded"])
def test_official_checkpoints_come_back_as_they_are(golden, tmp_path, name):
    """Our save has exactly the official names, shapes and values."""
    official = {}
    for file in (golden / name).glob("model*.safetensors"):
        official |= load_file(file)
    BerryLM.from_pretrained(golden / name).save_pretrained(tmp_path)
    ours = load_file(tmp_path / SINGLE)
    assert set(ours) == set(official)
    assert all(torch.equal(ours[n], x.float()) for n, x in official.items())


def test_saving_does_not_disturb_the_file_it_was_loaded_from(model, tmp_path):
    """Load, change, save into the same folder: loaded weights must not be a window on the file that is replaced."""
    folder = tmp_path
    model.save_pretrained(folder)
    loaded = BerryLM.from_pretrained(folder)
    with torch.no_grad():
        loaded.model.norm.weight.add_(1)
    loaded.save_pretrained(folder)
    again = BerryLM.from_pretrained(folder)
    assert same(again, loaded) and not same(again, model)
    assert torch.equal(again.model.norm.weight, model.model.norm.weight + 1)
