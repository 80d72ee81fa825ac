"""BerryLM written a second time, from the description alone: fp64, one token, one head, one expert at a time, no cache.

It shares no code with the package. The recorded tensors cover two configurations; this covers every switch.
"""

import torch
from torch.nn.functional import sigmoid, silu, softplus


def plain_model(config, weights, ids):
    """ids: list of T -> logits [T, vocab_size] and each layer's stream, a list of [T, D]. ``weights`` is a state dict."""
    c, w = config, {name: x.detach().double() for name, x in weights.items()}
    h = w["model.embed_tokens.weight"][ids]  # [T, D]
    committed, streams = [h], []
    for i in range(c.num_hidden_layers):
        here = {name.removeprefix(f"model.layers.{i}."): x for name, x in w.items() if name.startswith(f"model.layers.{i}.")}
        if c.attn_res_block_size:
            h = mix(c, here, h, committed)
        x = zero_centred_norm(h, here["input_layernorm.weight"], c.rms_norm_eps)
        if c.layer_types[i] == "linear_attention":
            h = h + linear_attention(c, part(here, "linear_attn"), x)
        else:
            h = h + full_attention(c, part(here, "self_attn"), x)
        x = zero_centred_norm(h, here["post_attention_layernorm.weight"], c.rms_norm_eps)
        h = h + torch.stack([experts(c, part(here, "mlp"), token) for token in x])
        streams.append(h)
        if c.attn_res_block_size and (i + 1) % c.attn_res_block_size == 0:
            committed.append(h)
    head = w["model.embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]
    return zero_centred_norm(h, w["model.norm.weight"], c.rms_norm_eps) @ head.T, streams


def part(weights, name):
    return {n.removeprefix(f"{name}."): x for n, x in weights.items() if n.startswith(f"{name}.")}


def unit_rms(x, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def zero_centred_norm(x, weight, eps):
    return unit_rms(x, eps) * (1 + weight)


def mix(c, w, h, committed):
    mixed = []
    for t in range(len(h)):
        sources = torch.stack([s[t] for s in committed] + [h[t]])
        scores = torch.stack([torch.dot(unit_rms(s, c.attn_res_eps), w["attn_res.pseudo_query"]) for s in sources])
        mixed.append((scores.softmax(0)[:, None] * sources).sum(0))
    mixed = torch.stack(mixed)
    return h + torch.tanh(w["attn_res.gate"]) * (mixed - h) if c.attn_res_gated else mixed


def linear_attention(c, w, x):
    H, HV, K, V = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    raw, taps, T = x @ w["in_proj_qkv.weight"].T, c.linear_conv_kernel_dim, len(x)
    past = torch.cat([raw.new_zeros(taps - 1, raw.shape[1]), raw])
    qkv = silu(torch.stack([(past[t : t + taps] * w["conv1d.weight"][:, 0].T).sum(0) for t in range(T)]))
    z, beta = x @ w["in_proj_z.weight"].T, sigmoid(x @ w["in_proj_b.weight"].T)
    raw_gate = x @ w["f_down_proj.weight"].T @ w["f_up_proj.weight"].T
    out = torch.zeros(T, HV * V, dtype=x.dtype)
    for j in range(HV):
        key_head = j // (HV // H)
        S = torch.zeros(K, V, dtype=x.dtype)
        for t in range(T):
            q = qkv[t, key_head * K : (key_head + 1) * K]
            k = qkv[t, H * K + key_head * K : H * K + (key_head + 1) * K]
            v = qkv[t, 2 * H * K + j * V : 2 * H * K + (j + 1) * V]
            q, k = (y / (y.pow(2).sum() + 1e-6).sqrt() for y in (q, k))
            channel = slice(j * K, (j + 1) * K)
            g = -w["A_log"][j].exp() * softplus(raw_gate[t, channel] + w["dt_bias"][channel])
            if c.kda_safe_gate:
                g = torch.maximum(g, torch.tensor(c.kda_gate_lower_bound, dtype=g.dtype))
            S = g.exp()[:, None] * S
            S = S + torch.outer(k, beta[t, j] * (v - S.T @ k))
            o = S.T @ q * K**-0.5
            value = slice(j * V, (j + 1) * V)
            out[t, value] = unit_rms(o, c.rms_norm_eps) * w["norm.weight"] * silu(z[t, value])
    return out @ w["out_proj.weight"].T


def full_attention(c, w, x):
    heads, kv_heads, D, T = c.num_attention_heads, c.num_key_value_heads, c.head_dim, len(x)

    def project(name):
        return x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0)

    q, k, v = project("q").view(T, heads, -1), project("k").view(T, kv_heads, D), project("v").view(T, kv_heads, D)
    out = torch.zeros(T, heads, D, dtype=x.dtype)
    for head in range(heads):
        group = head // (heads // kv_heads)
        queries = rotate(c, zero_centred_norm(q[:, head, :D], w["q_norm.weight"], c.rms_norm_eps))
        keys = rotate(c, zero_centred_norm(k[:, group], w["k_norm.weight"], c.rms_norm_eps))
        for t in range(T):
            p = (keys[: t + 1] @ queries[t] * D**-0.5).softmax(0)
            out[t, head] = p @ v[: t + 1, group]
        if c.attn_output_gate:
            out[:, head] *= sigmoid(q[:, head, D:])
    return out.flatten(1) @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)


def rotate(c, x):
    """x [T, D]: pair channel i with channel i + R / 2 of the first R, turned by t theta^(-2 i / R)."""
    R = int(c.head_dim * c.rope_parameters["partial_rotary_factor"])
    out = x.clone()
    for t in range(len(x)):
        for i in range(R // 2):
            angle = torch.tensor(t * c.rope_parameters["rope_theta"] ** (-2 * i / R), dtype=x.dtype)
            a, b = x[t, i], x[t, i + R // 2]
            out[t, i], out[t, i + R // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def experts(c, w, x):
    p = (w["gate.weight"] @ x).softmax(0)
    chosen = p.argsort(descending=True)[: c.num_experts_per_tok]
    share = p[chosen] / (p[chosen].sum() if c.norm_topk_prob else 1)
    y = torch.zeros_like(x)
    for weight, e in zip(share, chosen.tolist(), strict=True):
        gate, up = (w["experts.gate_up_proj"][e] @ x).chunk(2)
        y += weight * (w["experts.down_proj"][e] @ (silu(gate) * up))
    shared = part(w, "shared_expert")
    inner = silu(shared["gate_proj.weight"] @ x) * (shared["up_proj.weight"] @ x)
    return y + sigmoid(w["shared_expert_gate.weight"] @ x) * (shared["down_proj.weight"] @ inner)
