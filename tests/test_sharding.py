"""Tensor parallel: what a rank holds and reads, what is refused, and that two ranks together are one model."""

import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import assert_close, randomise, tiny_config
from safetensors.torch import load_file, save_file

from berrylm_ref import BerryLM, weights
from berrylm_ref.random_weights import random_model
from berrylm_ref.sharding import CUTS, Shard, cut_of

CASES = {
    "plain": {},
    "one KV head, biases, tied": {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
}


def config_of(case="plain", **overrides):
    return tiny_config(**{"vocab_size": 96, **CASES[case], **overrides})


def saved(folder, config, dtype=torch.float32):
    randomise(BerryLM(config), seed=5).to(dtype).save_pretrained(folder)
    return folder


def parameters(config, rank, size):
    return dict(BerryLM(config, device="meta", shard=Shard(config, rank, size)).named_parameters())


def forward_of_a_rank(rank, size, folders, out):
    """What each process runs: the logits of every folder's model, computed by all ranks together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=size)
    for i, (folder, config) in enumerate(folders):
        model = BerryLM.from_pretrained(folder, shard=Shard(config, rank, size))
        torch.save(model(ids_for(config)), f"{out}/{i}-{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # as the package's own ranks end: torch's destructors aborted one process in seven that was through


def ids_for(config):
    """Two sequences of 70 tokens, more than a chunk; every row of the vocabulary occurs."""
    return torch.arange(140).view(2, 70) * 7 % config.vocab_size


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_logits_of_one_process(tmp_path, size):
    """Everything that can be cut wrongly moves the logits; both ranks must also have the same bits, or their routers part."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "moe_intermediate_size": 12, "vocab_size": 100}
    heads |= {"shared_expert_intermediate_size": 16}
    folders = [(saved(tmp_path / str(i), c), c) for i, c in enumerate(config_of(case, **heads) for case in CASES)]
    mp.spawn(forward_of_a_rank, (size, folders, str(tmp_path)), size)
    for i, (folder, config) in enumerate(folders):
        alone = BerryLM.from_pretrained(folder)(ids_for(config))
        found = [torch.load(tmp_path / f"{i}-{rank}.pt") for rank in range(size)]
        assert_close(f"{list(CASES)[i]}, {size} ranks", found[0], alone, 1e-5)
        assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_every_element_is_held(case, size):
    """The ranks' spans cover every tensor, once; of KV heads fewer than ranks, once for each rank that shares one."""
    config = config_of(case, linear_num_key_heads=4, moe_intermediate_size=12, shared_expert_intermediate_size=16)
    ranks = [(Shard(config, rank, size), parameters(config, rank, size)) for rank in range(size)]
    for name, tensor in parameters(config, 0, 1).items():
        shape, held = tuple(tensor.shape), []
        for shard, own in ranks:
            spans, local = shard.spans(name, shape), own[name].shape
            assert shard.whole_shape(name, tuple(local)) == shape, name
            if spans is None:
                continue
            dim, ranges = spans
            if ranges:
                assert sum(end - begin for begin, end in ranges) == local[dim], name
            held += [i for begin, end in ranges for i in range(begin, end)]
        if held:
            times = size // min(size, config.num_key_value_heads) if "k_proj" in name or "v_proj" in name else 1
            assert sorted(held) == sorted(list(range(shape[dim])) * times), name


def test_heads_stay_with_their_values():
    """Rank 1 of 2 has key head 1 with value heads 2 and 3: rows of q, k and v from three places of one matrix."""
    config = config_of()  # 2 key heads of 8 and 4 value heads of 12: q 0 .. 15, k 16 .. 31, v 32 .. 79
    shard = Shard(config, 1, 2)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    assert shard.spans(name, (80, 32)) == (0, [(8, 16), (24, 32), (56, 80)])
    assert shard.spans("model.layers.0.linear_attn.A_log", (4,)) == (0, [(2, 4)])
    assert shard.spans("model.layers.0.mlp.experts.gate_up_proj", (5, 20, 32)) == (1, [(5, 10), (15, 20)])


def test_a_tensor_that_is_not_described_is_refused():
    """A new parameter must not become one that every rank adds whole."""
    assert all(cut_of(name) for name in parameters(config_of(attention_bias=True), 0, 1))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.new\.weight: expected a tensor that CUTS describes"):
        cut_of("model.layers.0.mlp.new.weight")
    assert cut_of("model.layers.3.mlp.experts.7.down_proj.weight") == CUTS["mlp.experts.down_proj.weight"]


@pytest.mark.parametrize(
    "field, fields, size",
    [
        ("num_attention_heads", {"num_attention_heads": 6, "num_key_value_heads": 2}, 4),
        ("linear_num_key_heads", {"linear_num_key_heads": 1}, 2),
        ("moe_intermediate_size", {"moe_intermediate_size": 9}, 2),
        ("shared_expert_intermediate_size", {"shared_expert_intermediate_size": 7}, 2),
        ("vocab_size", {"vocab_size": 97}, 2),
        ("num_key_value_heads", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2),
    ],
)
def test_what_does_not_divide_is_refused(field, fields, size):
    with pytest.raises(ValueError, match=f"tensor parallel: {field}: expected a multiple .*tp = {size}, got {fields.get(field)}"):
        Shard(config_of(**fields), 0, size)


class CountingFile:
    """A safetensors file that adds up what is taken out of it."""

    def __init__(self, file, taken):
        self.file, self.taken = file, taken

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def count(self, name, tensor):
        self.taken[name] = self.taken.get(name, 0) + tensor.nbytes
        return tensor

    def get_tensor(self, name):
        return self.count(name, self.file.get_tensor(name))

    def get_slice(self, name):
        return CountingSlice(self, name)


class CountingSlice:
    def __init__(self, owner, name):
        self.owner, self.name, self.part = owner, name, owner.file.get_slice(name)
        self.get_shape, self.get_dtype = self.part.get_shape, self.part.get_dtype

    def __getitem__(self, index):
        return self.owner.count(self.name, self.part[index])


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_own_slices_and_no_more(tmp_path, monkeypatch, case):
    """Two ranks that each read the whole file would need twice the time and, on a network disk, twice the traffic."""
    config, real = config_of(case), weights.safe_open
    folder, taken = saved(tmp_path, config), {}
    monkeypatch.setattr(weights, "safe_open", lambda path, framework: CountingFile(real(path, framework=framework), taken))
    for rank in range(2):
        taken.clear()
        model = BerryLM.from_pretrained(folder, shard=Shard(config, rank, 2))
        held = {name: p.nbytes for name, p in model.named_parameters()}
        zeros = {name for name in held if name.endswith("o_proj.bias") and rank}
        assert taken == {name: n for name, n in held.items() if name not in zeros}
        whole = sum(math.prod(p.shape) * 4 for p in parameters(config, 0, 1).values())
        assert sum(taken.values()) < 0.6 * whole


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_in_tensors_of_their_own_are_cut_the_same(tmp_path, rank):
    """A checkpoint may hold every expert's gate, up and down projection apart."""
    config = config_of()
    stacked, apart = saved(tmp_path / "stacked", config), tmp_path / "apart"
    apart.mkdir()
    out = {}
    for name, tensor in load_file(stacked / weights.SINGLE).items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("mlp.experts"):
            out[name] = tensor
            continue
        for e in range(config.num_experts):
            parts = zip(("gate", "up"), tensor[e].chunk(2), strict=True) if kind == "gate_up_proj" else [("down", tensor[e])]
            out |= {f"{prefix}.{e}.{part}_proj.weight": value.clone() for part, value in parts}
    save_file(out, apart / weights.SINGLE)
    config.save_pretrained(apart)
    one, other = (dict(BerryLM.from_pretrained(f, shard=Shard(config, rank, 2)).named_parameters()) for f in (stacked, apart))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_bias_that_is_added_up_is_held_once(tmp_path):
    """Two ranks that both add the bias of o_proj would add it twice."""
    config = config_of(attention_bias=True)
    folder = saved(tmp_path, config)
    first, second = (dict(BerryLM.from_pretrained(folder, shard=Shard(config, rank, 2)).named_parameters()) for rank in range(2))
    name = "model.layers.1.self_attn.o_proj.bias"
    assert torch.equal(first[name], load_file(folder / weights.SINGLE)[name]) and not second[name].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_draw_what_the_whole_model_draws(case, dtype):
    """A measurement over two ranks is one of the same model: not of two halves with weights of their own."""
    config = config_of(case)
    options = {"dtype": dtype, "device": "cpu", "backend": "torch", "seed": 3}
    whole = dict(random_model(config, **options).named_parameters())
    for rank in range(2):
        shard = Shard(config, rank, 2)
        own = dict(random_model(config, shard=shard, **options).named_parameters())
        for name, p in own.items():
            assert p.dtype == whole[name].dtype and torch.equal(p, shard.part(name, whole[name].detach())), name
        assert not rank or (own["lm_head.weight" if case == "plain" else "model.embed_tokens.weight"] != 0).all()


def test_a_part_is_not_saved_as_a_model(tmp_path):
    config = config_of()
    with pytest.raises(ValueError, match="save_pretrained: model: expected a whole one, got rank 1 of 2"):
        BerryLM(config, shard=Shard(config, 1, 2)).save_pretrained(tmp_path / "out")
    assert not os.path.exists(tmp_path / "out")
