"""The planted faults: one small edit of the package each, and the notebook whose check cell must then fail.

Every notebook has a check; one that can't fail says nothing. A row plants one classic mistake of that stage, and the
notebook, run against the edited copy of the package, has to stop with an AssertionError in a cell tagged "check".

Adding a row: a `Fault` at the end of its notebook's part of the table.

    notebook   file name without .ipynb
    file       the edited file, from the root of the repository; under berrylm_ref/ or kernels/berrylm_kernels/
    old, new   source text: `old` occurs exactly once in the file and is replaced by `new`
    story      what goes wrong, in a few words: the test's id, so unique in its notebook
    ci         True: also in every run of the suite. Quick notebooks only, two or three rows in all

`old` should be the shortest text that is unique and says what is edited; whole lines read best. The file must still be
valid Python, and the edit should change numbers: a fault that raises at once is caught by anything.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    notebook: str
    file: str
    old: str
    new: str
    story: str
    ci: bool = False

    def __str__(self) -> str:
        return f"{self.notebook}: {self.story}"

    def edit(self, source: str) -> str:
        """The file's text with the fault in it. Raises ValueError unless ``old`` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"Fault '{self}': old: expected once in {self.file}, got {count} times: {self.old!r}")
        return source.replace(self.old, self.new)


FAULTS: list[Fault] = [
    # 00 map
    Fault(
        "00_map",
        "berrylm_ref/config.py",
        "FULL if (i + 1) % every == 0",
        "FULL if i % every == 0",
        "full attention one layer early",
    ),
    Fault(
        "00_map",
        "berrylm_ref/layers.py",
        "self.k_proj = nn.Linear(c.hidden_size, kv_heads * width",
        "self.k_proj = nn.Linear(c.hidden_size, heads * width",
        "a key head for every query head",
    ),
    Fault(
        "00_map",
        "berrylm_ref/model.py",
        "(i + 1) % c.attn_res_block_size == 0",
        "i and i % c.attn_res_block_size == 0",
        "commit one layer late",
        ci=True,
    ),
    Fault(
        "00_map",
        "berrylm_ref/model.py",
        "committed[0] = h",
        "committed[0] = 0",
        "embeddings are not block 0",
    ),
    # 01 recurrence
    Fault(
        "01_recurrence",
        "berrylm_ref/ops/kda.py",
        'torch.einsum("nhk,nhkv->nhv", x.k[row], S)',
        'torch.einsum("nhk,nhkv->nhv", x.k[row], state[live])',
        "delta before decay",
        ci=True,
    ),
    Fault(
        "01_recurrence",
        "berrylm_ref/ops/kda.py",
        'error = x.v[row] - torch.einsum("nhk,nhkv->nhv", x.k[row], S)',
        "error = x.v[row]",
        "adds the value instead of what is wrong",
    ),
    Fault(
        "01_recurrence",
        "berrylm_ref/ops/kda_inputs.py",
        "x.repeat_interleave(HV // H, dim=1)",
        "x.repeat(1, HV // H, 1)",
        "value head j reads key head j % H",
    ),
    Fault(
        "01_recurrence",
        "berrylm_ref/ops/kda_inputs.py",
        "dt_bias.to(dtype).view(heads, width)",
        "dt_bias.to(dtype).view(width, heads).T",
        "dt_bias read channel-major",
    ),
    Fault(
        "01_recurrence",
        "berrylm_ref/ops/kda_inputs.py",
        "K**-0.5 if scale is None else scale",
        "1.0 if scale is None else scale",
        "q is not scaled",
    ),
    Fault(
        "01_recurrence",
        "berrylm_ref/ops/norm.py",
        "L2_EPS = 1e-6",
        "L2_EPS = 1e-5",
        "epsilon of the l2norm",
    ),
    # 02 chunkwise
    Fault(
        "02_chunkwise",
        "berrylm_ref/ops/kda_chunk.py",
        "pad(g[..., 1:, :], (0, 0, 0, 1))",
        "g",
        "a key fades by its own gate towards the chunk's end",
        ci=True,
    ),
    Fault(
        "02_chunkwise",
        "berrylm_ref/ops/kda_chunk.py",
        "-(second @ X @ first)",
        "-(first @ X @ second)",
        "block inverse in the wrong order",
    ),
    Fault(
        "02_chunkwise",
        "berrylm_ref/ops/kda_chunk.py",
        "since = pad(g2[..., 1:, :], (0, 0, 1, 0)).cumsum(-2).exp()",
        "G2 = g.cumsum(-2).unflatten(-2, (-1, 2, s)).select(-3, 1); since = (G2 - G2[..., :1, :]).exp()",
        "exponents as differences of one long sum",
    ),
    Fault(
        "02_chunkwise",
        "berrylm_ref/ops/kda_chunk.py",
        "rows = torch.full((begins[-1] * CHUNK,), P, dtype=torch.long)",
        "rows = torch.full((begins[-1] * CHUNK,), P - 1, dtype=torch.long)",
        "tail rows repeat the last token",
    ),
    Fault(
        "02_chunkwise",
        "berrylm_ref/ops/kda_chunk.py",
        "kept[place] = S[at]",
        "kept[place] = x.state[n]",
        "a boundary hands out the initial state",
    ),
    # 03 clamp failure
    Fault(
        "03_clamp_failure",
        "berrylm_ref/ops/kda_chunk.py",
        "SUB_BLOCK = 16",
        "SUB_BLOCK = 1",
        "the exhibit no longer fails",
    ),
    Fault(
        "03_clamp_failure",
        "berrylm_ref/ops/kda_chunk.py",
        "    T = L.new_ones(*L.shape[:-1], 1, 1)  # [..., C, 1, 1]\n",
        "    eye, P = torch.eye(C).to(L), L @ L\n    T = eye - L\n"
        "    for _ in range(5):\n        T, P = T @ (eye + P), P @ P\n    return T\n",
        "Neumann doubling for the inverse",
    ),
    Fault(
        "03_clamp_failure",
        "berrylm_ref/model.py",
        "layer.intra = choice",
        "layer.intra = choices[0]",
        "a list of choices, and the first for every layer",
    ),
    Fault(
        "03_clamp_failure",
        "kernels/berrylm_kernels/kda_scores.py",
        "LIMIT = tl.constexpr(126.0)",
        "LIMIT = tl.constexpr(1000.0)",
        "the exhibit in Triton without its clamp",
    ),
    # 04 KDA in Triton
    Fault(
        "04_kda_in_triton",
        "kernels/berrylm_kernels/kda_front.py",
        "i_h = i_hv // (HV // H)",
        "i_h = i_hv % H",
        "value head j reads key head j % H",
    ),
    Fault(
        "04_kda_in_triton",
        "kernels/berrylm_kernels/kda_front.py",
        "b_g = tl.where(m, log2_decay(b_g, rate, bias[None, :], lower_bound, RAW, BOUND), 0.0)",
        "b_g = log2_decay(b_g, rate, bias[None, :], lower_bound, RAW, BOUND)",
        "rows behind the end go on forgetting",
    ),
    Fault(
        "04_kda_in_triton",
        "kernels/berrylm_kernels/kda_scores.py",
        "decay = tl.where(odd, since, until)",
        "decay = tl.where(odd, until, since)",
        "queries and keys swap their decays",
    ),
    Fault(
        "04_kda_in_triton",
        "kernels/berrylm_kernels/kda_state.py",
        "S * b_d[None, :]",
        "S",
        "the state does not fade from chunk to chunk",
    ),
    # 05 KDA layer
    Fault(
        "05_kda_layer",
        "berrylm_ref/ops/norm.py",
        "return (weight * y * silu(z.to(dtype))).to(x.dtype)",
        "return ((1 + weight) * y * silu(z.to(dtype))).to(x.dtype)",
        "weight of the gated norm as 1 + w",
    ),
    Fault(
        "05_kda_layer",
        "berrylm_ref/ops/conv.py",
        "rows[ends[:, None] + taps]",
        "rows[ends[:, None] + taps - 1]",
        "the window ends one token early",
    ),
    Fault(
        "05_kda_layer",
        "berrylm_ref/cache/batch.py",
        "return windows, states",
        "return windows, None",
        "the state is dropped when more than one token comes",
    ),
    Fault(
        "05_kda_layer",
        "kernels/berrylm_kernels/kda_decode.py",
        "i_h = i_hv // (HV // H)",
        "i_h = i_hv % H",
        "the kernel maps value head j to key head j % H",
    ),
    Fault(
        "05_kda_layer",
        "kernels/berrylm_kernels/kda_decode.py",
        "tl.where(i_p * BG + tl.arange(0, BG) < H, scale, 1.0)",
        "tl.where(i_p * BG < H, scale, 1.0)",
        "the kernel scales the keys that share a program with queries",
    ),
    # 06 full attention
    Fault(
        "06_full_attention",
        "berrylm_ref/ops/attention.py",
        "q, gate = q.chunk(2, -1)",
        "gate, q = q.chunk(2, -1)",
        "the gate is taken for the query",
    ),
    Fault(
        "06_full_attention",
        "berrylm_ref/ops/attention.py",
        "last = torch.arange(S - T + t, S - T + t + rows.shape[0]",
        "last = torch.arange(t, t + rows.shape[0]",
        "mask aligned to the upper left",
    ),
    Fault(
        "06_full_attention",
        "berrylm_ref/ops/rope.py",
        ".to(precision) / rotary_dim",
        ".to(precision) / (4 * rotary_dim)",
        "frequencies over the head size",
    ),
    Fault(
        "06_full_attention",
        "berrylm_ref/ops/rope.py",
        "positions.to(precision)[:, None] / theta**exponent",
        "(positions.to(precision)[:, None] / theta**exponent).to(dtype)",
        "angles in the model's dtype",
    ),
    Fault(
        "06_full_attention",
        "kernels/berrylm_kernels/attention_decode.py",
        "b_v, acc * keep[:, None], input_precision",
        "b_v, acc, input_precision",
        "values keep their weight when a larger score comes",
    ),
    Fault(
        "06_full_attention",
        "kernels/berrylm_kernels/attention_decode.py",
        "tl.exp2(peak - top), tl.exp2(b_lse - top)",
        "tl.exp2(peak - top), tl.where(m_s, 1.0, 0.0)",
        "shares are averaged",
    ),
    Fault(
        "06_full_attention",
        "kernels/berrylm_kernels/attention.py",
        "page_table + (first + i_n).to(tl.int64) * stride_table",
        "page_table + (first + 0 * i_n).to(tl.int64) * stride_table",
        "neighbours that share a gather share the first one's pages",
    ),
    # 07 AttnRes
    Fault(
        "07_attnres",
        "berrylm_ref/model.py",
        "(i + 1) % c.attn_res_block_size == 0",
        "i and i % c.attn_res_block_size == 0",
        "commit one layer late",
    ),
    Fault(
        "07_attnres",
        "berrylm_ref/ops/attnres.py",
        'torch.einsum("np,npd->pd", p, sources)',
        'torch.einsum("np,npd->pd", p, keys)',
        "values normalised",
    ),
    Fault(
        "07_attnres",
        "berrylm_ref/layers.py",
        "h, x = ops.attn_res_norm(",
        "_, x = ops.attn_res_norm(",
        "the residual goes on from the unmixed stream",
    ),
    Fault(
        "07_attnres",
        "berrylm_ref/ops/attnres.py",
        "return h + torch.tanh(gate.to(dtype)).to(h.dtype) * (mix - h) if gated else mix",
        "return (h.to(dtype) + torch.tanh(gate.to(dtype)) * (mix.to(dtype) - h)).to(h.dtype) if gated else mix",
        "the blend is rounded once",
    ),
    Fault(
        "07_attnres",
        "kernels/berrylm_kernels/attnres.py",
        "b_mix = b_mix * keep + b_s * p",
        "b_mix = b_mix + b_s * p",
        "the mix is not rescaled when a larger logit comes",
    ),
    Fault(
        "07_attnres",
        "kernels/berrylm_kernels/attnres.py",
        "tl.where(s < 0.0625, near,",
        "tl.where(s < 0.0, near,",
        "tanh of a small gate loses its digits",
    ),
    # 08 MoE
    Fault(
        "08_moe",
        "berrylm_ref/ops/moe.py",
        "logits = logits.to(compute_dtype(logits))",
        "logits = logits.bfloat16().to(compute_dtype(logits))",
        "scores rounded before the choice",
    ),
    Fault(
        "08_moe",
        "berrylm_ref/ops/moe.py",
        "token, weight = order // top_k,",
        "token, weight = order % len(x),",
        "rows of the wrong tokens",
    ),
    Fault(
        "08_moe",
        "berrylm_ref/ops/moe.py",
        "return silu(gate) * up",
        "return gate * silu(up)",
        "gate and up swapped",
    ),
    Fault(
        "08_moe",
        "berrylm_ref/ops/moe.py",
        "out = out + torch.sigmoid(linear(x, shared_gate)) * shared",
        "out = out + shared",
        "the shared expert without its gate",
    ),
    Fault(
        "08_moe",
        "berrylm_ref/ops/moe.py",
        "if normalise else weights, experts",
        "if not normalise else weights, experts",
        "renormalised when it should not be",
    ),
    Fault(
        "08_moe",
        "kernels/berrylm_kernels/moe_few.py",
        "o_n, o_k, D, F, IS_EVEN) * weight",
        "o_n, o_k, D, F, IS_EVEN)",
        "few tokens: choices added without their weights",
    ),
    Fault(
        "08_moe",
        "kernels/berrylm_kernels/moe_gemm.py",
        "token = tl.load(order + o_m, mask=m_m, other=0) % P",
        "token = tl.load(order + o_m, mask=m_m, other=0) // P",
        "sorted: a pair's slot taken for its token",
    ),
    # 09 whole model
    Fault(
        "09_whole_model",
        "berrylm_ref/cache/batch.py",
        "(ints(contexts) - ints(offsets[:-1]))[owner]",
        "-ints(offsets[:-1])[owner]",
        "positions start again in every piece",
    ),
    Fault(
        "09_whole_model",
        "berrylm_ref/layers.py",
        "h, x = ops.attn_res_norm(",
        "_, x = ops.attn_res_norm(",
        "the residual goes on from the unmixed stream",
    ),
    Fault(
        "09_whole_model",
        "berrylm_ref/cache/batch.py",
        "index_copy_(0, self.slots, windows)",
        "index_copy_(0, self.slots, windows.flip(-1))",
        "windows are stored newest first",
    ),
    Fault(
        "09_whole_model",
        "berrylm_ref/ops/norm.py",
        "y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()",
        "y = y * (y.square().mean(-1, keepdim=True) + 10 * eps).rsqrt()",
        "epsilon of the norms ten times too large",
    ),
    # 10 cache reuse
    Fault(
        "10_cache_reuse",
        "berrylm_ref/cache/pool.py",
        "c.state[:, slot] = c.snapshot_state[:, snapshot]",
        "c.state[:, slot] = 0",
        "a hit restores the windows and forgets the states",
    ),
    Fault(
        "10_cache_reuse",
        "berrylm_ref/cache/batch.py",
        "list(range(offsets[n] + t - taps, offsets[n] + t))",
        "list(range(offsets[n] + t - taps - 1, offsets[n] + t - 1))",
        "windows kept at a boundary are one token old",
    ),
    Fault(
        "10_cache_reuse",
        "berrylm_ref/cache/prefix.py",
        "            self.pool.save(lease.slot, snapshot)\n            lease.snapshots[consumed],",
        "            if old is None: self.pool.save(lease.slot, snapshot)\n            lease.snapshots[consumed],",
        "while decoding only the label of the kept state moves on",
    ),
    Fault(
        "10_cache_reuse",
        "berrylm_ref/cache/prefix.py",
        "wanted = {(count - 1) // grid * grid, ",
        "wanted = {",
        "a prompt that ends on the grid finds nothing the second time",
    ),
    # 11 engine
    Fault(
        "11_engine",
        "berrylm_ref/engine/sampler.py",
        "[to_int64(r.seed) for r in rows]",
        "[to_int64(rows[0].seed) for r in rows]",
        "every row of a batch draws with the first one's seed",
    ),
    Fault(
        "11_engine",
        "berrylm_ref/cache/prefix.py",
        "slot = self.pool.new_slot()",
        "slot = self.pool.slots.take(1)[0]",
        "a slot is handed on with its last owner's state",
    ),
    Fault(
        "11_engine",
        "berrylm_ref/engine/engine.py",
        "                    self.scheduler.release(running)\n                    return",
        "                    self.scheduler.running.remove(running)\n                    return",
        "a cancelled request keeps its pages",
    ),
    Fault(
        "11_engine",
        "berrylm_ref/engine/scheduler.py",
        "return budget - (end - start)",
        "return budget",
        "pieces of prompts are not charged to the budget",
    ),
    Fault(
        "11_engine",
        "berrylm_ref/engine/runner.py",
        "torch.cat([logits, self._prompts(parts[count:])])",
        "torch.cat([self._prompts(parts[count:]), logits])",
        "beside a prompt, the rows of decodes are somebody else's",
    ),
    Fault(
        "11_engine",
        "berrylm_ref/cache/batch.py",
        "torch.cat([logit_rows[:real], logit_rows.new_zeros(len(sequences) - real)])",
        "logit_rows.new_zeros(len(sequences))",
        "every prompt that is padded goes on after its first token",
    ),
    # 12 thinking and tools
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/template.py",
        "found[0][:1] + BREAK + found[0][1:]",
        "found[0]",
        "a user's text becomes a control token",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/template.py",
        'sorted(neighbours, key=lambda turn: turn["order"]) if is_result else neighbours',
        "neighbours",
        "results stand in the order in which they came",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/markup.py",
        '            return text[:at], "", text[at:]',
        "            break",
        "a tag cut in two is text",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/reasoning.py",
        'self._text = self._text.lstrip("\\n")',
        "self._text = self._text.lstrip()",
        "content loses its indent",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/tools.py",
        "stop -= 1  # layout",
        "stop -= final  # layout",
        "a newline of the layout is given before it is known to be one",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/tools.py",
        "return found if found < 0 else end if tag == PARAMETER_CLOSE else at",
        "return end if tag == PARAMETER_CLOSE else found if found < 0 else at",
        "the first closing tag ends a value",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/arguments.py",
        "self._repeated = key in self._keys",
        "self._repeated = False",
        "a key stands twice in the arguments",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/values.py",
        "return text.lower()",
        "return text",
        "True is not JSON",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/grammar.py",
        "if required <= place.used:",
        "if place.used:",
        "a forced call may close without its required parameters",
    ),
    Fault(
        "12_thinking_and_tools",
        "berrylm_ref/chat/forcing.py",
        "fit = [i for i in fit if not any(tag != v.raw[i] and tag.startswith(v.raw[i]) for tag in tags)]",
        "fit = list(fit)",
        "a tag may be spelled letter by letter",
    ),
    # 13 serving and parity
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/server/chat.py",
        '{"cached_tokens": first.cached_tokens or 0}',
        '{"cached_tokens": 0}',
        "the usage says nothing of the cache",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/server/chat.py",
        "request: Choice(request, self.in_reasoning, tools) for",
        "request: Choice(request, True, tools) for",
        "a stream always starts inside the reasoning",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/server/chat.py",
        "forcing.constraint(body.tools, choice, function, parallel, in_reasoning)",
        'forcing.constraint(body.tools, "auto", None, parallel, in_reasoning)',
        "tool_choice is taken and forgotten",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/server/chat_protocol.py",
        "if name not in known and value is not None:",
        "if name not in known and isinstance(value, dict):",
        "an unknown field of a message is ignored",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/parity/score.py",
        "prompt = slice(answer.scored_from - 1, count - 1)",
        "prompt = slice(answer.scored_from, count)",
        "the judge is off by one",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/parity/score.py",
        "base.prompt = delta(low.logprobs[prompt], ref.logprobs[prompt])",
        "base.prompt = delta(ref.logprobs[prompt], ref.logprobs[prompt])",
        "the floor is that of fp32",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/parity/lockstep.py",
        "result = [None if x is None else like(x, y) for x, y in zip(call.outputs, outputs, strict=True)]",
        "result = outputs",
        "in lockstep errors travel on",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/parity/growth.py",
        "y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()",
        "y = y * (y.square().mean(-1, keepdim=True) + 1e5 * eps).rsqrt()",
        "the moved rounding is another norm",
    ),
    Fault(
        "13_serving_and_parity",
        "berrylm_ref/cache/pool.py",
        "c.state[:, slot] = c.snapshot_state[:, snapshot]",
        "c.state[:, slot] = 0",
        "a cache hit starts from empty states",
    ),
    # 14 speed
    Fault(
        "14_speed",
        "berrylm_ref/bench/roofline.py",
        '"KDA": 2.0 * batch * self.slot_bytes',
        '"KDA": 1.0 * batch * self.slot_bytes',
        "states are read and never written back",
    ),
    Fault(
        "14_speed",
        "berrylm_ref/bench/roofline.py",
        "return E * (1 - (1 - k / E) ** batch)",
        "return E",
        "a step reads every expert",
    ),
    Fault(
        "14_speed",
        "berrylm_ref/bench/roofline.py",
        "other += p.nbytes if c.tie_word_embeddings else 0",
        "other += p.nbytes",
        "a step reads the whole embedding",
    ),
    Fault(
        "14_speed",
        "berrylm_ref/bench/roofline.py",
        "mlp_products += p.numel() * c.num_experts_per_tok / c.num_experts",
        "mlp_products += p.numel()",
        "a prompt goes through every expert",
    ),
    Fault(
        "14_speed",
        "berrylm_ref/bench/roofline.py",
        "pairs = tokens * (tokens + 1) / 2",
        "pairs = tokens * tokens",
        "attention is paid for both halves of the pairs",
    ),
    Fault(
        "14_speed",
        "berrylm_ref/engine/memory.py",
        "return 2 * len(config.full_layers) * config.num_key_value_heads",
        "return 2 * len(config.full_layers) * config.num_attention_heads",
        "a key and a value for every query head",
    ),
    Fault(
        "14_speed",
        "berrylm_ref/bench/profile.py",
        "busy += max(0.0, start + length - max(start, end))",
        "busy += length",
        "kernels that overlap are busy twice",
    ),
    Fault(
        "14_speed",
        "berrylm_ref/bench/targets.py",
        'published / ours if name == "tpot_ms" else ours / published',
        "ours / published",
        "a longer time a token counts as better",
    ),
    # 15 two GPUs and more
    Fault(
        "15_two_gpus_and_more",
        "berrylm_ref/sharding.py",
        '"linear_attn.in_proj_qkv.weight": Cut(0, qkv)',
        '"linear_attn.in_proj_qkv.weight": ROWS',
        "q, k and v are cut as one matrix",
    ),
    Fault(
        "15_two_gpus_and_more",
        "berrylm_ref/sharding.py",
        '"self_attn.o_proj.bias": FIRST',
        '"self_attn.o_proj.bias": SAME',
        "a bias is added by every rank",
    ),
    Fault(
        "15_two_gpus_and_more",
        "berrylm_ref/sharding.py",
        "part = self.rank * parts // self.size",
        "part = self.rank % parts",
        "query heads beside another group's KV head",
    ),
    Fault(
        "15_two_gpus_and_more",
        "berrylm_ref/sharding.py",
        "y = self.reduce(ops.moe(x, *weights, **options))",
        "y = self.reduce(ops.moe(x, *weights, residual=residual, **options)) - residual",
        "the residual is added by every rank",
    ),
    Fault(
        "15_two_gpus_and_more",
        "berrylm_ref/engine/mirror.py",
        'self.line.later("clear", slot)',
        "pass",
        "the other rank starts a sequence from the last one's states",
    ),
    Fault(
        "15_two_gpus_and_more",
        "berrylm_ref/engine/mirror.py",
        'self.line.later("restore", snapshot, slot)',
        "pass",
        "the other rank has no cache hit",
    ),
]
