"""Projections of one input lie in one matrix and are parameters of their own: through casts, copies, loads and training."""

import copy
import io

import pytest
import torch
from helpers import randomise, rel_l2, tiny_config

from berrylm_ref import BerryLM
from berrylm_ref.merged import Merged

IDS = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(0))


def holders(model):
    return [module for module in model.modules() if isinstance(module, Merged)]


def parts(module, kind="weight"):
    return [getattr(getattr(module, name), kind) for name in module.merged]


def in_one_piece(module, kind="weight"):
    """One storage, each part right behind the one before it, and nothing else in it."""
    found = parts(module, kind)
    storages = {p.untyped_storage().data_ptr() for p in found}
    ends = [p.storage_offset() + p.numel() for p in found]
    return (
        len(storages) == 1
        and [p.storage_offset() for p in found] == [0, *ends[:-1]]
        and found[0].untyped_storage().nbytes() == sum(p.nbytes for p in found)
    )


def model_of(dtype="float32", **options):
    return randomise(BerryLM(tiny_config(attention_bias=True, **options), dtype=dtype), seed=0)


def test_a_model_has_one_matrix_a_mixer_and_the_checkpoints_names():
    model = model_of()
    assert len(holders(model)) == 4
    names = dict(model.named_parameters())
    for layer, keys in (("model.layers.0.linear_attn", ("in_proj_qkv", "in_proj_z", "f_down_proj", "in_proj_b")),
                        ("model.layers.1.self_attn", ("q_proj", "k_proj", "v_proj"))):  # fmt: skip
        module = model.get_submodule(layer)
        assert in_one_piece(module)
        assert torch.equal(module.join(), torch.cat([names[f"{layer}.{key}.weight"] for key in keys]))
        assert module.join().data_ptr() == names[f"{layer}.{keys[0]}.weight"].data_ptr(), "no second copy"
    attention = model.model.layers[1].self_attn
    assert in_one_piece(attention, "bias") and model.model.layers[0].linear_attn.join("bias") is None


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(model):
    fresh = BerryLM(model.config)
    fresh.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    return fresh


def loaded(model):
    fresh = BerryLM(model.config)
    fresh.load_state_dict(model.state_dict())
    return fresh


def from_meta(model):
    fresh = BerryLM(model.config, device="meta")
    fresh.to_empty(device="cpu")
    assert all(in_one_piece(module) for module in holders(fresh)), "joined before it is filled"
    fresh.load_state_dict(model.state_dict())
    return fresh


WAYS = {
    "as it is": lambda model: model,
    ".to(float32)": lambda model: model.to(torch.float32),
    "there and back": lambda model: model.double().float(),
    "each module cast": lambda model: model.apply(lambda module: module.double()).apply(lambda module: module.float()),
    "deepcopy": copy.deepcopy,
    "load_state_dict": loaded,
    "load_state_dict, assigned": assigned,
    "meta, to_empty, load_state_dict": from_meta,
    "torch.save": saved_and_loaded,
}


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_parameters_stay_rows_of_one_matrix(way):
    """A parameter that a cast, a copy or a load has parted from the matrix would be trained, saved or loaded, and not be used.
    So after each of them every parameter is changed, and the logits must follow."""
    model = model_of()
    want = model(IDS)
    other = way(model)
    assert torch.equal(other(IDS), want)
    assert all(in_one_piece(module) for module in holders(other))
    for module in holders(other):
        for name, p in zip(module.merged, parts(module), strict=True):
            old = p.clone()
            p.mul_(1.5)
            assert rel_l2(other(IDS), want) > 1e-4, f"{type(module).__name__}.{name} is not what runs"
            p.copy_(old)
    assert torch.equal(other(IDS), want)
    if other is not model:
        assert holders(other)[0].join().data_ptr() != holders(model)[0].join().data_ptr()


@torch.no_grad()
def test_a_part_given_new_memory_between_two_calls_is_what_runs():
    """What was joined is kept from call to call; the old rows must not run on when one part, or all in turn, lie elsewhere."""
    model = model_of()
    seen = [model(IDS)]
    for module in holders(model):
        for p in (p for kind in ("weight", "bias") for p in parts(module, kind) if p is not None):
            p.data = 1.5 * p.data
            seen.append(model(IDS))
            fresh = BerryLM(model.config)
            fresh.load_state_dict(model.state_dict())
            assert torch.equal(seen[-1], fresh(IDS)) and rel_l2(seen[-1], seen[-2]) > 1e-5
    assert all(in_one_piece(module) for module in holders(model))


@torch.no_grad()
def test_a_copy_that_takes_the_originals_memory_runs_what_lies_there():
    """It was told that the parts lie where they lay, and ran on with a matrix that had been copied along: logits 84 % off."""
    model = model_of()
    model(IDS)
    other = copy.deepcopy(model)
    held = [matrix for module in holders(other) for _, matrix in module._joined.values()]
    assert not held, f"{len(held)} matrices beside the copied parameters"
    for p in model.parameters():
        p.mul_(1.5)
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(IDS), model(IDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_joins_at_once(dtype):
    """Not at the first forward: memory would be needed beside weights that already fill the device."""
    model = model_of().to(dtype)
    for module in holders(model):
        assert in_one_piece(module) and module.join().dtype == dtype
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_a_copy_made_while_serving_can_be_trained():
    """Joined inside inference_mode, weights must not become tensors that autograd refuses."""
    model = copy.deepcopy(model_of())
    with torch.inference_mode():
        want = model(IDS)
    logits = model(IDS)
    assert torch.equal(logits, want)
    logits.sum().backward()
    grads = [p.grad for module in holders(model) for kind in ("weight", "bias") for p in parts(module, kind) if p is not None]
    assert all(g is not None and g.abs().max() > 0 for g in grads)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.step()
    assert all(in_one_piece(module) for module in holders(model)) and not torch.equal(model(IDS), want)


def test_frozen_projections_train_nothing():
    model = model_of()
    for module in holders(model):
        module.requires_grad_(False)
    model(IDS).sum().backward()
    assert all(p.grad is None for module in holders(model) for p in module.parameters())
    assert model.model.embed_tokens.weight.grad is not None


def test_parts_that_cannot_be_one_are_refused():
    model = model_of()
    model.model.layers[0].linear_attn.in_proj_b.double()
    with pytest.raises(ValueError, match="KimiDeltaAttention: weights: expected one dtype and device .*in_proj_b torch.float64"):
        model(IDS)


def test_a_model_made_inside_inference_mode_runs_inside_and_outside():
    """Its parameters are inference tensors, which take no memory of an ordinary one: casting it was an error of torch."""
    with torch.inference_mode():
        model = model_of()
        want = model.double()(IDS)
    with torch.no_grad():
        assert torch.equal(model(IDS), want) and all(in_one_piece(module) for module in holders(model))
